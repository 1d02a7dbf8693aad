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
        self._lanes = [(name, self._wanted[name], [book.listed for book in shared.books[name]]) for name in names]
        """(name, what waits, what is there by group)."""
        self._storing: dict[str, tuple[set[Key], ...]] = {name: tuple(set() for _ in shared.host) for name in names}
        """By group."""
        self._num_storing = dict.fromkeys(names, 0)
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
        return self._num_storing[name]

    def want(self, idx: int, slot: int) -> None:
        """A host slot's content should be below, too. Takes over the pin of the copy that has filled it."""
        shared = self._shared
        host = shared.host[idx]
        key = host.key_of[slot]
        assert key is not None
        passing = host.state[slot] == PASSING
        num_pins = 1
        for name, wanted, listed in self._lanes:
            if key in listed[idx]:
                continue
            if len(wanted) >= shared.plan.max_waiting:
                shared.stats[name].refuse("queue")
            elif passing or self._num_kept[idx] < self._max_kept[idx]:
                self._num_kept[idx] += 1
                if num_pins:
                    num_pins = 0
                else:
                    host.pin(slot)
                wanted.append((idx, key, slot))
            else:
                wanted.append((idx, key, 0))
        if num_pins:
            host.unpin(slot)

    def has_room(self, idx: int) -> bool:
        """Whether more of the group's slots may be kept for stores."""
        return self._num_kept[idx] < self._max_kept[idx]

    def kept_len(self, idx: int, keys: Sequence[Key], num_blocks: int) -> int:
        """How many of keys[:num_blocks] one slower tier has, or gets: the host need not have them."""
        last = keys[num_blocks - 1]
        if any(last in storing[idx] for storing in self._storing.values()):
            return num_blocks
        return max((books[idx].match(keys, num_blocks) for books in self._shared.books.values()), default=0)

    def want_chain(self, keys: Sequence[Key], num_blocks: int) -> None:
        """A chain was used: what was left out of it is wanted again, from the first block that is missing below."""
        for name, books in self._shared.books.items():
            for idx, book in enumerate(books):
                host = self._shared.host[idx]
                if host.chained:
                    n = first_missing(keys, num_blocks, book)
                    if n < num_blocks and keys[n] in host and keys[n] not in self._storing[name][idx]:
                        self._want_next(name, idx, keys[n])

    def pump(self) -> None:
        """Start what waits, as far as the queues have room."""
        hosts = self._shared.host
        for name, wanted, all_listed in self._lanes:
            later: list[tuple[int, Key, int]] = []
            all_storing = self._storing[name]
            while wanted and self._num_storing[name] < self._shared.plan.max_storing and len(later) < MAX_LATER:
                entry = idx, key, slot = wanted.popleft()
                host, listed, storing = hosts[idx], all_listed[idx], all_storing[idx]
                if slot and host.listed.get(key) == slot and key not in listed and key not in storing:
                    parent = host.parent_key_of[slot]
                    if parent is None or parent in storing or parent in listed or not host.chained:
                        self._copy(name, idx, slot)  # as it nearly always is
                        continue
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
            storing = self._storing[name][idx]
            storing.remove(key)
            self._num_storing[name] -= 1
            if result.ok:
                shared.books[name][idx].add(key, parent)
                for child in host.children(slot):
                    if host.key_of[child] not in storing:
                        self._want_children(name, idx, slot)
                        break
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
            for storing in self._storing[name]:
                storing.clear()
            self._num_storing[name] = 0

    def add_pins(self, host: Sequence[list[int]]) -> None:
        """Count its pins, for checks."""
        pinned = [(idx, slot) for _, idx, slot, _, _, _ in self.copies.values()]
        pinned += [(idx, slot) for wanted in self._wanted.values() for idx, _, slot in wanted if slot]
        for idx, slot in pinned:
            host[idx][slot] += 1
        assert self._num_kept == [sum(n == idx for n, _ in pinned) for idx in range(len(host))]

    # ---- private ---------------------------------------------------------------------------------------------------

    def _room(self, name: str) -> int:
        return self._shared.plan.max_storing - self._num_storing[name]

    def _must_wait(self, name: str, idx: int, key: Key, kept: int) -> bool:
        """Whether what the block hangs on is still on its way to the host: copies end in any order."""
        host = self._shared.host[idx]
        if kept and host.state[kept] == PASSING:
            parent = host.parent_key_of[kept]
            return parent in host.passing and parent not in self._storing[name][idx]
        return key in host.slot_of and key not in host.listed

    def _start(self, name: str, idx: int, key: Key, kept: int) -> None:
        """Copy it, unless that cannot be now, or need not; before it what it hangs on. kept: the slot that is pinned
        for it."""
        shared = self._shared
        host, listed, storing = shared.host[idx], shared.books[name][idx].listed, self._storing[name][idx]
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
        if key in listed or key in storing:
            self._let_go(idx, slot)
            return
        parent = host.parent_key_of[slot]
        if parent is None or parent in listed or parent in storing or not host.chained:
            self._copy(name, idx, slot)
            return
        chain = [slot]
        while parent is not None and parent not in listed and parent not in storing:
            above = host.parent_of[chain[-1]]
            if not above:  # it was to pass behind what is not there any more
                shared.stats[name].refuse("prefix")
                for place in chain:
                    self._let_go(idx, place)
                return
            self._keep(idx, above)
            chain.append(above)
            parent = host.parent_key_of[above]
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
        self._storing[name][idx].add(key)
        self._num_storing[name] += 1
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
        host, listed, storing = self._shared.host[idx], self._shared.books[name][idx].listed, self._storing[name][idx]
        for child in host.children(slot):
            key = host.key_of[child]
            if key not in storing and key not in listed and key in host.listed:
                assert key is not None
                self._want_next(name, idx, key)

    def _want_next(self, name: str, idx: int, key: Key) -> None:
        if len(self._wanted[name]) < self._shared.plan.max_waiting:
            self._wanted[name].appendleft((idx, key, 0))
