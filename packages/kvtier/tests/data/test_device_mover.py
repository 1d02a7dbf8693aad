from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from lamella.kvtier import CopyJob, LayoutError, Location, TicketResult
from lamella.kvtier.data.device_mover import DeviceMover, Rows
from lamella.kvtier.data.host_buffer import HostBuffer
from lamella.kvtier.data.queue import EventQueue

KEY = b"k" * 32
Caches = list[tuple[torch.Tensor, ...]]


def caches_of(dtype: torch.dtype, shapes: list[list[tuple[int, ...]]], seed: int = 0) -> Caches:
    """Random bytes in every cache."""
    generator = torch.Generator().manual_seed(seed)
    made: Caches = []
    for layer in shapes:
        tensors = []
        for shape in layer:
            num_bytes = torch.Size(shape).numel() * dtype.itemsize
            raw = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)
            tensors.append(raw.view(dtype).view(shape))
        made.append(tuple(tensors))
    return made


def block_bytes(caches: Caches, layers: list[int], block: int) -> bytes:
    """What a slot must hold of this block, by the slowest road."""
    return b"".join(
        bytes(tensor[block].contiguous().view(torch.uint8).flatten().tolist())
        for layer in layers
        for tensor in caches[layer]
    )


def collect(events: EventQueue, count: int) -> dict[int, TicketResult]:
    results: dict[int, TicketResult] = {}
    end = time.monotonic() + 20.0
    while len(results) < count and time.monotonic() < end:
        events.wait(1.0)
        for event in events.take():
            assert isinstance(event, TicketResult)
            assert event.ticket not in results, "a ticket ended twice"
            results[event.ticket] = event
    assert len(results) == count
    return results


def store(ticket: int, group: int, block: int, slot: int, after_step: int = -1) -> CopyJob:
    return CopyJob(ticket, KEY, Location("device", group, block), Location("host", group, slot), 1, after_step)


def load(ticket: int, group: int, slot: int, block: int, after_step: int = -1) -> CopyJob:
    return CopyJob(ticket, KEY, Location("host", group, slot), Location("device", group, block), 1, after_step)


class Bench:
    """Two groups: layers 0, 2, 3 with 40 blocks and layers 1, 4 with 20 blocks of another shape."""

    layers = ([0, 2, 3], [1, 4])

    def __init__(self, dtype: torch.dtype, cls: type[DeviceMover] = DeviceMover) -> None:
        wide = [(40, 2, 4, 6), (40, 2, 4, 6)]
        narrow = [(20, 1, 4, 10), (20, 1, 4, 10), (20, 3)]
        self.caches = caches_of(dtype, [wide, narrow, wide, wide, narrow])
        sizes = [len(block_bytes(self.caches, members, 1)) for members in self.layers]
        self.buffer = HostBuffer(sizes, [50, 30])
        self.events = EventQueue()
        self.mover = cls(self.buffer, self.layers, self.caches, self.events)

    def bytes_of(self, group: int, block: int) -> bytes:
        return block_bytes(self.caches, self.layers[group], block)


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = Bench(getattr(request, "param", torch.float32))
    yield made
    made.mover.close()
    made.buffer.close()


@pytest.mark.parametrize("bench", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8], indirect=True)
def test_blocks_come_back_as_they_were(bench: Bench) -> None:
    blocks = [(0, 7), (0, 3), (0, 39), (1, 19), (1, 1)]
    slots = [44, 2, 3, 29, 0]
    want = [bench.bytes_of(group, block) for group, block in blocks]
    bench.mover.submit([store(n, g, b, slot) for n, ((g, b), slot) in enumerate(zip(blocks, slots))])
    assert all(result.ok for result in collect(bench.events, 5).values())
    for (group, _), slot, content in zip(blocks, slots, want):
        assert bytes(bench.buffer.view(group, slot)) == content
    others = [(0, 8), (0, 5), (0, 1), (1, 2), (1, 3)]
    bench.mover.submit([load(n, g, slot, b) for n, ((g, b), slot) in enumerate(zip(others, slots))])
    assert all(result.ok for result in collect(bench.events, 5).values())
    assert [bench.bytes_of(group, block) for group, block in others] == want
    assert (bench.mover.stats()["bytes_in"], bench.mover.stats()["bytes_out"]) == (5, 5)


def test_ten_thousand_random_jobs_against_plain_bytes(bench: Bench) -> None:
    """Rounds of stores, loads and steps; within a round no block and no slot is in two jobs, as pins have it."""
    rng = random.Random(5)
    device = {(g, b): bench.bytes_of(g, b) for g, count in ((0, 40), (1, 20)) for b in range(1, count)}
    host = {(g, s): bytes(bench.buffer.view(g, s)) for g, count in ((0, 50), (1, 30)) for s in range(count)}
    ticket = 0
    step = 0
    while ticket < 10_000:
        jobs: list[CopyJob] = []
        places = list(device)
        slots = list(host)
        rng.shuffle(places)
        rng.shuffle(slots)
        changed: list[tuple[bool, tuple[int, int], tuple[int, int]]] = []
        for place in places[: rng.randrange(1, 40)]:
            slot = next((slot for slot in slots if slot[0] == place[0]), None)
            if slot is None:
                continue
            slots.remove(slot)
            ticket += 1
            loads = rng.random() < 0.5
            after = step if rng.random() < 0.3 else -1
            make = load(ticket, *slot, place[1], after) if loads else store(ticket, *place, slot[1], after)
            jobs.append(make)
            changed.append((loads, place, slot))
        for at in sorted(rng.sample(range(len(jobs) + 1), min(2, len(jobs) + 1))) + [len(jobs)]:
            bench.mover.submit(jobs[:at])
            del jobs[:at]
        bench.mover.after_step(step)
        step += 1
        bench.mover.before_step(step)
        for layer in range(5):
            bench.mover.wait_layer(layer)
        # no ticket was waited for: the step may read what was loaded
        for loads, place, slot in changed:
            if loads:
                device[place] = host[slot]
                assert bench.bytes_of(*place) == host[slot]
            else:
                host[slot] = device[place]
        assert all(result.ok for result in collect(bench.events, len(changed)).values())
        step += 1
    for place, content in device.items():
        assert bench.bytes_of(*place) == content
    for slot, content in host.items():
        assert bytes(bench.buffer.view(*slot)) == content
    bench.mover.close()


@pytest.mark.parametrize(
    ("job", "error"),
    [
        (load(1, 0, 50, 3), "host slot 50 of group 0, which has 50"),
        (load(1, 0, -1, 3), "host slot -1"),
        (load(1, 0, 4, 0), "block 0 of group 0, which has blocks 1 to 39"),
        (store(1, 1, 20, 3), "block 20 of group 1"),
        (store(1, 2, 20, 3), "group 2 on the host and 2 on the device"),
        (CopyJob(1, KEY, Location("host", 0, 1), Location("device", 1, 1), 1), "do not go together"),
        (CopyJob(1, KEY, Location("host", 0, 1), Location("disk", 0, 0), 1), "does not copy from host to disk"),
    ],
)
def test_what_makes_no_sense_fails_and_the_rest_goes_on(bench: Bench, job: CopyJob, error: str) -> None:
    bench.mover.submit([job, store(2, 0, 5, 5)])
    results = collect(bench.events, 2)
    assert not results[1].ok
    assert error in str(results[1].error)
    assert results[2].ok
    assert bench.mover.stats()["failures"] == 1


class GatedMover(DeviceMover):
    """Layers are copied when the test says so."""

    def __init__(self, *arguments: object, **options: object) -> None:
        self.allowed = threading.Semaphore(0)
        self.trace: list[tuple[str, int]] = []
        super().__init__(*arguments, **options)  # type: ignore[arg-type]

    def _load_layer(self, layer: int, rows: Rows) -> None:
        self.allowed.acquire()
        self.trace.append(("load", layer))
        super()._load_layer(layer, rows)

    def _store_layer(self, layer: int, rows: Rows) -> None:
        self.allowed.acquire()
        self.trace.append(("store", layer))
        super()._store_layer(layer, rows)


def test_a_step_waits_for_each_layer_as_long_as_needed() -> None:
    bench = Bench(torch.float32, GatedMover)
    mover = bench.mover
    assert isinstance(mover, GatedMover)
    mover.submit([load(1, 0, 1, 4), load(2, 1, 1, 4)])
    mover.before_step(1)
    passed: list[int] = []

    def step() -> None:
        for layer in range(5):
            mover.wait_layer(layer)
            passed.append(layer)

    thread = threading.Thread(target=step)
    thread.start()
    for layer in range(5):
        time.sleep(0.02)
        assert passed == list(range(layer))
        mover.allowed.release()
    thread.join(5.0)
    assert passed == [0, 1, 2, 3, 4]
    assert mover.trace == [("load", n) for n in range(5)]
    # what comes after before_step() is not awaited
    collect(bench.events, 2)
    mover.before_step(2)
    mover.submit([load(3, 0, 1, 4)])
    mover.wait_layer(4)
    for _ in range(5):
        mover.allowed.release()
    collect(bench.events, 1)
    mover.close()


def test_a_load_overtakes_a_store_between_two_layers() -> None:
    bench = Bench(torch.float32, GatedMover)
    mover = bench.mover
    assert isinstance(mover, GatedMover)
    mover.submit([store(n, 0, n, n) for n in range(1, 30)])
    mover.allowed.release()
    while not mover.trace:
        time.sleep(0.001)
    time.sleep(0.02)
    mover.submit([load(100, 0, 40, 35)])
    for _ in range(100):
        mover.allowed.release()
    collect(bench.events, 30)
    loads = [n for n, (kind, _) in enumerate(mover.trace) if kind == "load"]
    assert loads in ([1, 2, 3], [2, 3, 4])  # at most one more layer of the store went first
    mover.close()


def test_stores_wait_for_their_step(bench: Bench) -> None:
    bench.mover.submit([store(1, 0, 5, 5, after_step=3), store(2, 0, 6, 6)])
    assert list(collect(bench.events, 1)) == [2]
    bench.mover.after_step(2)
    assert not bench.events.wait(0.05)
    bench.caches[0][0][5] = 1.0
    bench.mover.after_step(3)
    assert list(collect(bench.events, 1)) == [1]
    assert bytes(bench.buffer.view(0, 5)) == bench.bytes_of(0, 5)


def test_a_load_that_waits_for_the_step_that_waits_for_it_fails(bench: Bench) -> None:
    bench.mover.submit([load(1, 0, 5, 5, after_step=3)])
    bench.mover.before_step(3)
    bench.mover.wait_layer(0)
    result = collect(bench.events, 1)[1]
    assert not result.ok
    assert "waits for step 3" in str(result.error)


class BrokenMover(DeviceMover):
    def _load_layer(self, layer: int, rows: Rows) -> None:
        raise RuntimeError("the device is lost")


def test_a_copy_that_raises_fails_its_tickets_and_holds_up_no_step() -> None:
    bench = Bench(torch.float32, BrokenMover)
    bench.mover.submit([load(1, 0, 5, 5), load(2, 1, 5, 5)])
    bench.mover.before_step(1)
    for layer in range(5):
        bench.mover.wait_layer(layer)
    results = collect(bench.events, 2)
    assert [result.error for result in results.values()] == ["copy to the device failed: the device is lost"] * 2
    bench.mover.submit([store(3, 0, 5, 5)])
    assert collect(bench.events, 1)[3].ok
    bench.mover.close()


def test_close_ends_what_waits_and_whoever_waits() -> None:
    bench = Bench(torch.float32, GatedMover)
    mover = bench.mover
    assert isinstance(mover, GatedMover)
    mover.submit([load(1, 0, 1, 4)])
    mover.before_step(1)
    mover.submit([store(2, 0, 9, 9, after_step=7)])
    waiting = threading.Thread(target=mover.wait_layer, args=(4,))
    waiting.start()
    threading.Timer(0.05, lambda: [mover.allowed.release() for _ in range(9)]).start()
    mover.close()
    waiting.join(5.0)
    assert not waiting.is_alive()
    mover.submit([store(3, 0, 9, 9)])
    results = collect(bench.events, 3)
    assert (results[1].ok, results[2].ok, results[3].ok) == (True, False, False)
    assert results[3].error == "the mover is closed"


def test_caches_that_do_not_fit_the_slots_are_refused() -> None:
    caches = caches_of(torch.float32, [[(8, 2, 4)], [(8, 2, 4)]])
    buffer = HostBuffer([64], [4])
    with pytest.raises(LayoutError, match="a block of its layers has 32 bytes, a slot holds 64"):
        DeviceMover(buffer, [[0]], caches, EventQueue())
    with pytest.raises(LayoutError, match="2 groups of layers, but the host buffer has 1"):
        DeviceMover(buffer, [[0], [1]], caches, EventQueue())
    across = [(caches[0][0].permute(0, 2, 1),), caches[1]]
    with pytest.raises(LayoutError, match="layer 0: the blocks of a cache are not contiguous"):
        DeviceMover(buffer, [[0, 1]], across, EventQueue())
    buffer.close()


def test_ranks_share_a_slot_and_each_writes_its_part() -> None:
    size = 64
    buffer = HostBuffer([size], [4], num_ranks=2)
    events = EventQueue()
    parts = [caches_of(torch.float32, [[(8, 2, 8)]], seed=rank) for rank in range(2)]
    movers = [DeviceMover(buffer, [[0]], caches, events, rank=rank) for rank, caches in enumerate(parts)]
    for rank, mover in enumerate(movers):
        mover.submit([store(rank, 0, 3, 2)])
    collect(events, 2)
    assert bytes(buffer.view(0, 2)) == block_bytes(parts[0], [0], 3) + block_bytes(parts[1], [0], 3)
    for mover in movers:
        mover.close()


def test_caches_made_in_inference_mode_can_be_written() -> None:
    with torch.inference_mode():
        caches = [(torch.zeros(8, 2, 8),)]
    buffer = HostBuffer([64], [4])
    events = EventQueue()
    mover = DeviceMover(buffer, [[0]], caches, events)
    buffer.view(0, 1)[:] = bytes(range(64))
    mover.submit([load(1, 0, 1, 2)])
    assert collect(events, 1)[1].ok
    assert block_bytes(caches, [0], 2) == bytes(range(64))
    mover.close()


def test_stores_take_a_small_share_of_a_running_step(bench: Bench) -> None:
    bench.mover.before_step(1)
    start = time.perf_counter()
    bench.mover.submit([store(n, 0, n, n) for n in range(1, 30)])
    results = collect(bench.events, 29)
    assert sum(result.seconds for result in results.values()) < 0.1 * (time.perf_counter() - start)
    bench.mover.before_step(2)
    bench.mover.submit([store(n, 0, n, n) for n in range(1, 30)])
    bench.mover.after_step(2)  # a store that rests is woken by the end of the step
    collect(bench.events, 29)
