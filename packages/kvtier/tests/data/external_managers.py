"""Managers that are right, and managers that are wrong in one way each; named by module path in tests."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

Items = Sequence[tuple[bytes, memoryview]]


class Shelf:
    """A right one, in memory. `records` may be shared by several."""

    def __init__(self, records: dict[bytes, bytes] | None = None) -> None:
        self.records = {} if records is None else records
        self.closed = False

    def lookup(self, names: Sequence[bytes]) -> int:
        return next((n for n, name in enumerate(names) if name not in self.records), len(names))

    def load(self, items: Items) -> list[bool]:
        return [self._fill(name, into) for name, into in items]

    def store(self, items: Sequence[tuple[bytes, bytes | None, memoryview]]) -> list[bool]:
        self.records.update((name, bytes(data)) for name, _, data in items)
        return [True] * len(items)

    def close(self) -> None:
        self.closed = True

    def _fill(self, name: bytes, into: memoryview) -> bool:
        record = self.records.get(name, b"")
        if len(record) != len(into):
            return False
        into[:] = record
        return True


class Scripted(Shelf):
    """Does as it is told for so many calls of load and lookup, then what is right."""

    def __init__(self, records: dict[bytes, bytes], wrong: Callable[[], Any], times: list[int]) -> None:
        super().__init__(records)
        self.wrong = wrong
        self.times = times

    def load(self, items: Items) -> list[bool]:
        return self._answer(lambda: super(Scripted, self).load(items))

    def lookup(self, names: Sequence[bytes]) -> int:
        return self._answer(lambda: super(Scripted, self).lookup(names))

    def _answer(self, right: Callable[[], Any]) -> Any:
        if self.times[0]:
            self.times[0] -= 1
            return self.wrong()
        return right()


class Liar(Shelf):
    """Says that it filled buffers, and fills them with bytes of something else."""

    def _fill(self, name: bytes, into: memoryview) -> bool:
        for n in range(0, len(into), 97):
            into[n] = n % 251
        return True


class Swapper(Shelf):
    """Gives every block another one's bytes, frame and all."""

    def _fill(self, name: bytes, into: memoryview) -> bool:
        into[:] = next(record for other, record in self.records.items() if other != name)
        return True


class Late(Shelf):
    """Hangs in load, and fills the buffer long after it was given up."""

    def __init__(self, records: dict[bytes, bytes], gate: threading.Event, filled: threading.Event) -> None:
        super().__init__(records)
        self.gate = gate
        self.filled = filled

    def load(self, items: Items) -> list[bool]:
        self.gate.wait(30.0)
        for _, into in items:
            into[:] = b"\xff" * len(into)
        self.filled.set()
        return [True] * len(items)


class Picky(Shelf):
    """Needs options."""

    def __init__(self, *, url: str, depth: int = 1) -> None:
        super().__init__()
        self.url = url
        self.depth = depth


class Half:
    """No manager: half of the methods."""

    def lookup(self, names: Sequence[bytes]) -> int:
        return 0

    def close(self) -> None:
        pass


def leave() -> None:
    sys.exit(3)
