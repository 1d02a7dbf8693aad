"""Least recently used leaf first.

Only a hit's last slot is marked as used. What it hangs on was used at that time too: it takes over the moment when the
slot above it is evicted, so it is exact, and a hit costs O(1).
"""

from __future__ import annotations

from collections.abc import Iterator

from lamella.kvtier.control.eviction.ranked import RankedSlots
from lamella.kvtier.keys import Key


class LeafLru:
    """See LeafEviction."""

    __slots__ = ("_now", "_open", "_parent_of", "_used_at")

    def __init__(self, num_slots: int, parent_of: list[int]) -> None:
        self._parent_of = parent_of
        self._open = RankedSlots(num_slots)
        self._used_at = [0] * num_slots
        self._now = 0

    def insert(self, slot: int, key: Key) -> None:
        self._now += 1
        self._used_at[slot] = self._now

    def use(self, slot: int) -> None:
        self._now += 1
        self._used_at[slot] = self._now
        if slot in self._open:
            self._open.offer(slot, self._now)

    def offer(self, slot: int) -> None:
        self._open.offer(slot, self._used_at[slot])

    def withhold(self, slot: int) -> None:
        self._open.withhold(slot)

    def forget(self, slot: int) -> None:
        self._open.withhold(slot)
        self._hand_down(slot)

    def pick(self) -> int:
        slot = self._open.pick()
        self._hand_down(slot)
        return slot

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, slot: int) -> bool:
        return slot in self._open

    def __iter__(self) -> Iterator[int]:
        return iter(self._open)

    def _hand_down(self, slot: int) -> None:
        parent = self._parent_of[slot]
        if parent and self._used_at[parent] < self._used_at[slot]:
            self._used_at[parent] = self._used_at[slot]
            if parent in self._open:
                self._open.offer(parent, self._used_at[slot])
