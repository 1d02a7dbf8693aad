"""Copies from the host to the tiers below it: written through as host slots become ready, in order of the chain.

A block is stored behind the block before it, or beside it. What waits stays in the host, as long as that takes no more
than a share of the slots; beyond it, it may be evicted before its turn. What was left out is wanted again when the
block before it is stored, or its chain is used. Reads never wait for writes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from lamella.kvtier.control.host_tier import PASSING
from lamella.kvtier.control.prefix_index import first_missing
from lamella.kvtier.control.transfers import Shared
from lamella.kvtier.jobs import TicketId, TicketResult
from lamella.kvtier.keys import Key

MAX_LATER = 64
"""Blocks that are passed over, at most, because the block before them is not in the host yet."""


class Stores:
    """All stores in flight, and what waits for its turn."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        names = shared.plan.slow_tiers
        self._wanted: dict[str, deque[tuple[int, Key, int]]] = {name: deque() for name in names}
        """(group, key, host slot that is pinned for it; 0: none is)."""
        self._num_kept = [0] * len(shared.host)
        """Pins of what waits and of copies, by group."""
        self._max_kept = [max(1, int(shared.plan.max_storing_share * host.num_slots)) for host in shared.host]
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
        """A host slot's content should be below, too. Nothing happens if it has none any more. Ends with the pin of a
        PASSING slot."""
        host = self._shared.host[idx]
        key = host.key_of[slot]
        if key is None:
            return
        passing = host.state[slot] == PASSING
        for name, wanted in self._wanted.items():
            if key in self._shared.books[name][idx].listed:
                continue
            if len(wanted) >= self._shared.plan.max_waiting:
                self._shared.stats[name].refuse("queue")
            elif passing or self.has_room(idx):
                self._keep(idx, slot)
                wanted.append((idx, key, slot))
            else:
                wanted.append((idx, key, 0))
        if passing:
            host.unpin(slot)

    def has_room(self, idx: int) -> bool:
        """Whether more of the group's slots may be kept for stores."""
        return self._num_kept[idx] < self._max_kept[idx]

    def kept_len(self, idx: int, keys: Sequence[Key], num_blocks: int) -> int:
        """How many of keys[:num_blocks] one slower tier has, or gets: the host need not have them."""
        last = (idx, keys[num_blocks - 1])
        if any(last in storing for storing in self._storing.values()):
            return num_blocks
        return max((books[idx].match(keys, num_blocks) for books in self._shared.books.values()), default=0)

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
            later: list[tuple[int, Key, int]] = []
            while wanted and self._room(name) > 0 and len(later) < MAX_LATER:
                entry = wanted.popleft()
                if self._must_wait(name, *entry):
                    later.append(entry)
                else:
                    self._start(name, *entry)
            wanted.extendleft(reversed(later))

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
        self._let_go(idx, slot)

    def reset(self) -> None:
        """What is under way does not count."""
        self._epoch += 1
        for name, wanted in self._wanted.items():
            for idx, _, slot in wanted:
                if slot:
                    self._let_go(idx, slot)
            wanted.clear()
            self._storing[name].clear()

    def add_pins(self, host: Sequence[list[int]]) -> None:
        """Count its pins, for checks."""
        pinned = [(idx, slot) for _, idx, slot, _, _, _ in self.copies.values()]
        pinned += [(idx, slot) for wanted in self._wanted.values() for idx, _, slot in wanted if slot]
        for idx, slot in pinned:
            host[idx][slot] += 1
        assert self._num_kept == [sum(n == idx for n, _ in pinned) for idx in range(len(host))]

    # ---- private ---------------------------------------------------------------------------------------------------

    def _room(self, name: str) -> int:
        return self._shared.plan.max_storing - len(self._storing[name])

    def _must_wait(self, name: str, idx: int, key: Key, kept: int) -> bool:
        """Whether what the block hangs on is still on its way to the host: copies end in any order."""
        host = self._shared.host[idx]
        if kept and host.state[kept] == PASSING:
            parent = host.parent_key_of[kept]
            return parent in host.passing and (idx, parent) not in self._storing[name]
        return key in host.slot_of and key not in host.listed

    def _start(self, name: str, idx: int, key: Key, kept: int) -> None:
        """Copy it, unless that cannot be now, or need not; before it what it hangs on. kept: the slot that is pinned
        for it."""
        shared = self._shared
        host, book, storing = shared.host[idx], shared.books[name][idx], self._storing[name]
        slot = kept if kept and host.state[kept] == PASSING else host.listed.get(key, 0)
        if not slot:
            shared.stats[name].refuse("evicted")
        if slot != kept:
            if slot:
                self._keep(idx, slot)
            if kept:
                self._let_go(idx, kept)
        if not slot:
            return
        if key in book.listed or (idx, key) in storing:
            self._let_go(idx, slot)
            return
        chain = [slot]
        while host.chained and (parent := host.parent_key_of[chain[-1]]) is not None:
            if parent in book.listed or (idx, parent) in storing:
                break
            above = host.parent_of[chain[-1]]
            if not above:  # it was to pass behind what is not there any more
                shared.stats[name].refuse("prefix")
                self._let_go(idx, slot)
                return
            self._keep(idx, above)
            chain.append(above)
        room = self._room(name)
        for place in reversed(chain):
            if room > 0:
                self._copy(name, idx, place)
            elif place == slot:
                self._wanted[name].appendleft((idx, key, slot))
            else:
                self._let_go(idx, place)
            room -= 1

    def _copy(self, name: str, idx: int, slot: int) -> None:
        """From a slot that is kept already."""
        shared = self._shared
        host = shared.host[idx]
        key, parent = host.key_of[slot], host.parent_key_of[slot]
        assert key is not None
        self._storing[name].add((idx, key))
        source, target = shared.host_places[idx][slot], shared.place(name, idx)
        ticket = shared.copy(key, source, target, host.slot_bytes, -1, parent)
        self.copies[ticket] = (name, idx, slot, key, parent, self._epoch)

    def _keep(self, idx: int, slot: int) -> None:
        self._num_kept[idx] += 1
        self._shared.host[idx].pin(slot)

    def _let_go(self, idx: int, slot: int) -> None:
        self._num_kept[idx] -= 1
        self._shared.host[idx].unpin(slot)

    def _want_children(self, name: str, idx: int, slot: int) -> None:
        host, book, storing = self._shared.host[idx], self._shared.books[name][idx], self._storing[name]
        for child in host.children(slot):
            key = host.key_of[child]
            if key in host.listed and (idx, key) not in storing and key not in book:
                assert key is not None
                self._want_next(name, idx, key)

    def _want_next(self, name: str, idx: int, key: Key) -> None:
        if len(self._wanted[name]) < self._shared.plan.max_waiting:
            self._wanted[name].appendleft((idx, key, 0))
