"""Device blocks that nobody holds: cached as long as nobody needs their space, or of no use any more.

    last reference gone ─▶ FILLING: empty at once
                        ─▶ SEALED, listed: cached, after all that hangs on it; unless another block has the same
                        ─▶ SEALED, not listed: empty at once

Every change of what can be hit is noted as an event here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from lamella.kvtier.control.groups import GroupBlocks
from lamella.kvtier.control.pool import FILLING
from lamella.kvtier.events import BlockRemoved, Event
from lamella.kvtier.keys import Key
from lamella.kvtier.layout import NULL_BLOCK
from lamella.kvtier.stats import Counters


class Shelf:
    """Puts blocks back, and takes contents out of the index."""

    __slots__ = ("_counters", "_events", "max_events", "num_released")

    def __init__(self, counters: Counters, max_events: int) -> None:
        """max_events: how many events to keep for take_events(); 0: none are made."""
        self._counters = counters
        self.max_events = max_events
        self.num_released = 0
        """Blocks that became free so far."""
        self._events: deque[Event] = deque()

    def take_events(self) -> list[Event]:
        """Events since the last call, oldest first."""
        events = list(self._events)
        self._events.clear()
        return events

    def drop(self, group: GroupBlocks, block: int, last_step: int) -> None:
        """Drop one reference; the block is cached or empty if that was the last."""
        pool = group.pool
        if not pool.unref(block, last_step):
            return
        self.num_released += 1
        if not pool.pins[block]:
            self._put_back(group, block)

    def drop_all(self, group: GroupBlocks, blocks: Sequence[int], last_step: int) -> None:
        """drop() of each, in this order: sequences have hundreds of blocks, and whoever waits for the last token of one
        waits for this."""
        pool, index = group.pool, group.index
        released = pool.unref_all(blocks, last_step)
        self.num_released += len(released)
        if index.any_copies:  # what is done for one block may touch others
            for block in released:
                if not pool.pins[block]:
                    self._put_back(group, block)
            return
        state, pins, key_of = pool.state, pool.pins, index.key_of
        kept = []
        for block in released:
            if pins[block]:
                continue
            if state[block] == FILLING or key_of(block) is None:
                pool.discard(block)
            else:
                kept.append(block)
        pool.keep_all(kept)

    def _put_back(self, group: GroupBlocks, block: int) -> None:
        if group.pool.state[block] == FILLING:
            group.pool.discard(block)
        else:
            self.shelve(group, block)

    def shelve(self, group: GroupBlocks, block: int) -> None:
        """A sealed block that nobody holds: cached if it can be hit and is the only copy of its content."""
        pool, index = group.pool, group.index
        key = index.key_of(block)
        if key is None:
            pool.discard(block)
        elif index.has_copies(key):
            self._leave_to_copies(group, block, key)
            pool.discard(block)
        else:
            pool.keep(block)

    def _leave_to_copies(self, group: GroupBlocks, block: int, key: Key) -> None:
        """Unlist a block; the others with its content stand in for it, as recent as it would be."""
        group.index.remove(block)
        for other in group.index.blocks(key):
            if group.pool.is_candidate(other):
                group.pool.refresh(other)

    def refresh_prefix(self, group: GroupBlocks, key: Key | None) -> None:
        """A block became a candidate later than its prefix: let the prefix be reused later still."""
        index, pool = group.index, group.pool
        while key is not None:
            copies = index.blocks(key)
            if not all(pool.is_candidate(block) for block in copies):
                return  # in use, and so is everything left of it
            for block in copies:
                pool.refresh(block)
            key = index.parent_of(copies[0])

    def disown(self, group: GroupBlocks, table: list[int]) -> None:
        """Unlist what only this table's owner uses, and everything that hangs on it."""
        index = group.index
        doomed: set[Key] = set()
        for block in reversed(table):
            key = index.key_of(block) if block != NULL_BLOCK and group.pool.refs[block] == 1 else None
            if key is None:
                continue
            if index.has_copies(key):
                self._leave_to_copies(group, block, key)  # somebody else computed the same on his own
            else:
                doomed.add(key)
        self.forget_all(group, doomed)

    def forget_all(self, group: GroupBlocks, keys: set[Key]) -> None:
        self.unlist(group, group.index.descendants(keys) if group.chained else keys)

    def unlist(self, group: GroupBlocks, keys: set[Key]) -> None:
        """These contents can no longer be hit; blocks that nobody holds become empty."""
        index, pool = group.index, group.pool
        for key in keys:
            for block in index.blocks(key):
                index.remove(block)
                if not pool.refs[block] and not pool.pins[block]:
                    pool.discard(block)
            if self.max_events:
                self.note(BlockRemoved(group.idx, key))

    def note_evictions(self, group: GroupBlocks) -> None:
        self._counters.evicted_blocks += len(group.evicted)
        if self.max_events:
            for key in group.evicted:
                self.note(BlockRemoved(group.idx, key))
        group.evicted.clear()

    def note(self, event: Event) -> None:
        if len(self._events) >= self.max_events:
            self._events.popleft()
            self._counters.dropped_events += 1
        self._events.append(event)
