"""Device rows: which are free, and who owns one for the how-manieth time."""

from __future__ import annotations


class Rows:
    """Rows [0, max_num_rows). A row's generation is raised each time it gets an owner, so that results computed for
    the owner before are recognised."""

    __slots__ = ("_free", "_generations", "_removed")

    def __init__(self, max_num_rows: int) -> None:
        self._free = list(range(max_num_rows - 1, -1, -1))
        self._generations = [0] * max_num_rows
        self._removed: list[tuple[int, int]] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> tuple[int, int]:
        """A free row and its new generation, from 1 on."""
        row = self._free.pop()
        self._generations[row] += 1
        return row, self._generations[row]

    def give_back(self, row: int, generation: int) -> None:
        """The row is free from the next step on, which will say so to the runner."""
        assert self._generations[row] == generation, f"row {row} has another owner"
        assert row not in self._free
        self._free.append(row)
        self._removed.append((row, generation))

    def take_removed(self) -> tuple[tuple[int, int], ...]:
        """(row, generation) given back since the last call."""
        if not self._removed:
            return ()
        removed = tuple(self._removed)
        self._removed.clear()
        return removed
