"""Loads into the host tier, for sequences that wait: what of their prefix lies only below it.

    blocks   0 ………… near ………………… end ………… limit
             [ device, host | slower tiers  | nobody, or it does not pay

    begin ─▶ questions to external managers ─▶ copies ─▶ loaded: the sequence may enter
                                                  └────▶ end: aborted, or too late; copies go on, and serve others

Blocks of [0, near) stay meanwhile: in a full group, what is only on the device goes down first, since a tier holds
whole prefixes. A copy that failed takes its block out of the tier's book at once, so that it is not planned again.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import repeat

from lamella.kvtier.control.cost import Part
from lamella.kvtier.control.demotion import Demotion
from lamella.kvtier.control.groups import JointMatch, longest_match
from lamella.kvtier.control.host_tier import DOOMED, FILLING
from lamella.kvtier.control.prefix_index import first_missing
from lamella.kvtier.control.restores import Restores
from lamella.kvtier.control.stores import Stores
from lamella.kvtier.control.transfers import Shared
from lamella.kvtier.jobs import LookupJob, LookupResult, TicketId, TicketResult
from lamella.kvtier.keys import Key

MAX_DOUBTS = 65_536
NUM_DOUBTS = 3
"""Questions in which a block that a manager promised and did not deliver is not asked for again."""


class LoadState(Enum):
    """Answer to begin_load()."""

    NONE = "none"
    """Nothing to load, or loading does not pay."""
    STARTED = "started"
    """The sequence waits until take_loaded() names it."""
    LATER = "later"
    """There is something, but other loads hold the room that it needs. Ask again."""


class Load:
    """What one sequence waits for."""

    __slots__ = (
        "asking",
        "cut",
        "found",
        "held",
        "keys",
        "limit",
        "near",
        "num_tokens",
        "reach",
        "sequence",
        "tenant",
        "waiting",
    )

    def __init__(
        self, sequence: int, keys: Sequence[Key], near: int, limit: int, num_tokens: int, tenant: str | None
    ) -> None:
        self.sequence = sequence
        self.keys = keys
        self.near = self.found = near
        """Blocks that device and host hold; found: at the beginning."""
        self.limit = limit
        self.num_tokens = num_tokens
        self.tenant = tenant
        self.asking: set[TicketId] = set()
        self.waiting: set[TicketId] = set()
        self.held: list[tuple[int, int, int]] = []
        """(group, host slot, number of blocks) that it keeps until the sequence has entered. In a full group the last
        slot's pin keeps the others."""
        self.reach: dict[str, int] = {}
        """By tier: up to which block it was asked to bring the prefix."""
        self.cut = False
        """There was no slot for some of it: pins that end soon had them all."""


_Need = tuple[int, str]
"""(place, where the block is to come from: a tier below, or "device")."""


class Prefetch:
    """All loads."""

    def __init__(self, shared: Shared, demotion: Demotion, stores: Stores, restores: Restores) -> None:
        self._shared = shared
        self._demotion = demotion
        self._stores = stores
        self._restores = restores
        self._loads: dict[int, Load] = {}
        self._loaded: list[int] = []
        self.copies: dict[TicketId, tuple[str, int, int, Key]] = {}
        """(tier, group, host slot, key)."""
        self._questions: dict[TicketId, tuple[str, int, int, tuple[Key, ...], Load]] = {}
        """(manager, group, first place, keys, load)."""
        self.waiters: dict[TicketId, tuple[Load, ...]] = {}
        """Whose end somebody waits for, whatever copies it is of."""
        self._doubts: dict[tuple[str, int, Key], int] = {}
        self._one_tier = len(shared.plan.slow_tiers) == 1
        self._held = [0] * len(shared.host)
        books: list[tuple[JointMatch, ...]] = []
        for n in range(len(shared.plan.slow_tiers)):
            names = shared.plan.slow_tiers[: n + 1]
            books.append(
                tuple(
                    JointMatch(group, [host, *(shared.books[name][group.idx] for name in names)])
                    for group, host in zip(shared.groups, shared.host)
                )
            )
        self._down_to = tuple(zip(shared.plan.slow_tiers, books))

    @property
    def num_copies(self) -> int:
        return len(self.copies) + len(self._questions)

    def begin(
        self, sequence: int, keys: Sequence[Key], near: int, limit: int, num_tokens: int, tenant: str | None
    ) -> LoadState:
        """Bring the blocks [near, limit) of a sequence's prefix into the host, as far as somebody has them."""
        known = self._loads.get(sequence)
        if known is not None:
            return LoadState.STARTED if known.asking or known.waiting else LoadState.NONE
        if near >= limit:
            return LoadState.NONE
        load = Load(sequence, keys, near, limit, num_tokens, tenant)
        if self._ask(load):
            self._hold_near(load, wait=False)
            self._loads[sequence] = load
            return LoadState.STARTED
        state = self._bring(load)
        if state is LoadState.STARTED:
            self._loads[sequence] = load
        else:
            self._let_go(load)
        return state

    def end(self, sequence: int) -> Load | None:
        """The sequence has entered, or waits no longer. Returns what it waited for."""
        load = self._loads.pop(sequence, None)
        if load is not None:
            self._let_go(load)
            for ticket in load.waiting:
                others = tuple(other for other in self.waiters[ticket] if other is not load)
                if others:
                    self.waiters[ticket] = others
                else:
                    del self.waiters[ticket]
            load.waiting.clear()
            load.asking.clear()
            if sequence in self._loaded:
                self._loaded.remove(sequence)
        return load

    def load_of(self, sequence: int) -> Load | None:
        return self._loads.get(sequence)

    def take_loaded(self) -> list[int]:
        """Sequences that wait for nothing more, however their copies ended."""
        loaded, self._loaded = self._loaded, []
        return loaded

    def complete(self, result: TicketResult) -> None:
        """One of the copies has ended. Call ended() after it, as after any other ticket."""
        name, idx, slot, key = self.copies.pop(result.ticket)
        shared = self._shared
        host = shared.host[idx]
        shared.queued_bytes[name] -= host.slot_bytes
        if result.ok:
            shared.count_load(name, host.slot_bytes, result.seconds)
            if host.ready(slot):
                if self._one_tier and key in shared.books[name][idx].listed:
                    host.unpin(slot)  # nobody lacks it
                else:
                    self._stores.want(idx, slot)
        else:
            shared.count_failure(name, result)
            host.failed(slot)
            shared.books[name][idx].remove(key)
            self._hold_again(idx)
            if name != "disk":
                self._doubts[name, idx, key] = NUM_DOUBTS
                if len(self._doubts) > MAX_DOUBTS:
                    del self._doubts[next(iter(self._doubts))]

    def complete_well(self, results: Sequence[TicketResult]) -> None:
        """complete() and ended() of copies that all ended well: they come by hundreds."""
        shared, copies, waiters, one_tier = self._shared, self.copies, self.waiters, self._one_tier
        hosts, books, want = shared.host, shared.books, self._stores.want
        moved: dict[str, list[float]] = {}
        for result in results:
            ticket = result.ticket
            name, idx, slot, key = copies.pop(ticket)
            host = hosts[idx]
            told = moved.get(name)
            if told is None:
                told = moved[name] = [0, 0.0, 0]
            told[0] += host.slot_bytes
            told[1] += result.seconds
            told[2] += 1
            if host.ready(slot):
                if one_tier and key in books[name][idx].listed:
                    host.unpin(slot)  # nobody lacks it
                else:
                    want(idx, slot)
        for name, (num_bytes, seconds, loads) in moved.items():
            shared.queued_bytes[name] -= int(num_bytes)
            shared.count_load(name, int(num_bytes), seconds, int(loads))
        for result in results:
            if result.ticket in waiters:
                self.ended(result.ticket)

    def answer(self, result: LookupResult) -> bool:
        """Whether it was an answer to its question."""
        question = self._questions.pop(result.ticket, None)
        if question is None:
            return False
        name, idx, first, keys, load = question
        shared = self._shared
        num_present = max(0, min(result.num_present, len(keys)))
        shared.stats[name].lookups += 1
        if result.ticket in load.asking:  # it still waits
            book = shared.books[name][idx]
            for n, key in enumerate(keys[:num_present]):
                place = first + n
                book.add(key, load.keys[place - 1] if place else None)
            load.asking.remove(result.ticket)
            if not load.asking:
                self._let_go(load)
                if self._bring(load) is not LoadState.STARTED:
                    self._let_go(load)
                    self._loaded.append(load.sequence)
        return True

    def ended(self, ticket: TicketId) -> None:
        """A ticket among the waiters' has ended: who waited for it waits for one less."""
        for load in self.waiters.pop(ticket):
            waiting = load.waiting
            waiting.remove(ticket)
            if not waiting and not load.asking and not (load.cut and self._go_on(load)):
                self._loaded.append(load.sequence)

    def copies_by_tier(self) -> dict[str, int]:
        """Copies in flight."""
        counts: dict[str, int] = {}
        for copy in self.copies.values():
            counts[copy[0]] = counts.get(copy[0], 0) + 1
        return counts

    def reset(self) -> None:
        """Questions under way do not count."""
        self._doubts.clear()
        for _, _, _, _, load in self._questions.values():
            if load.asking:
                load.asking.clear()
                self._loaded.append(load.sequence)

    def add_pins(self, host: Sequence[list[int]]) -> None:
        """Count its pins, for checks."""
        for copy in self.copies.values():
            host[copy[1]][copy[2]] += 1
        for load in self._loads.values():
            for idx, slot, _ in load.held:
                host[idx][slot] += 1

    def check(self) -> None:
        """Who waits for what."""
        held = [0] * len(self._held)
        for load in self._loads.values():
            for idx, _, num_blocks in load.held:
                held[idx] += num_blocks
            assert all(load in self.waiters[ticket] for ticket in load.waiting)
            idle = not load.waiting and not load.asking
            assert idle or load.sequence not in self._loaded
        assert held == self._held
        for ticket, loads in self.waiters.items():
            assert loads
            assert all(ticket in load.waiting for load in loads)
        assert set(self._loaded) <= self._loads.keys()
        queued = dict.fromkeys(self._shared.plan.slow_tiers, 0)
        for copy in self.copies.values():
            queued[copy[0]] += self._shared.host[copy[1]].slot_bytes
        assert all(self._shared.queued_bytes[name] == num_bytes for name, num_bytes in queued.items())

    # ---- private ---------------------------------------------------------------------------------------------------

    def _ask(self, load: Load) -> bool:
        """Ask external managers for what is not known to be anywhere. Whether there was a question."""
        shared, keys, limit = self._shared, load.keys, load.limit
        for name in shared.plan.externals:
            for group, host in zip(shared.groups, shared.host):
                book = shared.books[name][group.idx]
                if group.is_state:
                    continue  # how many of the first blocks it has says nothing of snapshots: only the book does
                if host.chained:
                    first = max(load.near, *(b[group.idx].match(keys, limit) for b in shared.books.values()))
                else:
                    first = max(0, load.near - group.group.window_blocks)
                    while first < limit and keys[first] in book:
                        first += 1
                asked = tuple(keys[first:limit])
                if self._doubts:
                    asked = asked[: self._num_trusted(name, group.idx, asked)]
                if asked:
                    ticket = shared.ticket()
                    shared.jobs.append(LookupJob(ticket, name, group.idx, asked))
                    self._questions[ticket] = (name, group.idx, first, asked, load)
                    load.asking.add(ticket)
        return bool(load.asking)

    def _num_trusted(self, name: str, idx: int, keys: Sequence[Key]) -> int:
        for n, key in enumerate(keys):
            doubts = self._doubts.get((name, idx, key))
            if doubts is not None:
                if doubts > 1:
                    self._doubts[name, idx, key] = doubts - 1
                else:
                    del self._doubts[name, idx, key]
                return n
        return len(keys)

    def _bring(self, load: Load) -> LoadState:
        """Start copies for what the books list."""
        shared = self._shared
        load.near = load.found = longest_match(
            [JointMatch(g, [h]) for g, h in zip(shared.groups, shared.host)], load.keys, load.limit
        )
        end = self._choose(load)
        if end <= load.near:
            return LoadState.NONE
        needs = [self._needs(idx, load, end) for idx in range(len(shared.groups))]
        for idx, host in enumerate(shared.host):
            room = int(shared.plan.max_loading_share * host.num_slots) - self._held[idx]
            if len(needs[idx]) > room:
                if any(self._held):
                    return LoadState.LATER
                if not host.chained:
                    return self._no_room()
                end = min(end, needs[idx][room][0] if room > 0 else load.near)
        if end <= load.near:
            return self._no_room()
        self._hold_near(load)
        reached = end
        for idx, needed in enumerate(needs):
            reached = min(reached, self._start(idx, load, [need for need in needed if need[0] < end], end))
        load.cut = reached < end
        load.reach = {name: min(place, reached) for name, place in load.reach.items()}
        if load.waiting:
            return LoadState.STARTED
        return self._no_room() if reached <= load.near else LoadState.NONE

    def _go_on(self, load: Load) -> bool:
        """Bring the rest of what was cut short. Whether there is something to wait for."""
        found, reach = load.found, load.reach
        self._let_go(load)
        started = self._bring(load) is LoadState.STARTED
        load.found = found
        for name, place in reach.items():
            load.reach[name] = max(place, load.reach.get(name, 0))
        if not started:
            load.cut = False
            self._let_go(load)
            self._hold_near(load, wait=False)
        return started

    def _no_room(self) -> LoadState:
        self._shared.stats["host"].refuse("loading")
        return LoadState.LATER if any(self._held) and self.copies else LoadState.NONE

    def _choose(self, load: Load) -> int:
        """Up to which block it pays; notes each tier's end."""
        shared, size = self._shared, self._shared.block_size
        reach = load.near
        parts: list[Part] = []
        load.reach = {}
        for name, groups in self._down_to:
            end = longest_match(groups, load.keys, load.limit)
            if end > reach:
                num_bytes = 0
                for group in shared.groups:
                    blocks = end - max(reach, group.left_edge(end * size))
                    num_bytes += max(0, blocks) * group.group.bytes_per_block
                parts.append(Part(name, end * size, num_bytes, shared.queued_bytes[name]))
                load.reach[name] = reach = end
        if not parts:
            return load.near
        shared.tell_loads()
        chosen = shared.plan.cost.choose(load.near * size, load.num_tokens, parts) // size
        for name, end in list(load.reach.items()):
            if end > chosen:
                shared.stats[name].refuse("cost")
                del load.reach[name]
        return chosen

    def _needs(self, idx: int, load: Load, end: int) -> list[_Need]:
        """Blocks that a group's host slots lack for a hit of `end` blocks, and where each is to come from."""
        shared, keys = self._shared, load.keys
        group, host = shared.groups[idx], shared.host[idx]
        if host.chained:
            places = range(first_missing(keys, end, host.slot_of), end)
            trusted = self._restores.trusted_len(keys, end)
        else:
            places = range(min(group.left_edge(end * shared.block_size), end), end)
            trusted = 0
        needs = []
        books = [(name, books[idx].listed) for name, books in shared.books.items()]
        for n in places:
            key = keys[n]
            if not host.chained and (key in host.slot_of or key in group.index):
                continue
            if n < trusted and key in group.index:
                source = "device"
            else:
                for name, book in books:
                    if key in book:
                        source = name
                        break
                else:
                    break  # on the device alone, and not to be trusted yet
            needs.append((n, source))
        return needs

    def _start(self, idx: int, load: Load, needs: Sequence[_Need], end: int) -> int:
        """Reserve slots and start copies. Returns up to which block the group will hold the prefix."""
        shared, keys = self._shared, load.keys
        group, host = shared.groups[idx], shared.host[idx]
        last = 0
        done = 0
        if host.chained and load.tenant is None and needs and needs[0][1] != "device":
            last, done = self._fill_chain(idx, load, needs)
        for count, (place, source) in enumerate(needs[done:], done):
            key = keys[place]
            parent = keys[place - 1] if place else None
            if source == "device":
                reason = self._demotion.start(idx, key, parent, group.find(key), load.tenant)
                slot = 0 if reason else host.slot_of[key]
            else:
                slot = self._fill(idx, key, parent, source, load.tenant)
            if not slot:
                self._hold(load, idx, last, count)
                return place
            ticket = host.ticket_of[slot]
            load.waiting.add(ticket)
            self.waiters[ticket] = (load,)
            if host.chained:
                last = slot
            else:
                self._hold(load, idx, slot)
        self._hold(load, idx, last, len(needs))
        return end if not needs or needs[-1][0] == end - 1 or not host.chained else needs[-1][0] + 1

    def _fill_chain(self, idx: int, load: Load, needs: Sequence[_Need]) -> tuple[int, int]:
        """_fill() for the needs that the first one's source serves, as far as there is room. (last slot, how many)."""
        shared, host = self._shared, self._shared.host[idx]
        first, name = needs[0]
        same = next((n for n, (_, source) in enumerate(needs) if source != name), len(needs))
        slots = host.reserve_chain(load.keys, first, first + same)
        places = shared.host_places[idx]
        source = repeat(shared.place(name, idx))
        tickets = shared.copy_chain(load.keys, first, source, [places[slot] for slot in slots], host.slot_bytes)
        shared.queued_bytes[name] += host.slot_bytes * len(slots)
        for n, (ticket, slot) in enumerate(zip(tickets, slots), first):
            host.ticket_of[slot] = ticket
            self.copies[ticket] = (name, idx, slot, load.keys[n])
        load.waiting.update(tickets)
        self.waiters.update(dict.fromkeys(tickets, (load,)))
        return (slots[-1] if slots else 0), len(slots)

    def _fill(self, idx: int, key: Key, parent: Key | None, name: str, tenant: str | None) -> int:
        shared, host = self._shared, self._shared.host[idx]
        if tenant is not None and not self._demotion.charge(tenant, host.slot_bytes):
            shared.stats["host"].refuse("quota")
            return 0
        slot = host.reserve(key, parent, tenant)
        if not slot:
            self._demotion.refund(tenant, host.slot_bytes)
            return 0
        source, target = shared.place(name, idx), shared.host_places[idx][slot]
        ticket = host.ticket_of[slot] = shared.copy(key, source, target, host.slot_bytes, -1, parent)
        shared.queued_bytes[name] += host.slot_bytes
        self.copies[ticket] = (name, idx, slot, key)
        return slot

    def _hold_near(self, load: Load, wait: bool = True) -> None:
        """Keep what is in the host of the prefix: in a full group its last slot keeps the others. wait: for what is on
        its way there, too."""
        shared, keys = self._shared, load.keys
        for idx, host in enumerate(shared.host):
            if host.chained:
                there = first_missing(keys, load.limit, host.slot_of)
                if not there:
                    continue
                self._hold(load, idx, host.slot_of[keys[there - 1]])
                for n in range(host.match(keys, there), there) if wait else ():
                    slot = host.slot_of[keys[n]]
                    if host.state[slot] == FILLING:
                        self._wait_for(load, idx, slot)
            else:
                left = shared.groups[idx].left_edge(load.near * shared.block_size)
                for n in range(left, load.limit):
                    slot = host.slot_of.get(keys[n], 0)
                    if slot:
                        self._hold(load, idx, slot)
                        if wait and host.state[slot] == FILLING:
                            self._wait_for(load, idx, slot)

    def _hold(self, load: Load, idx: int, slot: int, num_blocks: int = 1) -> None:
        if slot:
            self._shared.host[idx].pin(slot)
            self._held[idx] += num_blocks
            load.held.append((idx, slot, num_blocks))

    def _hold_again(self, idx: int) -> None:
        """Slots are gone, perhaps ones whose pin kept others: each load keeps what is left of its prefix."""
        host = self._shared.host[idx]
        for load in self._loads.values():
            for n, (i, slot, num_blocks) in enumerate(load.held):
                if i == idx and host.chained and host.state[slot] == DOOMED:
                    host.unpin(slot)
                    there = first_missing(load.keys, load.limit, host.slot_of)
                    last = host.slot_of[load.keys[there - 1]] if there else 0
                    if last:
                        host.pin(last)
                        load.held[n] = (idx, last, num_blocks)
                    else:
                        self._held[idx] -= num_blocks
                        del load.held[n]
                    break

    def _let_go(self, load: Load) -> None:
        for idx, slot, num_blocks in load.held:
            self._shared.host[idx].unpin(slot)
            self._held[idx] -= num_blocks
        load.held.clear()

    def _wait_for(self, load: Load, idx: int, slot: int) -> None:
        ticket = self._shared.host[idx].ticket_of[slot]
        if ticket not in load.waiting:
            load.waiting.add(ticket)
            self.waiters[ticket] = (*self.waiters.get(ticket, ()), load)
