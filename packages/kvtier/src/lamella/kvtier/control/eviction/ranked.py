"""Slots that may be evicted, by rank: the lowest first. Every operation O(log n) or better.

A slot keeps its rank while it may not be evicted (pinned, or others hang on it), so it comes back where it belongs and
not as the most recent. Entries of the heap are rank · n + slot; an entry that no longer holds is skipped when met.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush


class RankedSlots:
    """A set of slots with ranks."""

    __slots__ = ("_entry_of", "_heap", "_len", "_num_slots")

    def __init__(self, num_slots: int) -> None:
        """Slots are [0, num_slots)."""
        self._num_slots = num_slots
        self._heap: list[int] = []
        self._entry_of = [-1] * num_slots
        self._len = 0

    def offer(self, slot: int, rank: int) -> None:
        """The slot may be evicted; if it could already, its rank is this one from now on."""
        entry = rank * self._num_slots + slot
        known = self._entry_of[slot]
        if entry == known:
            return
        self._len += known < 0
        self._entry_of[slot] = entry
        heappush(self._heap, entry)
        if len(self._heap) > 64 + 3 * self._num_slots:
            self._heap = [e for e in self._entry_of if e >= 0]
            heapify(self._heap)

    def withhold(self, slot: int) -> None:
        """The slot may not be evicted now. Nothing happens if it could not before."""
        if self._entry_of[slot] >= 0:
            self._entry_of[slot] = -1
            self._len -= 1

    def pick(self) -> int:
        """Remove and return the slot of the lowest rank. There must be one."""
        while True:
            entry = heappop(self._heap)
            slot = entry % self._num_slots
            if self._entry_of[slot] == entry:
                self._entry_of[slot] = -1
                self._len -= 1
                return slot

    def __len__(self) -> int:
        return self._len

    def __contains__(self, slot: int) -> bool:
        return self._entry_of[slot] >= 0

    def __iter__(self) -> Iterator[int]:
        """In order of rank. Only for checks."""
        return (entry % self._num_slots for entry in sorted(e for e in self._entry_of if e >= 0))
