from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import pytest
import torch

from lamella.kvtier import CopyJob, Location, TicketResult
from lamella.kvtier.data.disk_mover import DiskMover
from lamella.kvtier.data.host_buffer import HostBuffer
from lamella.kvtier.data.mover import TierMover
from lamella.kvtier.data.queue import EventQueue
from lamella.kvtier.jobs import ClearJob, Job, LookupJob, LookupResult, Presence, TierEvent
from lamella.kvtier.testing.memory_store import MemoryStore

SIZE = 2 * 2 * 2 * 4 * 8 * 4  # layers, tensors, heads, tokens, values, bytes
FINGERPRINT = b"f" * 16


class Shelf:
    """An external manager in memory."""

    def __init__(self) -> None:
        self.records: dict[bytes, bytes] = {}

    def lookup(self, names: Sequence[bytes]) -> int:
        return next((n for n, name in enumerate(names) if name not in self.records), len(names))

    def load(self, items: Sequence[tuple[bytes, memoryview]]) -> list[bool]:
        for name, into in items:
            if name in self.records:
                into[:] = self.records[name]
        return [name in self.records for name, _ in items]

    def store(self, items: Sequence[tuple[bytes, bytes | None, memoryview]]) -> list[bool]:
        self.records.update((name, bytes(data)) for name, _, data in items)
        return [True] * len(items)

    def close(self) -> None:
        pass


class Bench:
    def __init__(self, **options: object) -> None:
        self.shelf = Shelf()
        self.store = MemoryStore()
        self.caches = [(torch.rand(20, 2, 4, 8), torch.rand(20, 2, 4, 8)) for _ in range(2)]
        self.buffer = HostBuffer([SIZE], [16])
        self.mover = TierMover(
            self.buffer,
            fingerprint=FINGERPRINT,
            store=self.store,
            externals=[("shelf", lambda: self.shelf)],
            **options,  # type: ignore[arg-type]
        )
        self.mover.bind([[0, 1]], self.caches)
        self.ticket = 0

    def key(self, n: int) -> bytes:
        return bytes([n]) * 32

    def copy(self, n: int, source: Location, target: Location) -> CopyJob:
        self.ticket += 1
        return CopyJob(self.ticket, self.key(n), source, target, SIZE, parent=self.key(n - 1) if n else None)

    def run(self, *jobs: Job) -> dict[int, TierEvent]:
        """Submit and wait for all of them."""
        self.mover.submit(jobs)
        return self.collect(sum(not isinstance(job, ClearJob) for job in jobs))

    def collect(self, count: int) -> dict[int, TierEvent]:
        ended: dict[int, TierEvent] = {}
        end = time.monotonic() + 20.0
        while len(ended) < count and time.monotonic() < end:
            self.mover.wait(1.0)
            for event in self.mover.poll():
                if not isinstance(event, Presence):
                    assert event.ticket not in ended
                    ended[event.ticket] = event
        assert len(ended) == count
        return ended


def ok(ended: dict[int, TierEvent]) -> list[bool]:
    return [isinstance(event, TicketResult) and event.ok for _, event in sorted(ended.items())]


def device(block: int) -> Location:
    return Location("device", 0, block)


def host(slot: int) -> Location:
    return Location("host", 0, slot)


DISK = Location("disk", 0, 0)
SHELF = Location("external", 0, 0, "shelf")


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.mover.close()
    made.buffer.close()


@pytest.mark.parametrize("below", [DISK, SHELF])
def test_a_block_goes_down_and_comes_back(bench: Bench, below: Location) -> None:
    want = [tensor[5].clone() for layer in bench.caches for tensor in layer]
    assert ok(bench.run(bench.copy(1, device(5), host(3)))) == [True]
    assert ok(bench.run(bench.copy(1, host(3), below))) == [True]
    bench.buffer.view(0, 3)[:] = bytes(SIZE)
    assert ok(bench.run(bench.copy(1, below, host(9)))) == [True]
    bench.mover.submit([bench.copy(1, host(9), device(12))])
    bench.mover.before_step(1)
    bench.mover.wait_layer(0)
    bench.mover.wait_layer(1)
    bench.mover.after_step(1)
    assert all(
        torch.equal(a, b) for a, b in zip(want, (tensor[12] for layer in bench.caches for tensor in layer), strict=True)
    )
    bench.collect(1)
    stats = bench.mover.stats()
    name = below.name or below.tier
    assert (stats[name]["bytes_in"], stats[name]["bytes_out"]) == (SIZE, SIZE)


def test_what_a_store_does_not_have_is_a_failed_ticket(bench: Bench) -> None:
    ended = bench.run(bench.copy(7, DISK, host(1)), bench.copy(7, SHELF, host(2)))
    assert ok(ended) == [False, False]


def test_lookups_count_the_prefix(bench: Bench) -> None:
    bench.run(*(bench.copy(n, host(n), SHELF) for n in (0, 1, 3)))
    keys = tuple(bench.key(n) for n in range(4))
    ended = bench.run(LookupJob(100, "shelf", 0, keys), LookupJob(101, "shelf", 1, keys), LookupJob(102, "?", 0, keys))
    found = {ticket: event.num_present for ticket, event in ended.items() if isinstance(event, LookupResult)}
    assert found == {100: 2, 101: 0, 102: 0}


def test_jobs_of_tiers_that_are_not_here_fail(bench: Bench) -> None:
    nowhere = Location("external", 0, 0, "nowhere")
    ended = bench.run(bench.copy(1, host(1), nowhere), bench.copy(1, DISK, SHELF), bench.copy(1, host(1), host(2)))
    assert ok(ended) == [False, False, False]


def test_content_of_the_disk_is_told_at_the_start() -> None:
    bench = Bench()
    for n in range(5):
        bench.run(bench.copy(n, host(n), DISK))
    bench.mover.close()
    again = TierMover(bench.buffer, store=bench.store)
    assert again.wait_told(5.0)
    told: list[tuple[int, bytes, bytes | None]] = []
    for event in again.poll():
        assert isinstance(event, Presence)
        told += event.added
    assert sorted(told) == [(0, bench.key(n), bench.key(n - 1) if n else None) for n in range(5)]
    again.close()


def test_clear_makes_everything_below_unknown(bench: Bench) -> None:
    bench.run(bench.copy(1, host(1), DISK), bench.copy(1, host(1), SHELF))
    bench.mover.submit([ClearJob("external", "another")])
    assert ok(bench.run(bench.copy(1, SHELF, host(2)))) == [True]
    bench.mover.submit([ClearJob("disk"), ClearJob("external", "shelf")])
    ended = bench.run(
        bench.copy(1, DISK, host(1)), bench.copy(1, SHELF, host(2)), LookupJob(50, "shelf", 0, (bench.key(1),))
    )
    assert ok(ended) == [False, False, False]
    assert ended[50] == LookupResult(50, 0, ended[50].seconds)  # type: ignore[union-attr]


def test_writes_beyond_the_bound_are_dropped_and_reads_are_not() -> None:
    bench = Bench(max_disk_writes=2)
    bench.run(bench.copy(9, host(9), DISK))
    bench.store.gate = threading.Event()
    writes = [bench.copy(n, host(n), DISK) for n in range(5)]
    reads = [bench.copy(9, DISK, host(10 + n)) for n in range(4)]
    bench.mover.submit(writes)
    bench.mover.submit(reads)
    dropped = bench.collect(3)
    assert {event.error for event in dropped.values() if isinstance(event, TicketResult)} == {"queue full"}
    bench.store.gate.set()
    assert ok(bench.collect(6)) == [True] * 6
    assert bench.mover.stats()["disk"]["dropped"] == 3
    assert ok(bench.run(bench.copy(4, host(4), DISK))) == [True]
    bench.mover.close()


def test_wait_wakes_at_once_and_rings() -> None:
    rung = threading.Event()
    bench = Bench(on_event=rung.set)
    bench.store.gate = threading.Event()
    bench.mover.submit([bench.copy(9, host(9), DISK)])
    assert not bench.mover.wait(0.02)
    threading.Timer(0.05, bench.store.gate.set).start()
    start = time.monotonic()
    assert bench.mover.wait(10.0)
    assert time.monotonic() - start < 2.0
    assert rung.is_set()
    assert ok(bench.collect(1)) == [True]
    bench.mover.close()


def test_close_ends_every_job_although_the_disk_hangs() -> None:
    bench = Bench()
    bench.store.gate = threading.Event()
    bench.mover.submit([bench.copy(n, host(n), DISK) for n in range(3)])
    bench.mover.submit([bench.copy(5, device(5), host(5))])
    bench.collect(1)
    start = time.monotonic()
    bench.mover.close()
    assert time.monotonic() - start < 8.0
    bench.mover.submit([bench.copy(7, host(1), DISK), LookupJob(200, "shelf", 0, ())])
    ended = bench.collect(5)
    assert ok(ended) == [False] * 5
    bench.store.gate.set()


class BrokenStore(MemoryStore):
    def poll(self) -> list[TicketResult | Presence]:
        raise OSError("the folder is gone")


def test_a_store_that_breaks_ends_its_jobs_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    buffer = bench.buffer
    broken = TierMover(buffer, store=BrokenStore())
    job = bench.copy(1, host(1), DISK)
    broken.submit([job])
    assert broken.wait(5.0)
    (event,) = broken.poll()
    assert isinstance(event, TicketResult)
    assert "the folder is gone" in str(event.error)
    assert "the disk tier is off" in caplog.text
    broken.submit([job._replace(ticket=99)])
    assert broken.wait(5.0)
    broken.close()
    bench.mover.close()


def test_before_bind_device_jobs_fail_and_steps_pass() -> None:
    mover = TierMover(HostBuffer([64], [2]))
    mover.before_step(0)
    mover.wait_layer(0)
    mover.after_step(0)
    mover.submit([CopyJob(1, b"k" * 32, host(0), device(1), 64)])
    assert mover.wait(1.0)
    assert mover.poll() == [TicketResult(1, False, "no caches are bound")]
    mover.close()
    mover.close()


def test_what_was_submitted_before_a_clear_does_not_outlive_it() -> None:
    bench = Bench()
    bench.store.gate = threading.Event()
    threading.Timer(0.05, bench.store.gate.set).start()
    jobs: list[Job] = []
    for n in range(4):
        jobs += [bench.copy(n, host(n), DISK), bench.copy(n, host(n), SHELF)]
    jobs += [ClearJob("disk"), ClearJob("external"), bench.copy(8, host(8), DISK), bench.copy(8, host(8), SHELF)]
    bench.run(*jobs)
    assert [key for _, key in bench.store.records] == [bench.key(8)]
    keys = tuple(bench.key(n) for n in range(4))
    ended = bench.run(LookupJob(100, "shelf", 0, keys), LookupJob(101, "shelf", 0, (bench.key(8),)))
    assert [event.num_present for _, event in sorted(ended.items()) if isinstance(event, LookupResult)] == [0, 1]
    bench.mover.close()


class StuckStore(MemoryStore):
    """Its methods do not return."""

    def __init__(self, free: threading.Event) -> None:
        super().__init__()
        self.free = free

    def poll(self) -> list[TicketResult | Presence]:
        self.free.wait(30.0)
        return super().poll()


def test_close_leaves_a_store_alone_whose_methods_do_not_return() -> None:
    free = threading.Event()
    buffer = HostBuffer([SIZE], [16])
    events = EventQueue()
    mover = DiskMover(buffer, StuckStore(free), events)
    jobs = [CopyJob(n, bytes([n]) * 32, host(n), DISK, SIZE) for n in range(3)]
    mover.submit(jobs[:1])
    time.sleep(0.05)
    mover.submit(jobs[1:])
    mover.close(0.05)
    ended = {event.ticket: event.error for event in events.take() if isinstance(event, TicketResult)}
    assert ended == dict.fromkeys(range(3), "the disk does not answer")
    free.set()
    time.sleep(0.05)
    assert events.take() == []  # each ended once


def test_a_store_that_breaks_half_way_ends_all_its_jobs(caplog: pytest.LogCaptureFixture) -> None:
    class Half(MemoryStore):
        def write(self, ticket: int, group: int, key: bytes, parent: bytes | None, data: memoryview) -> None:
            if ticket == 2:
                raise RuntimeError("bug")
            super().write(ticket, group, key, parent, data)

    buffer = HostBuffer([SIZE], [16])
    events = EventQueue()
    mover = DiskMover(buffer, Half(), events)
    mover.submit([CopyJob(n, bytes([n]) * 32, host(n), DISK, SIZE) for n in range(6)])
    ended: set[int] = set()
    while len(ended) < 6:
        assert events.wait(5.0)
        for event in events.take():
            assert isinstance(event, TicketResult)
            assert event.ticket not in ended
            assert not event.ok or event.ticket < 2
            ended.add(event.ticket)
    assert "the disk tier is off" in caplog.text
    mover.close()


def test_the_link_is_measured_before_anything_moves(bench: Bench) -> None:
    """And what the disk has told meanwhile is not lost."""
    told = bench.mover.wait_told(5.0)
    news = Presence("disk", "", ((0, bench.key(1), None),), ())
    bench.mover._events.put([news])
    speed = bench.mover.measure_link()
    assert speed is not None
    assert speed > 1e6
    events = bench.mover.poll()
    assert news in events
    assert not any(isinstance(event, TicketResult) for event in events)
    assert told
    bench.mover.close()
    assert bench.mover.measure_link() is None


def test_without_caches_there_is_no_link() -> None:
    mover = TierMover(HostBuffer([SIZE], [4]))
    assert mover.measure_link() is None
    mover.close()
