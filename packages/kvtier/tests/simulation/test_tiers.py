"""A scheduler, a manager and tiers that fail in every way, by seeds. Each content is checked when it is read."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from lamella.kvtier import (
    AdmissionPlan,
    CostModel,
    Extras,
    Group,
    KeyChain,
    Layout,
    LoadState,
    TierManager,
    TierPlan,
)
from lamella.kvtier.jobs import Presence, TicketResult, TierEvent
from lamella.kvtier.testing.fake_clock import FakeClock
from lamella.kvtier.testing.fake_tiers import GARBAGE, FakeTiers, Faults

NUM_DEFAULT_SEEDS = 300
WINDOWS: list[tuple[int | None, ...]] = [(None,), (None,), (3,), (None, 5), (None, 1, 6), (5, None)]


class Row:
    """A sequence as the scheduler sees it."""

    def __init__(self, ids: list[int], salt: str | None, chain: KeyChain | None, tiers: bool) -> None:
        self.ids = ids
        self.salt = salt
        self.chain = chain
        self.tiers = tiers
        self.computed_len = 0
        self.covered_len = 0
        self.live: list[int] = []
        self.source: tuple[int, ...] = ()
        self.tainted = False
        """It has read garbage, while nobody knew yet that a copy had failed."""


class World:
    """Everything of one seed."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = Random(seed)
        self.windows = rng.choice(WINDOWS)
        self.size = rng.choice((1, 2, 4))
        groups = tuple(
            Group(f"g{i}", "full" if w is None else "sliding", self.size, 8, window=w)
            for i, w in enumerate(self.windows)
        )
        self.has_states = rng.random() < 0.3
        if self.has_states:
            groups += (Group("states", "state", self.size, 8, num_columns=rng.choice((1, 2))),)
        longest = -(-26 // self.size)
        self.layout = Layout(groups, tuple(longest + rng.randint(3, 12) for _ in groups))
        self.externals = ("shop",) if rng.random() < 0.4 else ()
        self.plan = TierPlan(
            host_slots=tuple(rng.randint(2, 3 * longest) for _ in groups),
            eviction=rng.choice(("lru", "s3fifo")),
            admission=AdmissionPlan(
                mode=rng.choice(("all", "all", "reused")),
                always_blocks=rng.choice((0, 2)),
                headroom=rng.choice((0.0, 0.5)),
                recent_keys=8,
                max_tenant_share=rng.choice((1.0, 1.0, 0.4)),
            ),
            has_disk=rng.random() < 0.8,
            externals=self.externals,
            max_demoting=rng.choice((1, 4, 1000)),
            max_storing=rng.choice((1, 3, 1000)),
            max_waiting=rng.choice((1, 5, 1000)),
            max_storing_share=rng.choice((0.1, 0.5, 1.0)),
            max_loading_share=rng.choice((0.2, 1.0)),
            cost=CostModel({"disk": rng.choice((10.0, 1e9))}, {}, *rng.choice(((0.0, 0.0), (0.1, 0.01)))),
        )
        self.clock = FakeClock()
        self.faults = Faults(
            fails=rng.choice((0.0, 0.05, 0.3)),
            lost=rng.choice((0.0, 0.05)),
            lies=rng.choice((0.0, 0.5)),
            latency_s=rng.choice(((0.1, 0.1), (0.0, 3.0), (0.5, 8.0))),
            disk_factor=rng.choice((1.0, 5.0)),
            vanish=rng.choice((0.0, 0.1)),
        )
        empty: list[object] = [None] * self.size
        self.memory: list[list[object]] = [[tuple(empty) for _ in range(n)] for n in self.layout.num_blocks]
        self.fakes = FakeTiers(self.clock, rng, self.faults, self.memory, self.externals)
        self.manager = TierManager(self.layout, max_events=4, tiers=self.plan)
        self.waiting: dict[int, Row] = {}
        self.loading: dict[int, Row] = {}
        self.running: dict[int, Row] = {}
        self.untold: list[TierEvent] = []
        """What has happened, but not reached the manager."""
        self.next_id = 0
        self.step = 0
        self.stale_news = False
        self.seen: Counter[str] = Counter()

    def run(self, num_ops: int) -> None:
        ops = [
            self.arrive,
            self.arrive,
            self.begin,
            self.enter,
            self.enter,
            self.compute,
            self.compute,
            self.compute,
            self.leave,
        ]
        ops += [self.pass_time, self.tell, self.tell]
        for _ in range(num_ops):
            self.rng.choice(ops if self.rng.random() < 0.97 else [self.rare])()
            self.fakes.submit(self.manager.take_jobs())
            self.manager.check()
        self.seen.update(
            {f"{name} failures": sum(s.failures.values()) for name, s in self.manager.tier_stats().items()}
        )
        self.drain()

    # ---- sequences ---------------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        """A prompt: a prefix of one of few texts, now and then with a tail of its own."""
        rng = self.rng
        if len(self.waiting) > 3:
            return
        text = min(rng.randrange(6), rng.randrange(6))
        ids = [(n * n * text + n) % 7 for n in range(rng.choice((5, 12, 20)) + rng.randint(0, 2))]
        if rng.random() < 0.3:
            ids += [8 + rng.randrange(3)] * rng.randint(1, 4)
        salt = rng.choice((None, None, "a"))
        chain = KeyChain(self.size, Extras(salt=salt)) if rng.random() < 0.95 else None
        self.waiting[self.next_id] = Row(ids, salt, chain, rng.random() < 0.95)
        self.next_id += 1

    def begin(self) -> None:
        if not self.waiting:
            return
        sequence = self.rng.choice(sorted(self.waiting))
        row = self.waiting[sequence]
        state = self.manager.begin_load(sequence, row.ids, row.chain, tiers=row.tiers, tenant=self.tenant(sequence))
        self.seen[state.name] += 1
        if state is LoadState.STARTED:
            self.loading[sequence] = self.waiting.pop(sequence)

    def enter(self) -> None:
        if not self.waiting:
            return
        rng = self.rng
        sequence = rng.choice(sorted(self.waiting))
        row = self.waiting[sequence]
        got = self.manager.acquire(
            sequence,
            row.ids,
            row.chain,
            chunk_len=rng.randint(1, 12),
            headroom=rng.randint(0, 1),
            tiers=row.tiers,
            tenant=self.tenant(sequence),
        )
        if got is None:
            return
        assert got.cached_len < len(row.ids)
        self.seen.update(entered=1, cached=got.cached_len, loaded=got.loaded_len)
        row.computed_len, row.covered_len, row.tainted = got.cached_len, got.covered_len, False
        if self.has_states:
            row.live, row.source = got.tables[-1], got.snapshots
            assert len(row.live) == self.layout.groups[-1].num_columns
            assert bool(row.source) == bool(got.cached_len)
        self.running[sequence] = self.waiting.pop(sequence)

    def compute(self) -> None:
        """A step of one sequence: the copies that it may read come first; what became of them is told later."""
        if not self.running:
            return
        rng = self.rng
        sequence = rng.choice(sorted(self.running))
        row = self.running[sequence]
        count = min(rng.randint(1, 12), len(row.ids) - row.computed_len)
        end = row.computed_len + count
        if end > row.covered_len:
            grown = self.manager.extend([(sequence, end)])
            if not grown:
                return
            row.covered_len = grown[0].covered_len
        snapshot = None
        if self.has_states and end // self.size > row.computed_len // self.size and rng.random() < 0.7:
            end = end // self.size * self.size
            count = end - row.computed_len
            snapshot = self.manager.snapshot(sequence, end)
        self.fakes.submit(self.manager.take_jobs())
        self.untold += self.fakes.poll(only_restores=True)
        self.step += 1
        self.fakes.steps_run = self.step
        self.write(sequence, row, row.computed_len, count)
        if self.has_states:
            self.advance_state(sequence, row, end, snapshot)
        row.computed_len = end
        if end == len(row.ids):
            row.ids.append(rng.randrange(5))
        self.manager.seal(sequence, row.ids, row.computed_len)
        self.manager.slide(sequence, row.computed_len, self.step)

    def leave(self) -> None:
        if self.running:
            sequence = self.rng.choice(sorted(self.running))
            row = self.running[sequence]
            if not row.tainted and row.computed_len + 1 >= len(row.ids):
                del self.running[sequence]
                self.manager.release(sequence, self.step)

    def preempt(self, sequence: int, discard: bool = False) -> None:
        row = self.running.pop(sequence)
        self.manager.release(sequence, self.step, discard=discard)
        self.waiting[sequence] = row

    # ---- time and faults ---------------------------------------------------------------------------------------------

    def pass_time(self) -> None:
        self.clock.advance(self.rng.choice((0.3, 2.0, 6.0)))
        self.untold += self.fakes.poll()

    def tell(self) -> None:
        """Some of what has happened reaches the manager, in any order."""
        self.rng.shuffle(self.untold)
        count = self.rng.randint(0, len(self.untold))
        told, self.untold = self.untold[:count], self.untold[count:]
        for event in told:
            self.manager.complete(event)
        poisoned = self.manager.take_poisoned()
        self.seen["poisoned"] += len(poisoned)
        for sequence in poisoned:
            self.preempt(sequence, discard=True)
        if not any(isinstance(event, TicketResult) and not event.ok for event in self.untold):
            assert not any(row.tainted for row in self.running.values()), "a reader of garbage was not named"
        for sequence in self.manager.take_loaded():
            self.waiting[sequence] = self.loading.pop(sequence)

    def rare(self) -> None:
        rng = self.rng
        what = rng.randrange(7)
        if what == 0:  # too late, or aborted while it loads
            for sequence in [s for s in sorted(self.loading) if rng.random() < 0.5]:
                self.manager.end_load(sequence)
                row = self.loading.pop(sequence)
                if rng.random() < 0.5:
                    self.waiting[sequence] = row
        elif what == 1:  # aborted while it waits
            for sequence in [s for s in sorted(self.waiting) if rng.random() < 0.3]:
                self.manager.end_load(sequence)
                del self.waiting[sequence]
        elif what == 2:
            for sequence in sorted(self.running):
                if not self.running[sequence].tainted and rng.random() < 0.7:
                    self.preempt(sequence)
        elif what == 3 and rng.random() < 0.5:
            # news from before the reset would list what is gone: a miss later, and no more
            self.stale_news |= any(isinstance(event, Presence) for event in self.untold)
            self.manager.reset_prefix_cache()
        elif what == 4 and self.running:
            sequence = rng.choice(sorted(self.running))
            self.preempt(sequence, discard=True)
        elif what == 5 and rng.random() < 0.3:
            self.restart()

    def restart(self) -> None:
        """Everything but the slow tiers is lost; the disk tells what it has."""
        disk, externals = self.fakes.disk, self.fakes.externals
        self.fakes = FakeTiers(self.clock, self.rng, self.faults, self.memory, self.externals)
        self.fakes.steps_run = self.step
        self.fakes.disk, self.fakes.externals = disk, externals
        self.manager = TierManager(self.layout, max_events=4, tiers=self.plan)
        self.untold = [self.fakes.content()]
        self.waiting, self.loading, self.running = {}, {}, {}

    def drain(self) -> None:
        """All copies end, all sequences go: nothing is held any more."""
        manager = self.manager
        for _ in range(10_000):
            self.fakes.submit(manager.take_jobs())
            if self.fakes.idle and not self.untold:
                break
            if not self.fakes.idle:
                self.clock.advance(max(0.0, self.fakes.next_s - self.clock.now()))
            self.untold += self.fakes.poll()
            while self.untold:
                self.tell()
        assert not self.loading, "a sequence waits for nothing"
        for sequence in sorted(self.running):
            manager.release(sequence, self.step)
        for sequence in sorted(self.waiting):
            manager.end_load(sequence)
        while jobs := manager.take_jobs():
            self.fakes.submit(jobs)
            while not self.fakes.idle:
                self.clock.advance(max(0.0, self.fakes.next_s - self.clock.now()))
                for event in self.fakes.poll():
                    manager.complete(event)
        manager.check()
        assert not manager.busy
        assert all(usage.in_use == 0 for usage in manager.usage())
        assert manager._below is not None
        assert all(not any(host.pins) for host in manager._below.host)
        self.compare_contents()

    def compare_contents(self) -> None:
        """What is listed on the disk is there, and nothing anywhere is garbage."""
        assert self.manager._below is not None
        for idx, host in enumerate(self.manager._below.host):
            assert all(self.fakes.host[idx][slot - 1] is not GARBAGE for slot in host.listed.values())
        if not self.faults.vanish and not self.stale_news:
            for idx, book in enumerate(self.manager._below.books.get("disk", ())):
                assert all((idx, key) in self.fakes.disk for key in book)

    # ---- memory ------------------------------------------------------------------------------------------------------

    def tenant(self, sequence: int) -> str | None:
        return (None, "x", "y")[sequence % 3]

    def write(self, sequence: int, row: Row, start: int, count: int) -> None:
        """What the device would do, and what it would read first."""
        self.read(sequence, row, start)
        for group in range(len(self.windows)):
            table = self.manager.table(sequence, group)
            for position in range(start, start + count):
                block = table[position // self.size]
                held = self.memory[group][block]
                slots = list(held) if isinstance(held, tuple) else [GARBAGE] * self.size
                slots[position % self.size] = GARBAGE if row.tainted else (row.salt, *row.ids[: position + 1])
                self.memory[group][block] = tuple(slots)

    def advance_state(self, sequence: int, row: Row, end: int, snapshot: tuple[int, ...] | None) -> None:
        """The live state goes on from the snapshot, or from where it was."""
        memory = self.memory[-1]
        if row.source:
            self.look(row, memory[row.source[0]], row.computed_len, f"snapshot of sequence {sequence}")
            row.source = ()
            self.seen["snapshot hits"] += 1
        elif row.computed_len and not row.tainted:
            self.look(row, memory[row.live[0]], row.computed_len, f"live state of sequence {sequence}")
        state = GARBAGE if row.tainted else (row.salt, *row.ids[:end])
        memory[row.live[0]] = state
        if snapshot is not None:
            memory[snapshot[0]] = state

    def look(self, row: Row, found: object, length: int, what: str) -> None:
        """What was read must be this prefix, unless a copy failed and nobody knows yet."""
        if found is GARBAGE:
            assert any(isinstance(e, TicketResult) and not e.ok for e in self.untold), f"garbage read: {what}"
            row.tainted = True
        else:
            assert found == (row.salt, *row.ids[:length]), f"{what}: {found}"

    def read(self, sequence: int, row: Row, position: int) -> None:
        """A token at this position must find what it reads, unless a copy failed and nobody knows yet."""
        for group, window in enumerate(self.windows):
            table = self.manager.table(sequence, group)
            first = 0 if window is None else max(0, position - window + 1)
            for p in range(first, position):
                held = self.memory[group][table[p // self.size]]
                found = held[p % self.size] if isinstance(held, tuple) else held
                self.look(row, found, p + 1, f"group {group}, position {p} of sequence {sequence}")


def run_seed(seed: int) -> World:
    world = World(seed)
    try:
        world.run(num_ops=220)
    except BaseException as error:
        error.args = (f"seed {seed}: {error.args[0] if error.args else ''}", *error.args[1:])
        raise
    return world


def test_seeds() -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_DEFAULT_SEEDS):
        seen.update(run_seed(seed).seen)
    print(dict(seen))
    rare = ("loaded", "STARTED", "poisoned", "disk failures", "snapshot hits")
    few = {what: seen[what] for what in rare if seen[what] < 5}
    assert not few, f"hardly ever happened, so that this run says little: {few}"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_many_seeds(part: int) -> None:
    """10,000 in 20 parts: `-k 'part3'` or `test_many_seeds[3]` runs one."""
    for seed in range(1000 + 500 * part, 1000 + 500 * (part + 1)):
        run_seed(seed)
