"""S3-FIFO: a small queue for newcomers, a main queue for what came back, a ghost of what left too early.

    new ─▶ small (10 %) ──── second hit ────▶ main ──┐ used since: once more round
             │ not used                        ▲     │
             ▼                                 │     └─▶ evicted
           ghost (keys only) ── comes again ───┘

One-off prompts go through the small queue and leave main alone. Queues are ordered by when a slot entered them; only
leaves are evicted, so a slot on which others hang waits at its place. After "FIFO queues are all you need for cache
eviction" (Yang et al., SOSP 2023).
"""

from __future__ import annotations

from collections.abc import Iterator

from lamella.kvtier.control.eviction.ranked import RankedSlots
from lamella.kvtier.keys import Key

SMALL_SHARE = 0.1
PROMOTE_AT = 2
"""Hits in the small queue that lead to main."""
MAX_HITS = 3
_SMALL, _MAIN = 1, 2


class S3Fifo:
    """See LeafEviction."""

    __slots__ = (
        "_entered",
        "_ghost",
        "_hits",
        "_key_of",
        "_main",
        "_max_ghosts",
        "_max_small",
        "_now",
        "_num_small",
        "_parent_of",
        "_queue",
        "_small",
    )

    def __init__(self, num_slots: int, parent_of: list[int]) -> None:
        self._parent_of = parent_of
        self._small = RankedSlots(num_slots)
        self._main = RankedSlots(num_slots)
        self._max_small = max(1, int(SMALL_SHARE * (num_slots - 1)))
        self._max_ghosts = max(1, num_slots - 1 - self._max_small)
        self._num_small = 0
        self._queue = bytearray(num_slots)
        self._hits = bytearray(num_slots)
        self._entered = [0] * num_slots
        self._key_of: list[Key] = [b""] * num_slots
        self._ghost: dict[Key, None] = {}
        self._now = 0

    def insert(self, slot: int, key: Key) -> None:
        self._hits[slot] = 0
        self._key_of[slot] = key
        if key in self._ghost:
            del self._ghost[key]
            self._enter(slot, _MAIN)
        else:
            self._num_small += 1
            self._enter(slot, _SMALL)

    def use(self, slot: int) -> None:
        # Everything it hangs on was used as well. Where the count is full it is full further down.
        hits, parent_of = self._hits, self._parent_of
        while slot and hits[slot] < MAX_HITS:
            hits[slot] += 1
            slot = parent_of[slot]

    def offer(self, slot: int) -> None:
        (self._small if self._queue[slot] == _SMALL else self._main).offer(slot, self._entered[slot])

    def withhold(self, slot: int) -> None:
        (self._small if self._queue[slot] == _SMALL else self._main).withhold(slot)

    def forget(self, slot: int) -> None:
        self.withhold(slot)
        self._leave(slot)

    def pick(self) -> int:
        small, main, hits = self._small, self._main, self._hits
        while True:
            if small and (self._num_small > self._max_small or not main):
                slot = small.pick()
                if hits[slot] >= PROMOTE_AT:
                    self._num_small -= 1
                    hits[slot] = 0
                    self._enter(slot, _MAIN)
                    main.offer(slot, self._entered[slot])
                    continue
                self._haunt(self._key_of[slot])
            else:
                slot = main.pick()
                if hits[slot]:
                    hits[slot] -= 1
                    self._enter(slot, _MAIN)
                    main.offer(slot, self._entered[slot])
                    continue
            self._leave(slot)
            return slot

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def __contains__(self, slot: int) -> bool:
        return slot in self._small or slot in self._main

    def __iter__(self) -> Iterator[int]:
        yield from self._small
        yield from self._main

    def _enter(self, slot: int, queue: int) -> None:
        self._now += 1
        self._entered[slot] = self._now
        self._queue[slot] = queue

    def _leave(self, slot: int) -> None:
        self._num_small -= self._queue[slot] == _SMALL
        self._queue[slot] = 0

    def _haunt(self, key: Key) -> None:
        self._ghost[key] = None
        if len(self._ghost) > self._max_ghosts:
            del self._ghost[next(iter(self._ghost))]
