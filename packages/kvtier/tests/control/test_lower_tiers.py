from __future__ import annotations

import pytest

from lamella.kvtier import (
    AdmissionPlan,
    ClearJob,
    CopyJob,
    Group,
    KeyChain,
    Layout,
    LoadState,
    LookupJob,
    LookupResult,
    Presence,
    TicketResult,
    TierManager,
    TierPlan,
)
from lamella.kvtier.jobs import Job

SIZE = 4


class Bench:
    """A manager of one full group, and a mover that does what a test says."""

    def __init__(self, device: int = 9, host: int = 20, **plan: object) -> None:
        layout = Layout((Group("full", "full", SIZE, 8),), (device,))
        self.manager = TierManager(layout, tiers=TierPlan(host_slots=(host,), **plan))  # type: ignore[arg-type]
        self.jobs: list[Job] = []

    def serve(self, sequence: int, ids: list[int], **more: object) -> tuple[int, int]:
        """Enter, compute, seal, leave, with every copy well done. (cached_len, loaded_len)."""
        chain = KeyChain(SIZE)
        got = self.manager.acquire(sequence, ids, chain, chunk_len=len(ids), **more)  # type: ignore[arg-type]
        assert got is not None
        self.move()
        self.manager.seal(sequence, ids, len(ids))
        self.manager.release(sequence, 0)
        self.move()
        return got.cached_len, got.loaded_len

    def load(self, sequence: int, ids: list[int]) -> LoadState:
        return self.manager.begin_load(sequence, ids, KeyChain(SIZE))

    def take(self) -> list[Job]:
        jobs = self.manager.take_jobs()
        self.jobs += jobs
        return jobs

    def end(self, jobs: list[Job], ok: bool = True) -> None:
        for job in jobs:
            if isinstance(job, CopyJob):
                self.manager.complete(TicketResult(job.ticket, ok, None if ok else "EIO: bad", 0.5))
            elif isinstance(job, LookupJob):
                self.manager.complete(LookupResult(job.ticket, len(job.keys) if ok else 0))
            self.manager.check()

    def move(self) -> None:
        while jobs := self.take():
            self.end(jobs)

    def flood(self, start: int = 1000, count: int = 1) -> None:
        """Push everything off the device."""
        for n in range(count):
            self.serve(10_000 + start + n, [start + n] * (SIZE * (self.manager.num_free(0))))


def kinds(jobs: list[Job]) -> list[tuple[str, str]]:
    return [(job.source.tier, job.target.tier) for job in jobs if isinstance(job, CopyJob)]


def test_what_left_the_device_comes_back_from_the_host() -> None:
    bench = Bench()
    assert bench.serve(1, list(range(17))) == (0, 0)
    bench.flood()
    assert bench.serve(2, list(range(17))) == (16, 16)
    restores = [job for job in bench.jobs if isinstance(job, CopyJob) and job.target.tier == "device"]
    assert [job.key for job in restores] == KeyChain(SIZE).extend(list(range(17)))
    stats = bench.manager.tier_stats()["host"]
    assert (stats.hit_tokens, stats.loads, stats.bytes_out) == (16, 4, 32)


def test_a_restore_waits_for_the_last_step_that_used_its_target() -> None:
    bench = Bench()
    bench.serve(1, list(range(17)))
    manager = bench.manager
    assert manager.acquire(2, list(range(100, 132)), None, chunk_len=32) is not None
    manager.release(2, 7)
    assert manager.acquire(3, list(range(17)), KeyChain(SIZE), chunk_len=17) is not None
    jobs = [job for job in bench.take() if isinstance(job, CopyJob)]
    assert jobs
    assert {job.after_step for job in jobs} == {7}


def test_the_hit_ends_where_the_host_ends() -> None:
    bench = Bench(admission=AdmissionPlan("reused", always_blocks=2))
    bench.serve(1, list(range(17)))
    bench.flood()
    assert bench.serve(2, list(range(17))) == (8, 8)
    assert bench.manager.tier_stats()["host"].refused["admission"] >= 1


def test_opting_out_of_lower_tiers() -> None:
    bench = Bench()
    bench.serve(1, list(range(17)), tiers=False)
    assert kinds(bench.jobs) == []
    bench.serve(2, list(range(17)))
    bench.flood()
    assert bench.manager.begin_load(3, list(range(17)), KeyChain(SIZE), tiers=False) is LoadState.NONE
    assert bench.serve(3, list(range(17)), tiers=False) == (0, 0)
    bench.flood(2000)
    assert bench.serve(4, list(range(17))) == (16, 16)


def test_a_failed_copy_to_the_host_is_a_miss_and_is_tried_again() -> None:
    bench = Bench()
    manager, ids = bench.manager, list(range(17))
    assert manager.acquire(1, ids, KeyChain(SIZE), chunk_len=17) is not None
    manager.seal(1, ids, 9)
    bench.end(bench.take(), ok=False)
    assert len(manager._below.host[0]) == 0  # type: ignore[union-attr]
    manager.seal(1, ids, 17)
    assert len(bench.take()) == 4
    assert manager.tier_stats()["host"].failures == {"EIO": 2}


def test_a_failed_restore_makes_every_reader_suspect_and_is_not_planned_again() -> None:
    bench = Bench(device=20, host=60)
    manager, ids = bench.manager, list(range(17))
    bench.serve(1, ids)
    bench.flood()
    first = manager.acquire(2, ids, KeyChain(SIZE), chunk_len=17)
    assert first is not None
    assert first.loaded_len == 16
    restores = bench.take()
    longer = [*ids, 5, 6, 7, 8]
    second = manager.acquire(3, longer, KeyChain(SIZE), chunk_len=21)  # hits what is still on its way
    other = manager.acquire(4, [9] * 5, KeyChain(SIZE), chunk_len=5)
    assert second is not None
    assert other is not None
    assert (second.cached_len, second.loaded_len) == (16, 0)
    manager.seal(3, longer, 21)
    assert bench.take() == []  # computed from what may be garbage: it does not go down
    bench.end(restores[:2])
    bench.end(restores[2:3], ok=False)
    assert sorted(manager.take_poisoned()) == [2, 3]
    assert manager.take_poisoned() == []
    bench.end(restores[3:])
    manager.release(2, 1, discard=True)
    manager.release(3, 1, discard=True)
    manager.check()
    again = manager.acquire(5, longer, KeyChain(SIZE), chunk_len=21)
    assert again is not None
    assert again.cached_len == 8
    manager.check()


def test_readers_of_a_good_restore_go_down_after_it() -> None:
    bench = Bench(device=20, host=60)
    manager, ids = bench.manager, list(range(17))
    bench.serve(1, ids)
    bench.flood()
    longer = [*ids, 5, 6, 7, 8]
    manager.acquire(2, longer, KeyChain(SIZE), chunk_len=21)
    restores = bench.take()
    manager.seal(2, longer, 21)
    assert bench.take() == []
    bench.end(restores)
    assert kinds(bench.take()) == [("device", "host")]


def test_loading_from_the_disk_while_waiting() -> None:
    bench = Bench(host=8, has_disk=True, max_loading_share=1.0)
    ids = list(range(17))
    bench.serve(1, ids)
    bench.flood(count=2)
    assert bench.load(2, ids) is LoadState.STARTED
    jobs = bench.take()
    assert kinds(jobs) == [("disk", "host")] * 4
    assert bench.load(3, ids) is LoadState.STARTED  # waits for the same copies
    assert bench.take() == []
    bench.end(jobs[:3])
    assert bench.manager.take_loaded() == []
    bench.end(jobs[3:])
    assert sorted(bench.manager.take_loaded()) == [2, 3]
    assert bench.load(2, ids) is LoadState.NONE
    assert bench.serve(2, ids) == (16, 16)
    bench.manager.end_load(3)
    stats = bench.manager.tier_stats()["disk"]
    assert (stats.hit_tokens, stats.loads, stats.load_seconds) == (16, 4, 2.0)
    bench.manager.check()
    assert not bench.manager.busy


def test_a_failed_load_shrinks_the_hit_and_is_not_planned_again() -> None:
    bench = Bench(host=8, has_disk=True, max_loading_share=1.0)
    ids = list(range(17))
    bench.serve(1, ids)
    bench.flood(count=2)
    assert bench.load(2, ids) is LoadState.STARTED
    jobs = bench.take()
    bench.end(jobs[3:])
    bench.end(jobs[1:2], ok=False)
    bench.end(jobs[2:3])
    bench.end(jobs[:1])
    assert bench.manager.take_loaded() == [2]
    assert bench.load(2, ids) is LoadState.NONE
    assert bench.serve(2, ids) == (4, 4)
    bench.flood(5000, count=2)
    assert bench.load(3, ids) is LoadState.STARTED  # computed again, and stored again
    bench.manager.end_load(3)
    bench.move()
    bench.manager.check()


def test_a_load_that_is_too_late_serves_others() -> None:
    bench = Bench(host=8, has_disk=True, max_loading_share=1.0)
    ids = list(range(17))
    bench.serve(1, ids)
    bench.flood(count=2)
    assert bench.load(2, ids) is LoadState.STARTED
    jobs = bench.take()
    bench.manager.end_load(2)
    assert bench.serve(2, ids) == (0, 0)
    bench.end(jobs)
    assert bench.manager.take_loaded() == []
    bench.manager.check()


def test_loads_hold_no_more_than_their_share() -> None:
    bench = Bench(host=8, has_disk=True, max_loading_share=0.5)
    first, second = list(range(17)), list(range(100, 117))
    bench.serve(1, first)
    bench.serve(2, second)
    bench.flood(count=2)
    assert bench.load(3, first) is LoadState.STARTED
    assert bench.load(4, second) is LoadState.LATER
    bench.move()
    assert bench.serve(3, first) == (16, 16)
    assert bench.load(4, second) is LoadState.STARTED
    bench.move()
    assert bench.serve(4, second) == (16, 16)


def test_an_external_manager_is_asked_and_may_lie() -> None:
    bench = Bench(host=8, externals=("shop",), max_loading_share=1.0)
    ids = list(range(17))
    assert bench.load(1, ids) is LoadState.STARTED
    [question] = bench.take()
    assert isinstance(question, LookupJob)
    assert question.keys == tuple(KeyChain(SIZE).extend(ids))
    bench.manager.complete(LookupResult(question.ticket, 3))
    loads = bench.take()
    assert [job.source.name for job in loads if isinstance(job, CopyJob)] == ["shop"] * 3
    bench.end(loads, ok=False)
    assert bench.manager.take_loaded() == [1]
    bench.manager.end_load(1)
    assert bench.load(1, ids) is LoadState.NONE  # not asked for what it did not deliver
    assert bench.take() == []


def test_a_reset_forgets_every_tier_and_what_is_under_way() -> None:
    bench = Bench(host=8, has_disk=True, externals=("shop",))
    manager, ids = bench.manager, list(range(17))
    manager.acquire(1, ids, KeyChain(SIZE), chunk_len=17)
    manager.seal(1, ids, 17)
    down = bench.take()
    bench.end(down[:2])
    stores = bench.take()
    manager.reset_prefix_cache()
    manager.check()
    clears = [job for job in bench.take() if isinstance(job, ClearJob)]
    assert clears == [ClearJob("disk"), ClearJob("external", "shop")]
    bench.end(down[2:])
    bench.end(stores)
    manager.release(1, 0)
    bench.move()
    stats = manager.tier_stats()
    assert [stats[name].num_blocks for name in ("host", "disk", "shop")] == [0, 0, 0]
    assert not manager.busy


def test_news_of_a_store_in_any_order() -> None:
    bench = Bench(host=8, has_disk=True, max_loading_share=1.0)
    ids = list(range(17))
    keys = KeyChain(SIZE).extend(ids)
    added = [(0, key, keys[n - 1] if n else None) for n, key in enumerate(keys)]
    bench.manager.complete(Presence("disk", "", tuple(reversed(added[1:])), ()))
    assert bench.load(1, ids) is LoadState.NONE
    bench.manager.complete(Presence("disk", "", tuple(added[:1]), ()))
    assert bench.load(1, ids) is LoadState.STARTED
    assert len(bench.take()) == 4
    bench.manager.complete(Presence("disk", "", (), ((0, keys[1]),)))
    assert bench.manager.tier_stats()["disk"].num_blocks == 1


def test_a_full_queue_goes_on_when_copies_end() -> None:
    bench = Bench(max_demoting=2, has_disk=True, max_storing=1)
    manager, ids = bench.manager, list(range(17))
    manager.acquire(1, ids, KeyChain(SIZE), chunk_len=17)
    manager.seal(1, ids, 17)
    jobs = bench.take()
    assert len(jobs) == 2
    assert manager.tier_stats()["host"].refused == {"queue": 1}
    bench.end(jobs)
    bench.move()
    assert [manager.tier_stats()[name].num_blocks for name in ("host", "disk")] == [4, 4]


def test_the_second_use_admits() -> None:
    bench = Bench(device=6, host=20, admission=AdmissionPlan("reused"))
    ids = list(range(17))
    bench.serve(1, ids)
    assert kinds(bench.jobs) == []
    bench.flood()
    bench.serve(2, ids)  # computed again
    assert kinds(bench.jobs) == [("device", "host")] * 4


def test_a_tenant_holds_no_more_than_its_quota() -> None:
    bench = Bench(host=8, admission=AdmissionPlan(max_tenant_share=0.25))
    bench.serve(1, list(range(17)), tenant="a")
    bench.serve(2, list(range(100, 117)), tenant="b")
    bench.serve(3, list(range(200, 217)))
    stats = bench.manager.tier_stats()["host"]
    assert stats.num_blocks == 8
    assert stats.refused["quota"] >= 2
    assert bench.manager._below.held_bytes("a") == 16  # type: ignore[union-attr]
    bench.manager.check()


def test_a_ticket_ends_once() -> None:
    bench = Bench()
    bench.manager.acquire(1, list(range(5)), KeyChain(SIZE), chunk_len=5)
    bench.manager.seal(1, list(range(5)), 5)
    [job] = bench.take()
    bench.end([job])
    with pytest.raises(AssertionError, match="ended twice"):
        bench.end([job])


def test_blocks_pass_through_behind_what_a_slower_tier_has() -> None:
    """The host has evicted the prefix of a running sequence, the disk has it: no block goes down twice."""
    bench = Bench(device=20, host=4, has_disk=True)
    manager, ids, chain = bench.manager, list(range(33)), KeyChain(SIZE)
    assert manager.acquire(1, ids, chain, chunk_len=33) is not None
    manager.seal(1, ids, 16)
    bench.move()
    bench.serve(2, list(range(100, 117)))
    assert manager.tier_stats()["disk"].num_blocks == 8
    manager.seal(1, ids, 33)
    first = bench.take()
    assert kinds(first) == [("device", "host")] * len(first)
    assert [job.key for job in first if isinstance(job, CopyJob)] == chain.keys[4 : 4 + len(first)]
    bench.end(first)
    bench.move()
    manager.seal(1, ids, 33)
    manager.release(1, 0)
    bench.move()
    down = [job.key for job in bench.jobs if isinstance(job, CopyJob) and job.source.tier == "device"]
    assert len(down) == len(set(down))
    assert set(chain.keys[:5]) <= set(down)
    host = manager._below.host[0]  # type: ignore[union-attr]
    assert not host.passing
    assert chain.keys[4] not in host
    assert manager.tier_stats()["disk"].num_blocks == len(down)


def test_a_block_that_passes_and_fails_goes_down_again() -> None:
    bench = Bench(device=20, host=4, has_disk=True)
    manager, ids, chain = bench.manager, list(range(25)), KeyChain(SIZE)
    assert manager.acquire(1, ids, chain, chunk_len=25) is not None
    manager.seal(1, ids, 16)
    bench.move()
    bench.serve(2, list(range(100, 117)))
    manager.seal(1, ids, 21)
    [copy] = bench.take()
    bench.end([copy], ok=False)
    assert bench.take() == []
    manager.seal(1, ids, 25)
    manager.release(1, 0)
    again = bench.take()
    assert [job.key for job in again if isinstance(job, CopyJob)] == chain.keys[4:6]
    bench.end(again)
    stores = bench.take()
    assert kinds(stores) == [("host", "disk")] * 2
    manager.reset_prefix_cache()
    manager.check()
    bench.end(stores)
    bench.move()
    assert not manager.busy


def test_what_waits_to_be_stored_is_not_evicted() -> None:
    bench = Bench(device=20, host=8, has_disk=True, max_storing=1)
    manager = bench.manager
    ids = list(range(17))
    manager.acquire(1, ids, KeyChain(SIZE), chunk_len=17)
    manager.seal(1, ids, 17)
    bench.end(bench.take())
    stores = bench.take()
    assert kinds(stores) == [("host", "disk")]
    manager.release(1, 0)
    other = list(range(100, 133))
    manager.acquire(2, other, KeyChain(SIZE), chunk_len=33)
    manager.seal(2, other, 33)
    copies = bench.take()
    assert len(copies) == 4, "four slots are kept for what is not stored yet"
    bench.end(stores)
    bench.end(copies)
    manager.release(2, 0)
    bench.move()
    assert manager.tier_stats()["disk"].refused == {}
    assert set(KeyChain(SIZE).extend(ids)) <= set(manager._below.books["disk"][0])  # type: ignore[union-attr]


def test_a_block_that_overtakes_the_one_before_it_is_stored_behind_it() -> None:
    bench = Bench(device=20, host=8, has_disk=True)
    manager, ids, chain = bench.manager, list(range(13)), KeyChain(SIZE)
    manager.acquire(1, ids, chain, chunk_len=13)
    manager.seal(1, ids, 13)
    first, second, third = bench.take()
    bench.end([third, second])
    assert bench.take() == []
    bench.end([first])
    assert [job.key for job in bench.take() if isinstance(job, CopyJob)] == chain.keys
    assert manager.tier_stats()["disk"].refused == {}


def test_a_load_that_found_no_slot_goes_on_when_pins_have_gone() -> None:
    bench = Bench(device=20, host=8, has_disk=True, max_loading_share=1.0)
    manager, ids = bench.manager, list(range(33))
    bench.serve(1, ids)
    bench.flood(count=2)
    running = list(range(100, 117))
    manager.acquire(2, running, KeyChain(SIZE), chunk_len=17)
    manager.seal(2, running, 17)
    down = bench.take()
    assert len(down) == 4
    assert bench.load(3, ids) is LoadState.STARTED
    some = bench.take()
    assert len(some) == 4
    bench.end(down)
    for store in iter(bench.take, []):
        bench.end(store)
    bench.end(some)
    rest = bench.take()
    assert len(rest) == 4
    assert manager.take_loaded() == []
    bench.end(rest)
    assert manager.take_loaded() == [3]
    manager.release(2, 0)
    assert bench.serve(3, ids) == (32, 32)
    assert manager.tier_stats()["disk"].hit_tokens == 32
