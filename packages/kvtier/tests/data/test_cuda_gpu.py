"""CudaDeviceMover on a GPU: bytes and order, by the driver's copies and through the staging buffer."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lamella.kvtier import CopyJob, Location, TicketResult
from lamella.kvtier.data.cuda_lanes import LOADS, STORES
from lamella.kvtier.data.cuda_mover import CudaDeviceMover
from lamella.kvtier.data.driver_copier import driver_copier
from lamella.kvtier.data.host_buffer import HostBuffer
from lamella.kvtier.data.mover import TierMover
from lamella.kvtier.data.pinning import SlabPinner
from lamella.kvtier.data.queue import EventQueue

pytestmark = pytest.mark.gpu

NUM_BLOCKS, NUM_SLOTS, LAYERS = 65, 100, 3
SHAPES = [(NUM_BLOCKS, 2, 16, 64), (NUM_BLOCKS, 2, 16, 32)]
BLOCK_BYTES = LAYERS * (2 * 16 * 64 + 2 * 16 * 32) * 2
LONG = 400_000_000
"""Cycles that a stream sleeps: some 200 ms."""


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().view(torch.uint8).numpy().tobytes()


class Setting:
    """Caches with random bytes on the device; what blocks and slots hold, on the host."""

    def __init__(self, how: str) -> None:
        if not torch.cuda.is_available():
            pytest.skip("torch sees no CUDA device")
        engines = driver_copier()
        if how == "engines" and engines is None:
            pytest.skip("the driver has no batched copies")
        torch.manual_seed(0)
        self.caches = [
            tuple(torch.randn(shape, device="cuda").to(torch.bfloat16) for shape in SHAPES) for _ in range(LAYERS)
        ]
        self.buffer = HostBuffer([BLOCK_BYTES], [NUM_SLOTS], num_ranks=2)
        self.events = EventQueue()
        pinner = SlabPinner(self.buffer, (lambda *_: 2) if how == "not pinned" else None)
        copiers = [engines] if how == "engines" and engines is not None else []
        self.mover = CudaDeviceMover(
            self.buffer, [list(range(LAYERS))], self.caches, self.events, rank=1, copiers=copiers, pinner=pinner
        )
        assert pinner.wait(30.0)
        assert (pinner.error == 0) == (how != "not pinned")

    def warm_up(self) -> None:
        """Whatever is loaded when it is used for the first time."""
        self.mover.submit([job(1, 0, 1, loads=True), job(2, 1, 2, loads=False)])
        assert all(result.ok for result in self.collect(2).values())
        for layer in self.caches:
            for cache in layer:
                cache[1] = cache[3].clone()
        torch.cuda._sleep(1000)
        torch.cuda.synchronize()

    def block(self, number: int) -> bytes:
        return b"".join(bytes_of(t[number]) for layer in self.caches for t in layer)

    def slot(self, number: int) -> bytes:
        return bytes(self.buffer.rank_view(0, number, 1))

    def collect(self, count: int) -> dict[int, TicketResult]:
        ended: dict[int, TicketResult] = {}
        end = time.monotonic() + 20.0
        while len(ended) < count and time.monotonic() < end:
            self.mover.poll()
            for event in self.events.take():
                assert isinstance(event, TicketResult)
                assert event.ticket not in ended
                ended[event.ticket] = event
        assert len(ended) == count
        return ended


@pytest.fixture(params=["engines", "no copier", "not pinned"])
def setting(request: pytest.FixtureRequest) -> Iterator[Setting]:
    made = Setting(request.param)
    yield made
    made.mover.close()


def job(ticket: int, slot: int, block: int, *, loads: bool, after_step: int = -1) -> CopyJob:
    host, device = Location("host", 0, slot), Location("device", 0, block)
    source, target = (host, device) if loads else (device, host)
    return CopyJob(ticket, b"k", source, target, BLOCK_BYTES, after_step)


def test_random_jobs_against_plain_bytes(setting: Setting) -> None:
    rng = random.Random(3)
    other_rank = bytes(setting.buffer.rank_view(0, 0, 0))
    device = {block: setting.block(block) for block in range(1, NUM_BLOCKS)}
    host = {slot: setting.slot(slot) for slot in range(NUM_SLOTS)}
    ticket = 0
    for step in range(30):
        blocks, slots = rng.sample(sorted(device), 40), rng.sample(sorted(host), 40)
        jobs = []
        for block, slot in zip(blocks, slots):
            ticket += 1
            loads = rng.random() < 0.5
            jobs.append(job(ticket, slot, block, loads=loads, after_step=rng.choice((-1, step))))
            if loads:
                device[block] = host[slot]
            else:
                host[slot] = device[block]
        setting.mover.submit(jobs[:20])
        setting.mover.after_step(step)
        setting.mover.submit(jobs[20:])
        setting.mover.before_step(step + 1)
        for layer in range(LAYERS):
            setting.mover.wait_layer(layer)
        read = [j.target.slot for j in jobs if j.target.tier == "device"]
        seen = [[t[read].clone() for t in layer] for layer in setting.caches]  # what the step would read
        ended = setting.collect(len(jobs))
        assert all(result.ok for result in ended.values()), next(r.error for r in ended.values() if not r.ok)
        for n, block in enumerate(read):
            content = b"".join(bytes_of(t[n]) for layer in seen for t in layer)
            assert content == device[block], f"step {step + 1} would have read block {block} too early"
    for slot, content in host.items():
        assert setting.slot(slot) == content
    assert bytes(setting.buffer.rank_view(0, 0, 0)) == other_rank
    assert setting.mover.stats()["bytes_in"] > 0


def test_a_step_waits_on_the_device_and_not_on_the_host() -> None:
    setting = Setting("engines")
    setting.warm_up()
    want = setting.slot(7)
    with setting.mover._lanes.on(LOADS):
        torch.cuda._sleep(LONG)
    started = time.perf_counter()
    setting.mover.submit([job(1, 7, 3, loads=True)])
    setting.mover.before_step(0)
    for layer in range(LAYERS):
        setting.mover.wait_layer(layer)
    seen = [t[3].clone() for layer in setting.caches for t in layer]
    assert time.perf_counter() - started < 0.05, "the host waited"
    assert b"".join(bytes_of(t) for t in seen) == want
    setting.mover.after_step(0)
    assert setting.collect(1)[1].ok
    setting.mover.close()


def test_a_step_that_reads_none_of_it_does_not_wait() -> None:
    setting = Setting("engines")
    setting.warm_up()
    with setting.mover._lanes.on(LOADS):
        torch.cuda._sleep(LONG)
    setting.mover.submit([job(1, 7, 3, loads=True)])
    setting.mover.before_step(0, waits=False)
    for layer in range(LAYERS):
        setting.mover.wait_layer(layer)
    _ = [t[5].clone() for layer in setting.caches for t in layer]
    setting.mover.after_step(0)
    torch.cuda.current_stream().synchronize()
    setting.mover.poll()
    assert setting.events.take() == [], "the stream that computes waited for the load"
    assert setting.collect(1)[1].ok
    setting.mover.close()


def test_a_store_copies_what_its_step_wrote_and_what_comes_later_does_not_wait_for_it() -> None:
    setting = Setting("engines")
    setting.warm_up()
    torch.cuda._sleep(LONG)
    for layer in setting.caches:
        for cache in layer:
            cache[4] = 1.0
    setting.mover.after_step(0)
    setting.mover.submit([job(1, 9, 4, loads=False, after_step=0)])
    assert setting.collect(1)[1].ok
    assert setting.slot(9) == setting.block(4)
    with setting.mover._lanes.on(STORES):
        torch.cuda._sleep(LONG)
    setting.mover.submit([job(2, 10, 5, loads=False), job(3, 7, 3, loads=True)])
    setting.mover.before_step(1)
    setting.mover.wait_layer(LAYERS - 1)
    _ = setting.caches[0][0][3].clone()
    torch.cuda.current_stream().synchronize()
    setting.mover.poll()
    assert 2 not in {event.ticket for event in setting.events.take()}, "a step waited for a store"  # type: ignore[union-attr]
    setting.mover.close()


def test_the_link_is_measured() -> None:
    setting = Setting("engines")
    setting.mover.close()  # unpins the buffer, which is pinned again
    mover = TierMover(setting.buffer)
    mover.bind([list(range(LAYERS))], setting.caches, rank=1)
    speed = mover.measure_link(4 << 20)
    assert speed is not None
    assert 1e8 < speed < 1e12
    told = mover.stats()["host"]
    assert told["copied_by"] == ("copy engines", "copy engines")
    assert told["bytes_staged"] == 0
    mover.close()


def test_pages_can_be_pinned_unpinned_and_pinned_again() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    buffer = HostBuffer([1 << 20], [40])
    told: list[Any] = []
    for _ in range(2):
        pinner = SlabPinner(buffer, slab_bytes=4 << 20)
        assert pinner.wait(30.0)
        told.append((pinner.error, pinner.ready[0], pinner.num_bytes))
        pinner.close()
    assert told == [(0, 40, 40 << 20)] * 2
