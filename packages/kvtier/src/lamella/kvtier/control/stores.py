"""Copies from the host to the tiers below it: written through as host slots become ready, in order of the chain.

A block is stored behind the block before it, or beside it. What the queue has no room for is left out; it is wanted
again when the block before it is stored, or its chain is used. Reads never wait for writes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from lamella.kvtier.control.prefix_index import first_missing
from lamella.kvtier.control.transfers import Shared
from lamella.kvtier.jobs import TicketId, TicketResult
from lamella.kvtier.keys import Key


class Stores:
    """All stores in flight, and what waits for its turn."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        names = shared.plan.slow_tiers
        self._wanted: dict[str, deque[tuple[int, Key]]] = {name: deque() for name in names}
        self._storing: dict[str, set[tuple[int, Key]]] = {name: set() for name in names}
        self.copies: dict[TicketId, tuple[str, int, int, Key, Key | None, int]] = {}
        """(tier, group, host slot, key, parent, epoch)."""
        self._epoch = 0

    @property
    def num_copies(self) -> int:
        return len(self.copies)

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._wanted.values()))

    def queue_depth(self, name: str) -> int:
        return len(self._storing[name])

    def want(self, idx: int, slot: int) -> None:
        """A host slot's content should be below, too. Nothing happens if it has none any more."""
        key = self._shared.host[idx].key_of[slot]
        if key is None:
            return
        for name, wanted in self._wanted.items():
            if key in self._shared.books[name][idx].listed:
                continue
            if len(wanted) >= self._shared.plan.max_waiting:
                self._shared.stats[name].refuse("queue")
            else:
                wanted.append((idx, key))

    def want_chain(self, keys: Sequence[Key], num_blocks: int) -> None:
        """A chain was used: what was left out of it is wanted again, from the first block that is missing below."""
        for name, books in self._shared.books.items():
            for idx, book in enumerate(books):
                host = self._shared.host[idx]
                if host.chained:
                    n = first_missing(keys, num_blocks, book)
                    if n < num_blocks and keys[n] in host and (idx, keys[n]) not in self._storing[name]:
                        self._want_next(name, idx, keys[n])

    def pump(self) -> None:
        """Start what waits, as far as the queues have room."""
        for name, wanted in self._wanted.items():
            storing = self._storing[name]
            while wanted and len(storing) < self._shared.plan.max_storing:
                self._start(name, *wanted.popleft())

    def complete(self, result: TicketResult) -> None:
        """One of the copies has ended."""
        name, idx, slot, key, parent, epoch = self.copies.pop(result.ticket)
        shared = self._shared
        host = shared.host[idx]
        if epoch == self._epoch:
            self._storing[name].remove((idx, key))
            if result.ok:
                shared.books[name][idx].add(key, parent)
                if host.slot_of.get(key) == slot and host.has_children(slot):
                    self._want_children(name, idx, slot)
            else:
                shared.count_failure(name, result)
        if result.ok:
            shared.stats[name].bytes_in += host.slot_bytes
        host.unpin(slot)

    def reset(self) -> None:
        """What is under way does not count."""
        self._epoch += 1
        for name in self._wanted:
            self._wanted[name].clear()
            self._storing[name].clear()

    def add_pins(self, host: Sequence[list[int]]) -> None:
        """Count its pins, for checks."""
        for _, idx, slot, _, _, _ in self.copies.values():
            host[idx][slot] += 1

    # ---- private ---------------------------------------------------------------------------------------------------

    def _start(self, name: str, idx: int, key: Key) -> None:
        shared = self._shared
        host, book, storing = shared.host[idx], shared.books[name][idx], self._storing[name]
        slot = host.listed.get(key)
        if slot is None:
            shared.stats[name].refuse("evicted")
            return
        if key in book.listed or (idx, key) in storing:
            return
        parent = host.parent_key_of[slot]
        if host.chained and parent is not None and parent not in book.listed and (idx, parent) not in storing:
            shared.stats[name].refuse("prefix")  # comes again when that is stored
            return
        host.pin(slot)
        storing.add((idx, key))
        source, target = shared.host_places[idx][slot], shared.place(name, idx)
        ticket = shared.copy(key, source, target, host.slot_bytes, -1, parent)
        self.copies[ticket] = (name, idx, slot, key, parent, self._epoch)

    def _want_children(self, name: str, idx: int, slot: int) -> None:
        host, book, storing = self._shared.host[idx], self._shared.books[name][idx], self._storing[name]
        for child in host.children(slot):
            key = host.key_of[child]
            if key in host.listed and (idx, key) not in storing and key not in book:
                assert key is not None
                self._want_next(name, idx, key)

    def _want_next(self, name: str, idx: int, key: Key) -> None:
        if len(self._wanted[name]) < self._shared.plan.max_waiting:
            self._wanted[name].appendleft((idx, key))
