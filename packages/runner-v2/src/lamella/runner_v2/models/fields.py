"""Typed access to a JSON object. Every error names file, field and value, and what would do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from lamella.runner_v2.errors import CheckpointError, UnsupportedError

T = TypeVar("T")

MAX_INTEGER = 2**31 - 1
"""Widths, counts and positions beyond it are no model's; arithmetic on them would end in errors that name nothing."""


class Fields:
    """One JSON object of a checkpoint. A default of None makes a field that may be missing or null."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = values
        self.source = source
        """The file, and the path inside it."""

    def has(self, name: str) -> bool:
        """Present and not null."""
        return self.values.get(name) is not None

    def integer(self, name: str, default: int | None = None, minimum: int = 1, maximum: int = MAX_INTEGER) -> int:
        """A whole number in [minimum, maximum]; missing or null gives the default, CheckpointError without one."""
        value = self._get(name, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.wrong(name, f"needed: a whole number of at least {minimum}")
        if value > maximum:
            raise self.wrong(name, f"needed: a whole number of at most {maximum}")
        return value

    def optional_integer(self, name: str, default: int | None = None) -> int | None:
        """A positive whole number or None. A field that is present and null is None; a missing one is the default."""
        if name in self.values and self.values[name] is None:
            return None
        return self.integer(name) if self.has(name) else default

    def number(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if not _is_number(value):
            raise self.wrong(name, "needed: a finite number")
        return float(value)

    def positive(self, name: str, default: float | None = None) -> float:
        """A number above 0."""
        value = self.number(name, default)
        if value <= 0:
            raise self.wrong(name, "needed: a positive number")
        return value

    def optional_number(self, name: str) -> float | None:
        return self.number(name) if self.has(name) else None

    def boolean(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "needed: true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.wrong(name, "needed: a string")
        return value

    def section(self, name: str) -> Fields | None:
        """A nested object, or None."""
        if not self.has(name):
            return None
        value = self.values[name]
        if not isinstance(value, Mapping):
            raise self.wrong(name, "needed: an object")
        return Fields(value, f"{self.source}: {name}")

    def integers(self, name: str) -> tuple[int, ...]:
        """A whole number or a list of them; missing or null is ()."""
        value = self.values.get(name)
        items = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item <= MAX_INTEGER for item in items):
            raise self.wrong(name, f"needed: a whole number in [0, {MAX_INTEGER}] or a list of them")
        return tuple(items)

    def numbers(self, name: str) -> tuple[float, ...] | None:
        if not self.has(name):
            return None
        value = self.values[name]
        if not isinstance(value, list) or not all(_is_number(item) for item in value):
            raise self.wrong(name, "needed: a list of finite numbers")
        return tuple(float(item) for item in value)

    def texts(self, name: str) -> tuple[str, ...] | None:
        if not self.has(name):
            return None
        value = self.values[name]
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(name, "needed: a list of strings")
        return tuple(value)

    def choice(self, name: str, choices: Mapping[str, T], default: str | None = None) -> T:
        """The value that a string stands for; UnsupportedError listing the known ones."""
        value = self.text(name, default)
        if value not in choices:
            raise self.unsupported(name, f"supported: {', '.join(choices)}")
        return choices[value]

    def refuse_unless(self, name: str, *neutral: object) -> None:
        """UnsupportedError if the field has a value other than null and the given ones."""
        if self.has(name) and not any(self.values[name] == value for value in neutral):
            allowed = ", ".join(map(repr, neutral)) or "leaving it out"
            raise self.unsupported(name, f"supported: {allowed}")

    def wrong(self, name: str, needed: str) -> CheckpointError:
        shown = repr(self.values[name])[:80] if name in self.values else "missing"
        return CheckpointError(f"{self.source}: {name} is {shown}; {needed}")

    def unsupported(self, name: str, supported: str) -> UnsupportedError:
        return UnsupportedError(
            f"{self.source}: {name} = {repr(self.values.get(name))[:80]} is not supported; {supported}"
        )

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is None:
            if default is None:
                raise self.wrong(name, "this model family needs it")
            return default
        return value


def _is_number(value: object) -> bool:
    """A number that a float holds; JSON as Python reads it knows NaN, Infinity and integers of any length."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
