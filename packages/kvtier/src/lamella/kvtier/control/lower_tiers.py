"""Everything below the device, as the manager sees it: what goes down, what comes up, and the end of every copy.

    device ── demotion ─▶ host ── stores ───▶ disk, external managers      as blocks are sealed; bounded
    device ◀─ restores ── host ◀─ prefetch ── disk, external managers      for who enters; for who waits

Every copy pins both its ends in books that are ours, until its ticket ends; a ticket ends exactly once. What is unknown
has failed: its target is dropped with all that hangs on it, and computed again by whoever needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Protocol

from lamella.kvtier.control.demotion import Demotion
from lamella.kvtier.control.groups import GroupBlocks, JointMatch
from lamella.kvtier.control.plan import TierPlan
from lamella.kvtier.control.prefetch import Load, LoadState, Prefetch
from lamella.kvtier.control.prefix_index import first_missing
from lamella.kvtier.control.restores import Restores, Wanted
from lamella.kvtier.control.stores import Stores
from lamella.kvtier.control.transfers import Descent, Shared
from lamella.kvtier.jobs import ClearJob, Job, LookupResult, Presence, TicketId, TicketResult, TierEvent
from lamella.kvtier.keys import Key, KeyChain
from lamella.kvtier.stats import TierStats


class Books(Protocol):
    """What is read of a sequence on the device."""

    chain: KeyChain | None
    caching: bool
    sealed: int
    tables: list[list[int]]
    below: Descent | None


class LowerTiers:
    """The tiers below the device, for all groups."""

    def __init__(
        self,
        plan: TierPlan,
        groups: Sequence[GroupBlocks],
        holdings: Mapping[int, Books],
        unpin: Callable[[int, int], None],
        suspect: Callable[[Sequence[KeyChain], int], None],
    ) -> None:
        """unpin, suspect: see Restores, of the device. holdings is read only."""
        self._shared = Shared(plan, groups)
        self._holdings = holdings
        self._suspect = suspect
        self._restores = Restores(self._shared, unpin, self._poison)
        self._stores = Stores(self._shared)
        self._demotion = Demotion(self._shared, self._stores, unpin)
        self._prefetch = Prefetch(self._shared, self._demotion, self._stores, self._restores)
        self.near = tuple(JointMatch(group, [host]) for group, host in zip(groups, self._shared.host))
        """Finds what device and host hold together."""
        self.host = self._shared.host
        self.books = self._shared.books

    @property
    def loads(self) -> bool:
        """Whether there is a tier that a sequence may have to wait for."""
        return bool(self._shared.plan.slow_tiers)

    @property
    def num_evicted(self) -> int:
        """Blocks that the host has evicted so far."""
        return sum([host.num_evicted for host in self.host])

    @property
    def busy(self) -> bool:
        """A copy has not ended, or one waits for its turn."""
        parts = (self._restores, self._demotion, self._stores, self._prefetch)
        return bool(self._shared.jobs or self._stores.num_waiting or any(part.num_copies for part in parts))

    # ---- a sequence enters -----------------------------------------------------------------------------------------

    def worth(self, device: int, hit: int, num_tokens: int) -> int:
        """How many of `hit` blocks to take, `device` of which are there already: more, or those."""
        shared = self._shared
        shared.tell_loads()
        speed = shared.plan.cost.bytes_per_s.get("host")
        if not speed or not shared.plan.cost.prefill_s_per_token:
            return hit
        size, cost = shared.block_size, shared.plan.cost
        num_bytes = (hit - device) * sum(group.group.bytes_per_block for group in shared.groups)
        load_s = cost.load_s("host", num_bytes, shared.queued_bytes["host"])
        if load_s < cost.recompute_s(device * size, hit * size):
            return hit
        shared.stats["host"].refuse("cost")
        return device

    def enter(
        self, sequence: int, chain: KeyChain, hit: int, device: int, num_tokens: int, tenant: str | None
    ) -> Descent:
        """A sequence has entered with a hit of so many blocks, `device` of them not from the host. Ends its load.

        Call before restore(): a sequence reads its own.
        """
        shared, keys = self._shared, chain.keys
        for host in shared.host:
            if host.chained:
                there = first_missing(keys, hit, host.slot_of)
                if there:
                    host.use(host.slot_of[keys[there - 1]])
                    self._stores.want_chain(keys, host.match(keys, there))
            else:
                for n in range(max(0, hit - 1), hit):
                    if keys[n] in host.listed:
                        host.use(host.listed[keys[n]])
        self._count(self._prefetch.end(sequence), hit, device, num_tokens)
        return Descent(sequence, tenant, hit, self._demotion.kept_len(keys, hit))

    def restore(self, chain: KeyChain, wanted: Sequence[Wanted]) -> None:
        """Copy host hits into blocks that the manager has listed."""
        self._restores.begin(chain, wanted)

    def join(self, sequence: int, descent: Descent | None, chain: KeyChain, hit: int) -> None:
        """The sequence reads what restores in flight write, its own among them."""
        if self._restores.active:
            self._restores.join(sequence, descent, chain, hit)

    def demote(self, holding: Books) -> None:
        """Start copies of what the holding has sealed."""
        descent = holding.below
        assert descent is not None
        assert holding.chain is not None
        if holding.caching and holding.sealed > descent.done:
            self._demotion.advance(descent, holding.chain.keys, holding.sealed, holding.tables)

    # ---- a sequence waits ------------------------------------------------------------------------------------------

    def begin_load(
        self, sequence: int, keys: Sequence[Key], near: int, limit: int, num_tokens: int, tenant: str | None
    ) -> LoadState:
        """See TierManager.begin_load; near: blocks that device and host hold."""
        return self._prefetch.begin(sequence, keys, near, limit, num_tokens, tenant)

    def end_load(self, sequence: int) -> None:
        self._prefetch.end(sequence)

    def take_loaded(self) -> list[int]:
        return self._prefetch.take_loaded()

    def add_wait(self, sequence: int, seconds: float) -> None:
        """A sequence waited so long: the price of the tiers that it waited for."""
        load = self._prefetch.load_of(sequence)
        names = tuple(load.reach) if load is not None and load.reach else self._shared.plan.slow_tiers[:1]
        for name in names:
            self._shared.stats[name].seconds_spent += seconds / len(names)

    # ---- copies ----------------------------------------------------------------------------------------------------

    def take_jobs(self) -> list[Job]:
        self._stores.pump()
        jobs, self._shared.jobs = self._shared.jobs, []
        return jobs

    def complete(self, events: Iterable[TierEvent]) -> None:
        """Asserts that a ticket ends once."""
        demotion, stores, prefetch, waiters = self._demotion, self._stores, self._prefetch, self._prefetch.waiters
        loaded, demoted, restored = prefetch.copies, demotion.copies, self._restores.copies
        run: list[TicketResult] = []  # of one kind, all well: taken together, and in order with the others
        kind: Container[TicketId] = ()
        for event in events:
            if isinstance(event, TicketResult) and event.ok:
                ticket = event.ticket
                if run and ticket in kind and (kind is loaded or ticket not in waiters):
                    run.append(event)
                    continue
                if run:
                    self._complete_well(kind, run)
                    run = []
                mine = loaded if ticket in loaded else demoted if ticket in demoted else restored
                if ticket in mine and (mine is loaded or ticket not in waiters):
                    run, kind = [event], mine
                    continue
            elif run:
                self._complete_well(kind, run)
                run = []
            if not isinstance(event, TicketResult):
                self._take_news(event)
                continue
            ticket = event.ticket
            if ticket in stores.copies:
                stores.complete(event)
            elif ticket in prefetch.copies:
                prefetch.complete(event)
            elif ticket in demotion.copies:
                idx, slot = demotion.complete(event)
                if slot:
                    stores.want(idx, slot)
                if demotion.waiting:
                    self._resume()
            else:
                assert ticket in self._restores.copies, f"ticket {ticket} ended twice, or was never given out"
                self._go_on(self._restores.complete(event))
            if ticket in waiters:
                prefetch.ended(ticket)
        if run:
            self._complete_well(kind, run)

    def copy_readers(self) -> set[int]:
        """Sequences that read copies to the device that have not ended."""
        return self._restores.readers() if self._restores.active else set()

    def take_poisoned(self) -> list[int]:
        """Sequences that read a copy that has failed, as far as they still hold blocks."""
        poisoned = self._restores.poisoned
        if not poisoned:
            return []
        self._restores.poisoned = {}
        return [sequence for sequence in poisoned if sequence in self._holdings]

    def forget(self, sequence: int) -> None:
        """The sequence holds nothing any more."""
        self._demotion.waiting.pop(sequence, None)
        self._restores.poisoned.pop(sequence, None)

    # ---- as a whole ------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Nothing that is held below can be hit later; what is under way does not count."""
        for host in self.host:
            host.drop_all()
        for books in self.books.values():
            for book in books:
                book.clear()
        self._stores.reset()
        self._prefetch.reset()
        for name in self.books:
            place = self._shared.place(name, 0)
            self._shared.jobs.append(ClearJob(place.tier, place.name))

    def stats(self) -> dict[str, TierStats]:
        """Figures of each tier as they are now; the objects are ours."""
        shared = self._shared
        shared.tell_loads()
        host = shared.stats["host"]
        host.num_blocks = sum(map(len, shared.host))
        host.capacity = sum(slots.num_slots for slots in shared.host)
        host.evictions = sum(slots.num_evicted for slots in shared.host)
        host.queue_depth = self._demotion.num_copies + self._restores.num_copies
        loading = self._prefetch.copies_by_tier()
        for name, books in shared.books.items():
            stats = shared.stats[name]
            stats.num_blocks = sum(map(len, books))
            stats.queue_depth = self._stores.queue_depth(name) + loading.get(name, 0)
        return shared.stats

    def held_bytes(self, tenant: str) -> int:
        return self._demotion.held_bytes(tenant)

    def check(self) -> None:
        """Assert every invariant. Walks everything."""
        shared = self._shared
        host = [[0] * (slots.num_slots + 1) for slots in shared.host]
        device = [[0] * group.pool.num_blocks for group in shared.groups]
        self._restores.add_pins(host, device)
        self._demotion.add_pins(host, device)
        self._stores.add_pins(host)
        self._prefetch.add_pins(host)
        for slots, expected in zip(shared.host, host):
            slots.check()
            assert slots.pins == expected, "host slots are pinned by nobody, or not by who needs them"
        for group, least in zip(shared.groups, device):
            assert all(pins >= own for pins, own in zip(group.pool.pins, least)), "a copy's device block is not pinned"
        for books in shared.books.values():
            for book in books:
                book.check()
        self._demotion.check()
        self._prefetch.check()
        for holding in self._holdings.values():
            if holding.below is not None:
                reads = sum(holding.below is d for r in self._restores.active for _, d, _ in r.readers)
                assert holding.below.pending == reads

    # ---- private ---------------------------------------------------------------------------------------------------

    def _poison(self, chains: Sequence[KeyChain], idx: int, place: int) -> None:
        """The content goes from every tier: it is computed again, instead of failing again."""
        key = chains[0].keys[place]
        self.host[idx].drop(key)
        for books in self.books.values():
            books[idx].remove(key)
        self._suspect(chains, place)

    def _complete_well(self, kind: Container[TicketId], run: Sequence[TicketResult]) -> None:
        """kind: the copies of which these are."""
        if kind is self._prefetch.copies:
            self._prefetch.complete_well(run)
        elif kind is self._demotion.copies:
            self._demotion.complete_well(run)
            if self._demotion.waiting:
                self._resume()
        else:
            self._go_on(self._restores.complete_well(run))

    def _go_on(self, descents: Sequence[Descent]) -> None:
        """Nothing is in flight any more that these read: their blocks may go down."""
        for descent in descents:
            holding = self._holdings.get(descent.sequence)
            if holding is not None and holding.below is descent:
                self.demote(holding)

    def _resume(self) -> None:
        waiting = self._demotion.waiting
        while waiting and self._demotion.has_room:
            sequence = next(iter(waiting))
            del waiting[sequence]
            holding = self._holdings.get(sequence)
            if holding is not None and holding.below is not None:
                self.demote(holding)

    def _take_news(self, news: LookupResult | Presence) -> None:
        if isinstance(news, LookupResult):
            assert self._prefetch.answer(news), f"question {news.ticket} was answered twice, or never asked"
            return
        name = "disk" if news.tier == "disk" else news.name
        books = self.books.get(name)
        if books is None:
            return
        for idx, key in news.removed:
            books[idx].remove(key)
        for idx, key, parent in news.added:
            books[idx].add(key, parent)

    def _count(self, load: Load | None, hit: int, device: int, num_tokens: int) -> None:
        """Whose the blocks [device, hit) are: what a load was to bring is that tier's, the rest the host's."""
        shared, size, cost = self._shared, self._shared.block_size, self._shared.plan.cost
        host = shared.stats["host"]
        host.lookups += 1
        host.queried_tokens += num_tokens
        edges = [("host", hit if load is None or not load.reach else min(hit, load.found))]
        if load is not None:
            for name, reach in load.reach.items():
                stats = shared.stats[name]
                stats.queried_tokens += num_tokens
                stats.lookups += name == "disk"
                stats.partial_hits += hit < reach
                edges.append((name, min(hit, reach)))
        start = device
        for name, end in edges:
            if end > start:
                stats = shared.stats[name]
                stats.hit_tokens += (end - start) * size
                stats.prefill_tokens_saved += (end - start) * size
                stats.seconds_saved += cost.recompute_s(start * size, end * size)
                start = end
