"""What a user asks of the tiers, as texts or as Python values.

ram=40GiB,disk=/path:200GiB          parts of a text are divided by commas; several texts add up
disk=/path:200GiB,compress=zstd
policy=s3fifo,admission=reused,tenant_share=0.5
external=package.module:Class,{"url": "http://…"}        its options follow as JSON, if it has any

parse_tiers("ram=40GiB,disk=/path:200GiB")
parse_tiers(["ram=40GiB", 'external=my.store:Manager,{"url": "…"}'])
parse_tiers({"ram": 40 << 30, "disk": {"folder": "/path", "size": "200GiB"}, "policy": "s3fifo"})
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lamella.kvtier.errors import TierConfigError

POLICIES = ("lru", "s3fifo")
ADMISSIONS = ("all", "reused")
COMPRESSIONS = ("none", "zstd")
STORE_DTYPES = ("same", "fp8")
KEYS = ("ram", "disk", "external", "policy", "admission", "tenant_share", "compress", "store_dtype")
EXTERNAL_KEYS = ("class", "name", "options")

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("KMGTP", start=1)
    for ending, base in (("iB", 1024), ("B", 1000))
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")
_JSON = json.JSONDecoder()


@dataclass(frozen=True)
class DiskConfig:
    """A folder and how much of it may be used."""

    folder: Path
    capacity_bytes: int


@dataclass(frozen=True)
class ExternalConfig:
    """A manager by its module path."""

    module_path: str
    """package.module:Class"""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of the class."""
    name: str = ""
    """Of its tier in figures; the class's name unless two have the same."""


@dataclass(frozen=True)
class TiersConfig:
    """Which tiers there are below the device, and how they behave."""

    ram_bytes: int = 0
    """0: no host tier, and then nothing below it."""
    disk: DiskConfig | None = None
    externals: tuple[ExternalConfig, ...] = ()
    policy: str = "lru"
    """What the host tier evicts."""
    admission: str = "all"
    """Which blocks are worth the host tier: all, or those that were used a second time."""
    tenant_share: float = 1.0
    """Share of the host tier that the blocks of one tenant may take: of requests with the same cache salt."""
    compress: str = "none"
    """Of records on disk."""
    store_dtype: str = "same"
    """Of records on disk: as computed, or fp8 with one scale per layer, tensor and head of a block."""

    @property
    def enabled(self) -> bool:
        return self.ram_bytes > 0


def parse_tiers(wanted: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]]) -> TiersConfig:
    """What these texts or mappings say together.

    Raises TierConfigError, which names the text, the value that is wrong, and what would do.
    """
    parts = [wanted] if isinstance(wanted, (str, Mapping)) else list(wanted)
    values: dict[str, Any] = {}
    externals: list[ExternalConfig] = []
    for part in parts:
        for key, value, text in _settings(part):
            if key == "external":
                externals.append(_external(value, text))
                continue
            if key in values:
                raise TierConfigError(f"{text}: {key} is given twice; give it once")
            values[key] = _value(key, value, text)
    config = TiersConfig(externals=_named(externals), **{_FIELDS.get(key, key): values[key] for key in values})
    text = _shown(wanted)
    if not config.ram_bytes and (config.disk is not None or config.externals):
        below = "disk" if config.disk is not None else "external"
        raise TierConfigError(
            f"{text}: {below} without ram: blocks pass through the host's memory; add ram=SIZE, such as ram=4GiB"
        )
    if not config.ram_bytes and values:
        raise TierConfigError(f"{text}: {next(iter(values))} without ram; add ram=SIZE, such as ram=4GiB")
    if config.disk is None and (config.compress, config.store_dtype) != ("none", "same"):
        key = "compress" if config.compress != "none" else "store_dtype"
        raise TierConfigError(f"{text}: {key} without disk; add disk=FOLDER:SIZE or leave it out")
    return config


def parse_bytes(value: str | int, text: str) -> int:
    """40GiB, 200GB, 1.5TiB, 4096 → bytes. text: what it is part of, for the error."""
    if isinstance(value, int) and not isinstance(value, bool):
        size = float(value)
    else:
        match = _SIZE.fullmatch(value) if isinstance(value, str) else None
        units = {unit.lower(): factor for unit, factor in _UNITS.items()}
        if match is None or match[2].lower() not in units:
            raise TierConfigError(f"{text}: size {value!r} is not a number with a unit; write 40GiB, 500MiB or 200GB")
        size = float(match[1]) * units[match[2].lower()]
    if size < 1:
        raise TierConfigError(f"{text}: size {value!r} is nothing; leave the tier out, or give it at least some MiB")
    return int(size)


_FIELDS = {"ram": "ram_bytes"}


def _settings(part: Any) -> Iterator[tuple[str, Any, str]]:
    """(key, value, text for errors) of a text or a mapping."""
    if isinstance(part, Mapping):
        for key, value in part.items():
            _check_key(key, repr(dict(part)))
            many = value if key == "external" and isinstance(value, (list, tuple)) else [value]
            for one in many:
                yield key, one, f"{key}={_shown(one)}"
        return
    if not isinstance(part, str):
        raise TierConfigError(
            f"{part!r}: tiers are described by texts or mappings, such as 'ram=4GiB' or {{'ram': '4GiB'}}"
        )
    at = 0
    while at < len(part):
        end = _end_of_part(part, at)
        piece = part[at:end].strip()
        at = end + 1
        key, equals, value = piece.partition("=")
        if not equals:
            raise TierConfigError(f"{part!r}: {piece!r} is not KEY=VALUE; keys are {', '.join(KEYS)}")
        _check_key(key.strip(), repr(part))
        if key.strip() != "external":
            yield key.strip(), value.strip(), repr(part)
            continue
        options: Any = {}
        rest = part[at:].lstrip()
        if rest.startswith("{"):
            start = len(part) - len(rest)
            try:
                options, at = _JSON.raw_decode(part, start)
            except json.JSONDecodeError as error:
                raise TierConfigError(
                    f"{part!r}: the options behind {value.strip()} are no JSON ({error.msg} at character "
                    f'{error.pos}); write external=package.module:Class,{{"key": "value"}}'
                ) from None
            left = part[at:].lstrip()
            if left and not left.startswith(","):
                raise TierConfigError(f"{part!r}: {left!r} follows the options of {value.strip()}; put a comma between")
            at = len(part) - len(left) + 1
        yield "external", {"class": value.strip(), "options": options}, repr(part)


def _end_of_part(text: str, start: int) -> int:
    end = text.find(",", start)
    return len(text) if end < 0 else end


def _check_key(key: Any, text: str) -> None:
    if key not in KEYS:
        raise TierConfigError(f"{text}: there is no key {key!r}; keys are {', '.join(KEYS)}")


def _value(key: str, value: Any, text: str) -> Any:
    if key == "ram":
        return parse_bytes(value, text)
    if key == "disk":
        return _disk(value, text)
    if key == "tenant_share":
        return _share(key, value, text)
    choices = {"policy": POLICIES, "admission": ADMISSIONS, "compress": COMPRESSIONS, "store_dtype": STORE_DTYPES}[key]
    if value not in choices:
        raise TierConfigError(f"{text}: {key} {value!r} is not known; choose one of {', '.join(choices)}")
    return value


def _share(key: str, value: Any, text: str) -> float:
    try:
        share = float(value)
    except (TypeError, ValueError):
        share = 0.0
    if not 0.0 < share <= 1.0:
        raise TierConfigError(f"{text}: {key} {value!r} is no share; give a number above 0, at most 1")
    return share


def _disk(value: Any, text: str) -> DiskConfig:
    if isinstance(value, DiskConfig):
        return value
    if isinstance(value, Mapping):
        if set(value) != {"folder", "size"}:
            raise TierConfigError(
                f"{text}: disk has the keys {', '.join(map(str, value)) or 'none'}; give folder and size"
            )
        folder, size = str(value["folder"]), value["size"]
    else:
        folder, colon, size = str(value).rpartition(":")
        if not colon:
            raise TierConfigError(
                f"{text}: disk {value!r} has no size; write disk=FOLDER:SIZE, such as disk=/data/kv:200GiB"
            )
    if not folder:
        raise TierConfigError(
            f"{text}: disk {value!r} has no folder; write disk=FOLDER:SIZE, such as disk=/data/kv:200GiB"
        )
    return DiskConfig(Path(folder).expanduser(), parse_bytes(size, text))


def _external(value: Any, text: str) -> ExternalConfig:
    if isinstance(value, ExternalConfig):
        return value
    if isinstance(value, str):
        value = {"class": value}
    if not isinstance(value, Mapping) or "class" not in value or not set(value) <= set(EXTERNAL_KEYS):
        raise TierConfigError(
            f"{text}: external {value!r} is not understood; give package.module:Class, or class with options and name"
        )
    module_path, options = value["class"], value.get("options", {})
    module, colon, name = str(module_path).partition(":")
    if not (module and colon and name):
        raise TierConfigError(f"{text}: external {module_path!r} names no class; write external=package.module:Class")
    if not isinstance(options, Mapping):
        raise TierConfigError(f"{text}: the options of {module_path} are {options!r}; give them as an object, {{…}}")
    return ExternalConfig(str(module_path), dict(options), str(value.get("name", "")))


def _named(externals: Sequence[ExternalConfig]) -> tuple[ExternalConfig, ...]:
    """Each with a name of its own."""
    named: list[ExternalConfig] = []
    taken = {"host", "disk"}
    for external in externals:
        wanted = external.name or external.module_path.rpartition(":")[2]
        name, number = wanted, 1
        while name in taken:
            if external.name:
                raise TierConfigError(f"external {external.module_path}: the name {name!r} is taken; give it another")
            number += 1
            name = f"{wanted}-{number}"
        taken.add(name)
        named.append(ExternalConfig(external.module_path, external.options, name))
    return tuple(named)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)
