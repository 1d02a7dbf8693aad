"""The manager with a host tier against a slow account of the same rules, copies ending between any two calls."""

from __future__ import annotations

from random import Random

import pytest

from lamella.kvtier import CopyJob, Extras, Group, KeyChain, Layout, TicketResult, TierManager, TierPlan
from lamella.kvtier.testing.oracle import NaiveLowerTiers


class Row:
    def __init__(self, ids: list[int], salt: str | None, chain: KeyChain | None, computed_len: int) -> None:
        self.ids = ids
        self.salt = salt
        self.chain = chain
        self.computed_len = computed_len
        self.covered_len = len(ids)


class Trace:
    def __init__(self, seed: int) -> None:
        rng = self.rng = Random(seed)
        self.size = rng.choice((1, 2, 4))
        groups = tuple(Group(f"g{n}", "full", self.size, 8) for n in range(rng.choice((1, 1, 2))))
        longest = -(-14 // self.size)
        layout = Layout(groups, tuple(longest + rng.randint(0, 6) for _ in groups))
        slots = tuple(rng.randint(1, 20) for _ in groups)
        self.manager = TierManager(layout, tiers=TierPlan(host_slots=slots))
        self.oracle = NaiveLowerTiers(layout, slots)
        self.rows: dict[int, Row] = {}
        self.contents: dict[bytes, tuple[object, ...]] = {}
        self.next_id = 0
        self.loaded = 0

    def move(self) -> None:
        while jobs := self.manager.take_jobs():
            for job in jobs:
                assert isinstance(job, CopyJob)
                self.manager.complete(TicketResult(job.ticket, True))

    def run(self) -> None:
        for _ in range(200):
            self.rng.choice((self.enter, self.enter, self.compute, self.compute, self.leave, self.reset))()
            self.move()
            self.manager.check()
            self.compare()

    def enter(self) -> None:
        rng = self.rng
        ids = [n % 3 for n in range(1 + rng.randrange(12))]
        if rng.random() < 0.6:
            start = rng.randrange(len(ids))
            ids[start:] = [4 + rng.randrange(3)] * (len(ids) - start)
        salt = rng.choice((None, "a"))
        chain = KeyChain(self.size, Extras(salt=salt)) if rng.random() < 0.9 else None
        sequence, headroom = self.next_id, rng.randrange(2)
        self.next_id += 1
        expected = self.oracle.acquire(sequence, ids, salt, chain is not None, 5, headroom)
        got = self.manager.acquire(sequence, ids, chain, chunk_len=5, headroom=headroom)
        assert (None if got is None else got.cached_len) == expected
        if got is not None:
            self.rows[sequence] = Row(ids, salt, chain, got.cached_len)
            self.loaded += got.loaded_len

    def compute(self) -> None:
        if self.rows:
            sequence = self.rng.choice(sorted(self.rows))
            row = self.rows[sequence]
            row.computed_len = min(len(row.ids), row.computed_len + self.rng.randint(1, 6))
            self.manager.seal(sequence, row.ids, row.computed_len)
            self.oracle.seal(sequence, row.ids, row.computed_len)
            if row.chain is not None:
                for n, key in enumerate(row.chain.keys):
                    self.contents[key] = (row.salt, *row.ids[: (n + 1) * self.size])

    def leave(self) -> None:
        if self.rows:
            sequence = self.rng.choice(sorted(self.rows))
            row = self.rows.pop(sequence)
            self.manager.release(sequence, 0)
            self.oracle.demote(sequence, row.ids)
            self.oracle.release(sequence)

    def reset(self) -> None:
        if self.rng.random() < 0.05:
            self.manager.reset_prefix_cache()
            self.oracle.reset()

    def compare(self) -> None:
        assert self.manager._below is not None
        for group, slots, host in zip(self.manager._groups, self.manager._below.host, self.oracle.hosts):
            assert {self.contents[key] for key in slots} == set(host.used)
            cached = [group.index.key_of(block) for block in group.pool.candidates()]
            expected = self.oracle.cached_contents(group.idx)
            assert [self.contents[key] for key in cached if key is not None] == expected


@pytest.mark.parametrize("part", range(10))
def test_traces_agree_with_the_oracle(part: int) -> None:
    loaded = 0
    for seed in range(20 * part, 20 * (part + 1)):
        trace = Trace(seed)
        trace.run()
        loaded += trace.loaded
    assert loaded > 30
