"""The facade of the control plane: which blocks a sequence has, and what a prefix already holds.

One sequence, its tables (one per group) and its lengths, as half-open ranges of tokens:

    [0, cached_len)      blocks found in the prefix index when the sequence entered, shared and sealed
    [0, sealed)          full blocks with a key: immutable, others can hit them
    [sealed, covered)    blocks being filled, used by this sequence alone
    [covered, …)         no blocks yet: extend() before a step writes there

Nothing here blocks, allocates device memory or looks at a clock. A broken invariant is an AssertionError.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lamella.kvtier.control.audit import audit
from lamella.kvtier.control.groups import GroupBlocks, longest_match
from lamella.kvtier.control.kinds import make_group
from lamella.kvtier.control.lower_tiers import LowerTiers
from lamella.kvtier.control.plan import TierPlan
from lamella.kvtier.control.pool import SEALED
from lamella.kvtier.control.prefetch import LoadState
from lamella.kvtier.control.shelf import Shelf
from lamella.kvtier.control.states import StateKeeper, States
from lamella.kvtier.control.transfers import Descent
from lamella.kvtier.errors import CapacityError, LayoutError
from lamella.kvtier.events import BlockStored, Cleared, Event
from lamella.kvtier.jobs import Job, TierEvent
from lamella.kvtier.keys import KeyChain
from lamella.kvtier.layout import NULL_BLOCK, Layout
from lamella.kvtier.stats import Counters, GroupUsage, TierStats

SequenceId = int


class Acquired(NamedTuple):
    """What a sequence got when it entered."""

    cached_len: int
    """Tokens whose KV the blocks already hold."""
    covered_len: int
    """Tokens that can be written before the next extend()."""
    tables: tuple[list[int], ...]
    """Block ids per group; 0 for blocks left of a sliding window. The caller's own copies."""
    loaded_len: int = 0
    """Tokens of cached_len that come from the host tier: copies into their blocks are among the jobs, and every step
    that is submitted later waits for them."""
    snapshots: tuple[int, ...] = ()
    """Per group of states: the block to copy into the live state before the first step; empty: there is none."""


class Growth(NamedTuple):
    """What a sequence got from extend()."""

    sequence: SequenceId
    covered_len: int
    blocks: list[tuple[int, int, list[int]]]
    """(group, index in the table of the first one, block ids)."""


class Holding:
    """The books of one sequence."""

    __slots__ = ("below", "caching", "chain", "hit", "left", "sealed", "states", "tables")

    def __init__(self, chain: KeyChain | None, sealed: int, tables: list[list[int]], left: list[int]) -> None:
        self.chain = chain
        self.caching = chain is not None
        """Whether full blocks get keys."""
        self.hit = sealed
        """Leading blocks that were there when it entered."""
        self.sealed = sealed
        """Number of leading blocks that are sealed (or null)."""
        self.tables = tables
        self.left = left
        """Per group: leading blocks that are null."""
        self.below: Descent | None = None
        """How far its blocks have gone down; None: they stay on the device."""
        self.states: States | None = None
        """Its blocks in groups of states; None: there are none."""


class TierManager:
    """Blocks of all groups for all sequences, and the prefix cache over them."""

    def __init__(self, layout: Layout, max_events: int = 0, tiers: TierPlan | None = None) -> None:
        """max_events: how many events to keep for take_events(); 0: none are made. tiers: what lies below the device;
        None: nothing."""
        sizes = {group.block_size for group in layout.groups}
        if len(sizes) != 1:
            raise LayoutError(f"all groups must have the same block_size, got {sorted(sizes)}")
        self.layout = layout
        self.block_size = sizes.pop()
        self.counters = Counters()
        self._shelf = Shelf(self.counters, max_events)
        self._all = tuple(make_group(i, g, n) for i, (g, n) in enumerate(zip(layout.groups, layout.num_blocks)))
        self._groups = tuple(group for group in self._all if not group.is_state)
        """Those whose blocks are tokens': they come first."""
        self._states = StateKeeper(self._all[len(self._groups) :], self._shelf)
        if not self._groups or any(group.is_state for group in self._all[: len(self._groups)]):
            raise LayoutError("groups of states come after at least one full or sliding group")
        self._holdings: dict[SequenceId, Holding] = {}
        self._below: LowerTiers | None = None
        if tiers is not None:
            self._below = LowerTiers(tiers, self._all, self._holdings, self.unpin, self._suspect)
        self.slides = any(group.slides for group in self._groups)
        """Whether slide() has anything to do."""

    @property
    def num_released(self) -> int:
        """Blocks that became free so far: an acquire that was refused need not be repeated before this moves."""
        return self._shelf.num_released

    # ---- what fits -------------------------------------------------------------------------------------------------

    @property
    def max_len(self) -> int:
        """Longest sequence that fits when it is alone."""
        return min(group.max_len() for group in self._all)

    def max_chunk_len(self, max_len: int) -> int:
        """Most tokens that one step may compute of a lone sequence of up to max_len tokens, at least 1."""
        smallest = min(self._groups, key=lambda group: group.max_chunk_len(max_len))
        chunk = smallest.max_chunk_len(max_len)
        if chunk < 1:
            raise CapacityError(
                f"group {smallest.group.name} has {smallest.pool.capacity} blocks of {self.block_size} tokens, fewer "
                f"than one window of {smallest.group.window} tokens needs"
            )
        return chunk

    # ---- life of a sequence ----------------------------------------------------------------------------------------

    def acquire(
        self,
        sequence: SequenceId,
        token_ids: Sequence[int],
        chain: KeyChain | None = None,
        *,
        chunk_len: int,
        max_hit_len: int | None = None,
        spare_len: int = 0,
        headroom: int = 0,
        tiers: bool = True,
        tenant: str | None = None,
    ) -> Acquired | None:
        """Let a sequence in: prefix hit and new blocks in every group, or None and nothing has changed.

            [0, cached_len)          hit: at most len(token_ids) - 1 and max_hit_len, a multiple of block_size
            [cached_len, covered)    new blocks: full groups up to len(token_ids), sliding ones up to the end of the
                                     first chunk, cached_len + chunk_len; and spare_len slots more in each

        chain: the sequence's keys so far (of the same token_ids); None: neither read nor seal. headroom: free blocks
        that must be left in each group. tiers: whether lower tiers serve and keep its blocks; tenant: who pays for what
        they keep. Asserts that the sequence holds nothing.
        """
        assert sequence not in self._holdings, f"sequence {sequence} already holds blocks"
        num_tokens = len(token_ids)
        size = self.block_size
        hit = device = 0
        below = self._below if tiers and chain is not None else None
        if chain is not None:
            limit = num_tokens - 1 if max_hit_len is None else min(num_tokens - 1, max_hit_len)
            keys = chain.extend(token_ids)
            most = min(limit // size, len(keys))
            hit = device = longest_match(self._all, keys, most)
            if below is not None and hit < most:
                hit = longest_match(below.near, keys, most)
                if hit > device:
                    hit = below.worth(device, hit, num_tokens)
        end = hit * size + chunk_len
        shared: list[list[int]] = []
        missing: list[int] = []
        wanted: list[tuple[int, list[int], list[int]]] = []  # places in the tables that the host fills
        for group in self._all:
            pool = group.pool
            left = min(group.left_edge(hit * size), hit)
            if chain is None:
                found = []
            elif hit == device:
                found = group.find_all(chain.keys[left:hit])
            else:
                places = [n for n in range(left, hit) if chain.keys[n] not in group.index]
                found = [group.find(key) for key in chain.keys[left:hit] if key in group.index]
                wanted.append((group.idx, places, []))
            new = group.num_new(num_tokens + spare_len, end + spare_len, hit)
            if wanted:
                new += len(wanted[-1][1])
            free = pool.num_free - pool.num_candidates(found)
            if free - new < headroom:
                self.counters.refused += 1
                return None
            shared.append(found)
            missing.append(new)
        tables: list[list[int]] = []
        left_of: list[int] = []
        states = States([], []) if self._states.groups else None
        for group, found, new in zip(self._all, shared, missing):
            group.pool.share_all(found)
            taken = group.pool.take(new)
            self._shelf.note_evictions(group)
            if wanted:
                assert chain is not None
                found = self._list_loaded(group, chain, wanted[group.idx], found, taken, hit)
                taken = taken[len(wanted[group.idx][1]) :]
            if group.is_state:
                assert states is not None
                states.live.append(taken)
                states.source += found
                continue
            tables.append([NULL_BLOCK] * (hit - len(found)) + found + taken)
            left_of.append(hit - len(found))
        holding = self._holdings[sequence] = Holding(chain, hit, tables, left_of)
        holding.states = states
        if below is not None:
            assert chain is not None
            holding.below = below.enter(sequence, chain, hit, device, num_tokens, tenant)
            if wanted:
                below.restore(chain, wanted)
        if self._below is not None and chain is not None and hit:
            self._below.join(sequence, holding.below, chain, hit)
        counters = self.counters
        counters.acquired += 1
        if chain is not None:
            counters.queried_tokens += num_tokens
            counters.hit_tokens += hit * size
        covered_len = min(map(len, tables)) * size
        if states is None:
            return Acquired(hit * size, covered_len, tuple(map(list, tables)), (hit - device) * size)
        given = tuple(map(list, [*tables, *states.live]))
        return Acquired(hit * size, covered_len, given, (hit - device) * size, tuple(states.source))

    def extend(self, rows: Sequence[tuple[SequenceId, int]]) -> list[Growth]:
        """Cover [0, new_len) of each (sequence, new_len), in order, each in all groups or not at all.

        Stops at the first that does not fit: a result shorter than rows names it by its length.
        """
        size = self.block_size
        groups = self._groups
        growths: list[Growth] = []
        for sequence, new_len in rows:
            tables = self._holdings[sequence].tables
            wanted = -(-new_len // size)
            for group, table in zip(groups, tables):
                if wanted - len(table) > group.pool.num_free:
                    return growths
            blocks: list[tuple[int, int, list[int]]] = []
            for group, table in zip(groups, tables):
                start = len(table)
                if wanted > start:
                    taken = group.pool.take(wanted - start)
                    table.extend(taken)
                    blocks.append((group.idx, start, taken))
                    if group.evicted:
                        self._shelf.note_evictions(group)
            growths.append(Growth(sequence, min(map(len, tables)) * size, blocks))
        return growths

    def seal(self, sequence: SequenceId, token_ids: Sequence[int], computed_len: int) -> int:
        """Give keys to the full blocks of [0, computed_len) that have none; they are immutable from now on.

        computed_len counts tokens whose KV is written and final: verified ids only. A block whose key names ids behind
        it stays open until they are in token_ids. Returns the computed_len at which the next block is full.
        """
        holding = self._holdings[sequence]
        size = self.block_size
        full = computed_len // size
        first = holding.sealed
        if holding.caching and full > first:
            chain = holding.chain
            assert chain is not None
            keys = chain.extend(token_ids, computed_len)
            full = min(full, len(keys))
            for group, table in zip(self._groups, holding.tables):
                blocks = table[first:full]
                group.pool.seal_all(blocks)
                self.counters.duplicate_blocks += group.index.add_all(keys, first, blocks)
                if self._shelf.max_events:
                    for n, block in enumerate(blocks, first):
                        if group.index.find(keys[n]) == block:
                            self._shelf.note(BlockStored(group.idx, keys[n], chain.parent(n), block))
            self.counters.sealed_blocks += full - first
            holding.sealed = full
            if holding.states is not None:
                self._states.seal(holding.states, chain, full)
            if holding.below is not None:
                assert self._below is not None
                self._below.demote(holding)
        return (full + 1) * size

    def snapshot(self, sequence: SequenceId, at_len: int) -> tuple[int, ...] | None:
        """Blocks, one per group of states, into which the step that ends at at_len copies the live state; None if they
        do not fit, and nothing has changed. seal() makes them hits for others once at_len is computed.

        at_len: a multiple of block_size, beyond what is sealed. A sequence that is not cached takes none.
        """
        holding = self._holdings[sequence]
        states = holding.states
        assert states is not None
        place = at_len // self.block_size
        assert at_len % self.block_size == 0, f"a snapshot at {at_len}, blocks are {self.block_size} tokens"
        assert place > holding.sealed, f"a snapshot at {at_len}, but {holding.sealed} blocks are sealed"
        return self._states.plan(states, place) if holding.caching else None

    def slide(self, sequence: SequenceId, computed_len: int, last_step: int) -> None:
        """Return the blocks that no token from computed_len on reads: sliding groups, wholly left of the window.

        Their places in the table become null. computed_len is a lower bound that holds for every step in flight;
        last_step: the last step that may still read them. Blocks that are full and not sealed yet lose their content:
        call seal() first.
        """
        holding = self._holdings[sequence]
        for group, table in zip(self._groups, holding.tables):
            if not group.slides:
                continue
            left = holding.left[group.idx]
            edge = min(group.left_edge(computed_len), len(table))
            for n in range(edge - 1, left - 1, -1):
                self._shelf.drop(group, table[n], last_step)
                table[n] = NULL_BLOCK
            holding.left[group.idx] = max(left, edge)

    def trim(self, sequence: SequenceId, committed_len: int, planned_len: int, last_step: int) -> int:
        """Forget what lies beyond planned_len after drafts were rejected. Returns the new covered_len.

        [0, sealed)                   untouched, keys stay valid
        [sealed, committed_len)       stays in the open block
        [committed_len, planned_len)  kept: a step in flight may write there
        [planned_len, end)            whole blocks return to the pool, stamped with last_step

        Asserts committed_len >= sealed: a sealed block is never reopened.
        """
        holding = self._holdings[sequence]
        size = self.block_size
        assert committed_len >= holding.sealed * size, f"{committed_len} committed, but {holding.sealed} blocks sealed"
        assert planned_len >= committed_len
        kept = -(-planned_len // size)
        if holding.states is not None:
            self._states.trim(holding.states, planned_len // size, last_step)
        for group, table in zip(self._groups, holding.tables):
            for block in reversed(table[kept:]):
                self._shelf.drop(group, block, last_step)
            del table[kept:]
        return min(map(len, holding.tables)) * size

    def release(self, sequence: SequenceId, last_step: int, *, discard: bool = False) -> None:
        """The sequence is gone: its references are dropped, tails first, so that they are reused first.

        last_step: the last step that may still read or write its blocks. Sealed blocks stay hittable until they are
        reused, unless discard is set: then what this sequence alone uses, and all that hangs on it, is no longer hit
        (its content is suspect).
        """
        holding = self._holdings[sequence]
        if self._below is not None:
            if holding.below is not None and not discard:
                self._below.demote(holding)
            self._below.forget(sequence)
        del self._holdings[sequence]
        if holding.states is not None:
            taken = holding.chain.keys[holding.hit : holding.sealed] if discard and holding.chain is not None else []
            self._states.release(holding.states, last_step, taken)
        for group, table in zip(self._groups, holding.tables):
            if discard:
                self._shelf.disown(group, table)
            self._shelf.drop_all(group, [block for block in reversed(table) if block != NULL_BLOCK], last_step)

    def holds(self, sequence: SequenceId) -> bool:
        return sequence in self._holdings

    def table(self, sequence: SequenceId, group: int) -> list[int]:
        """A copy of one block table."""
        return list(self._holdings[sequence].tables[group])

    def num_reclaimable(self, sequence: SequenceId) -> tuple[int, ...]:
        """Per group: blocks that would be free if the sequence were released."""
        holding = self._holdings[sequence]
        tables = list(holding.tables)
        if holding.states is not None:
            tables += [holding.states.blocks(n) for n in range(len(holding.states.live))]
        return tuple(
            sum(1 for block in table if block != NULL_BLOCK and group.pool.refs[block] + group.pool.pins[block] == 1)
            for group, table in zip(self._all, tables)
        )

    # ---- tiers below the device ------------------------------------------------------------------------------------

    @property
    def loads(self) -> bool:
        """Whether there is a tier that a sequence may have to wait for."""
        return self._below is not None and self._below.loads

    @property
    def num_lost(self) -> int:
        """Blocks that device and host have evicted so far: while this stands still, what they held of a prefix is
        there."""
        return self.counters.evicted_blocks + (0 if self._below is None else self._below.num_evicted)

    @property
    def busy(self) -> bool:
        """A copy between tiers has not ended, or waits for its turn."""
        return self._below is not None and self._below.busy

    def begin_load(
        self,
        sequence: SequenceId,
        token_ids: Sequence[int],
        chain: KeyChain | None,
        max_hit_len: int | None = None,
        *,
        tiers: bool = True,
        tenant: str | None = None,
    ) -> LoadState:
        """Bring into the host tier what a waiting sequence's prefix has only below it. See LoadState.

        What was brought stays until the sequence enters, or end_load(). Asserts that the sequence holds no blocks.
        """
        assert sequence not in self._holdings, f"sequence {sequence} holds blocks"
        if self._below is None or chain is None or not tiers or not self._below.loads:
            return LoadState.NONE
        limit = len(token_ids) - 1 if max_hit_len is None else min(len(token_ids) - 1, max_hit_len)
        keys = chain.extend(token_ids)
        most = min(limit // self.block_size, len(keys))
        near = longest_match(self._below.near, keys, most)
        return self._below.begin_load(sequence, keys, near, most, len(token_ids), tenant)

    def end_load(self, sequence: SequenceId) -> None:
        """The sequence waits no longer: aborted, or it is too late. Copies in flight end in the host tier, and serve
        others. Nothing happens if it does not load."""
        if self._below is not None:
            self._below.end_load(sequence)

    def take_loaded(self) -> list[SequenceId]:
        """Sequences whose loads have ended since the last call, however they ended."""
        return [] if self._below is None else self._below.take_loaded()

    def copy_readers(self) -> set[SequenceId]:
        """Sequences that read a block whose copy from the host has not ended: a step that computes any of them has to
        wait for the copies, and no other has."""
        return set() if self._below is None else self._below.copy_readers()

    def take_poisoned(self) -> list[SequenceId]:
        """Sequences that read a block whose copy from the host has failed. Nobody can hit these blocks any more, nor
        what hangs on them; the caller stops the sequences and releases them with discard."""
        return [] if self._below is None else self._below.take_poisoned()

    def add_wait(self, sequence: SequenceId, seconds: float) -> None:
        """A sequence waited so long for its load: what the tiers have cost. Before it enters."""
        if self._below is not None:
            self._below.add_wait(sequence, seconds)

    def take_jobs(self) -> list[Job]:
        """What is to be moved, in order; to be handed over before the next step is submitted."""
        return [] if self._below is None else self._below.take_jobs()

    def complete(self, event: TierEvent) -> None:
        """Take the end of a copy, an answer, or news of a store into the books. A ticket ends exactly once."""
        self.complete_all((event,))

    def complete_all(self, events: Iterable[TierEvent]) -> None:
        """complete() of each, in order."""
        assert self._below is not None, "a ticket ended, but there are no tiers"
        self._below.complete(events)

    def tier_stats(self) -> dict[str, TierStats]:
        """Figures of each tier below the device, by name: "host", "disk", external managers."""
        return {} if self._below is None else self._below.stats()

    # ---- copies ----------------------------------------------------------------------------------------------------

    def pin(self, group: int, block_id: int) -> int:
        """A copy is about to read or write this block: it will not be handed out before unpin(). Returns the step that
        the copy has to wait for, -1 if none."""
        pool = self._all[group].pool
        last_step = -1 if pool.refs[block_id] else pool.last_step[block_id]
        pool.pin(block_id)
        return last_step

    def unpin(self, group: int, block_id: int) -> None:
        """The copy has ended. A block that nobody holds any more can be reused from now on."""
        books = self._all[group]
        if books.pool.unpin(block_id):
            self._shelf.num_released += 1
            parent = books.index.parent_of(block_id)
            if books.pool.state[block_id] == SEALED:
                self._shelf.shelve(books, block_id)
                if books.chained:
                    self._shelf.refresh_prefix(books, parent)
            else:
                books.pool.discard(block_id)

    # ---- the cache as a whole --------------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> int:
        """Nothing that is cached now can be hit later (after new weights, say). Running sequences keep their blocks and
        seal no more. Returns the number of contents dropped."""
        dropped = 0
        for group in self._all:
            keys = set(group.index)
            dropped += len(keys)
            self._shelf.unlist(group, keys)
        for holding in self._holdings.values():
            holding.caching = False
        if self._below is not None:
            self._below.reset()
        if self._shelf.max_events:
            self._shelf.note(Cleared())
        return dropped

    def usage(self) -> list[GroupUsage]:
        """Per group: blocks in use, cached, empty."""
        return [
            GroupUsage(
                g.group.name,
                g.pool.capacity,
                g.pool.capacity - g.pool.num_free,
                g.pool.num_cached,
                g.pool.num_free - g.pool.num_cached,
            )
            for g in self._all
        ]

    @property
    def in_use(self) -> float:
        """Share of blocks in use, of the group that is fullest."""
        return max(1.0 - g.pool.num_free / g.pool.capacity for g in self._all)

    @property
    def capacity(self) -> int:
        """Blocks of the group that has the fewest, the null block not counted."""
        return min(group.pool.capacity for group in self._groups)

    def num_free(self, group: int) -> int:
        """Blocks of one group that can be handed out."""
        return self._all[group].pool.num_free

    def take_events(self) -> list[Event]:
        """Events since the last call, oldest first."""
        return self._shelf.take_events()

    def check(self) -> None:
        """Assert every invariant of the books. Walks all blocks: for tests and idle moments."""
        audit(self._all, self._holdings)
        if self._below is not None:
            self._below.check()

    # ---- private ---------------------------------------------------------------------------------------------------

    def _list_loaded(
        self,
        group: GroupBlocks,
        chain: KeyChain,
        wanted: tuple[int, list[int], list[int]],
        found: list[int],
        taken: list[int],
        hit: int,
    ) -> list[int]:
        """The first taken blocks get the content of host hits, and are listed at once. Returns the blocks of all hits,
        in order of place; notes in wanted which were taken."""
        keys, places = chain.keys, wanted[1]
        wanted[2].extend(taken[: len(places)])
        for n, block in zip(places, taken):
            group.pool.seal(block)
            group.index.add(keys[n], keys[n - 1] if n else None, block)
            if self._shelf.max_events:
                self._shelf.note(BlockStored(group.idx, keys[n], chain.parent(n), block))
        if group.chained:
            return found + wanted[2]
        loaded = dict(zip(places, wanted[2]))
        rest = iter(found)
        return [loaded[n] if n in loaded else next(rest) for n in range(hit - len(found) - len(places), hit)]

    def _suspect(self, chains: Sequence[KeyChain], place: int) -> None:
        """A copy into the block at this place of these sequences' tables has failed: neither it nor what was computed
        from it can be hit; who goes on computing from it seals no more."""
        suspect = {key for chain in chains for key in chain.keys[place:]}
        for group in self._all:
            self._shelf.forget_all(group, {key for key in suspect if key in group.index})
        for holding in self._holdings.values():
            chain = holding.chain
            if chain is not None and place < holding.sealed and chain.keys[place] == chains[0].keys[place]:
                holding.caching = False
