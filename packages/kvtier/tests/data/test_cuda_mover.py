"""CudaDeviceMover over streams that are played: order, addresses, hazards, what becomes of slots that are not pinned.

What this cannot show is whether real streams overlap.
"""

from __future__ import annotations

import ctypes
import random
import time
from typing import Any

import numpy as np
import pytest
import torch

from lamella.kvtier import CopyJob, Location, TicketResult
from lamella.kvtier.data.cuda_lanes import LOADS, STORES
from lamella.kvtier.data.cuda_mover import CudaDeviceMover, Speed
from lamella.kvtier.data.driver_copier import DriverCopier
from lamella.kvtier.data.host_buffer import HostBuffer
from lamella.kvtier.data.mover import TierMover
from lamella.kvtier.data.queue import EventQueue
from lamella.kvtier.testing.fake_lanes import COMPUTE, FakeCopier, FakeLanes, fake_cuda_mover, pinned

KEY = b"k" * 32
WIDE, NARROW = (12, 2, 4, 6), (9, 1, 4, 10)
LAYERS = ([0, 2], [1])
SIZES = (2 * 2 * 2 * 4 * 6 * 4, 2 * 4 * 10 * 4)


@pytest.fixture(autouse=True)
def one_layer_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamella.kvtier.data.cuda_mover.LOAD_CALL_BYTES", 1)


def store(ticket: int, group: int, block: int, slot: int, after_step: int = -1) -> CopyJob:
    return CopyJob(ticket, KEY, Location("device", group, block), Location("host", group, slot), 1, after_step)


def load(ticket: int, group: int, slot: int, block: int, after_step: int = -1) -> CopyJob:
    return CopyJob(ticket, KEY, Location("host", group, slot), Location("device", group, block), 1, after_step)


class Setting:
    """Two groups, the second of two ranks; streams that move on only when they are asked or held for."""

    def __init__(self, seed: int = 0, rank: int = 1, copiers: int = 1, max_copies: int = 3, **pinning: Any) -> None:
        torch.manual_seed(seed)
        self.caches = [tuple(torch.rand(shape) for _ in range(2)) for shape in (WIDE, NARROW, WIDE)]
        self.buffer = HostBuffer(SIZES, [6, 5], num_ranks=2)
        for group in (0, 1):
            self.buffer.region(group)[:] = b"\x07" * len(self.buffer.region(group))
        self.events = EventQueue()
        self.lanes = FakeLanes(random.Random(seed), max_copies)
        self.pinner = pinned(self.buffer, slab_bytes=4096, **pinning)
        assert self.pinner.wait(5.0)
        self.mover = CudaDeviceMover(
            self.buffer,
            LAYERS,
            self.caches,
            self.events,
            rank=rank,
            copiers=[FakeCopier(self.lanes)] * copiers,
            lanes=self.lanes,
            pinner=self.pinner,
        )

    def block(self, group: int, number: int) -> bytes:
        return b"".join(bytes(t[number].view(torch.uint8).flatten()) for n in LAYERS[group] for t in self.caches[n])

    def layer(self, layer: int, number: int) -> bytes:
        return b"".join(bytes(t[number].view(torch.uint8).flatten()) for t in self.caches[layer])

    def run(self, jobs: list[CopyJob]) -> dict[int, TicketResult]:
        self.mover.submit(jobs)
        return self.collect(len(jobs))

    def collect(self, count: int) -> dict[int, TicketResult]:
        ended: dict[int, TicketResult] = {}
        end = time.monotonic() + 10.0
        while len(ended) < count and time.monotonic() < end:
            self.mover.poll()
            for event in self.events.take():
                assert isinstance(event, TicketResult)
                assert event.ticket not in ended, "a ticket ended twice"
                ended[event.ticket] = event
        assert len(ended) == count
        return ended


@pytest.mark.parametrize("pinning", [{}, {"error_at": 0}, {"error_at": 2}], ids=["pinned", "not pinned", "partly"])
@pytest.mark.parametrize("copiers", [0, 1])
def test_blocks_go_both_ways(copiers: int, pinning: dict[str, Any]) -> None:
    setting = Setting(copiers=copiers, **pinning)
    where = [(0, 5, 3), (0, 11, 0), (1, 8, 4)]
    want = [setting.block(group, number) for group, number, _ in where]
    ended = setting.run([store(n, g, b, s) for n, (g, b, s) in enumerate(where)])
    assert [ended[n].error for n in range(3)] == [None] * 3
    for (group, _, slot), content in zip(where, want):
        assert bytes(setting.buffer.rank_view(group, slot, 1)) == content
        assert bytes(setting.buffer.rank_view(group, slot, 0)) == b"\x07" * SIZES[group]  # the other rank's
    setting.mover.submit([load(n, g, s, b - 3) for n, (g, b, s) in enumerate(where)])
    setting.mover.before_step(1)
    for layer in range(3):
        setting.mover.wait_layer(layer)
    assert [setting.block(group, number - 3) for group, number, _ in where] == want
    setting.mover.after_step(1)
    assert all(result.ok for result in setting.collect(3).values())
    stats = setting.mover.stats()
    assert (stats["bytes_in"], stats["bytes_out"], stats["failures"]) == (3, 3, 0)
    staged = copiers == 0 or pinning.get("error_at") == 0
    assert (stats["bytes_staged"] > 0) == (staged or bool(pinning))
    assert (setting.lanes.num_done[LOADS] > 0) == (not staged)
    setting.mover.close()


def test_a_step_holds_for_one_layer_after_the_other() -> None:
    setting = Setting(max_copies=0)  # nothing happens but what is held for
    want = bytes(setting.buffer.rank_view(0, 2, 1))
    setting.mover.submit([load(1, 0, 2, 4)])
    setting.mover.before_step(0)
    setting.mover.wait_layer(0)
    size = SIZES[0] // 2
    assert setting.layer(0, 4) == want[:size]
    assert setting.layer(2, 4) == b"\xff" * size, "layer 2 was waited for with layer 0"
    setting.mover.wait_layer(1)
    assert setting.layer(2, 4) == b"\xff" * size
    setting.mover.wait_layer(2)
    assert setting.layer(2, 4) == want[size:]
    held = len(setting.lanes.notes)
    setting.mover.after_step(0)
    setting.mover.before_step(1)
    setting.mover.wait_layer(0)
    assert len(setting.lanes.notes) == held, "a step held for what had ended"
    setting.mover.close()


def test_small_layers_are_copied_and_held_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamella.kvtier.data.cuda_mover.LOAD_CALL_BYTES", SIZES[0] // 2 + 1)
    setting = Setting(max_copies=0)
    want = [bytes(setting.buffer.rank_view(0, 2, 1)), bytes(setting.buffer.rank_view(1, 3, 1))]
    setting.mover.submit([load(1, 0, 2, 4), load(2, 1, 3, 2)])
    setting.mover.before_step(0)
    setting.mover.wait_layer(0)
    assert setting.layer(0, 4) == want[0][: SIZES[0] // 2]
    assert setting.layer(1, 2) == want[1], "layer 1 belongs to the first call"
    assert setting.layer(2, 4) == b"\xff" * (SIZES[0] // 2)
    setting.mover.wait_layer(1)
    assert setting.layer(2, 4) == b"\xff" * (SIZES[0] // 2)
    setting.mover.wait_layer(2)
    assert setting.layer(2, 4) == want[0][SIZES[0] // 2 :]
    setting.mover.close()


def test_a_step_that_reads_nothing_of_it_does_not_hold() -> None:
    setting = Setting(max_copies=0)
    setting.mover.submit([load(1, 0, 2, 4)])
    setting.mover.before_step(0, waits=False)
    for layer in range(3):
        setting.mover.wait_layer(layer)
    setting.mover.after_step(0)
    assert setting.lanes.num_done[LOADS] == 0
    setting.mover.before_step(1)
    setting.mover.wait_layer(2)
    assert setting.lanes.num_done[LOADS] == 2
    setting.mover.close()


def test_a_copy_waits_for_its_step_and_for_no_other() -> None:
    setting = Setting()
    setting.lanes.num_launched[COMPUTE] = 1  # what computes has not ended
    setting.mover.after_step(0)
    setting.mover.after_step(1)
    first, second = setting.mover._steps[0], setting.mover._steps[1]
    setting.mover.submit([store(1, 0, 5, 0, after_step=0)])
    assert [note for note in setting.lanes.notes if note[0] == STORES] == [(STORES, "holds", first)]
    setting.mover.submit([load(2, 0, 3, 2, after_step=2), load(3, 0, 4, 6, after_step=1), load(4, 0, 1, 7)])
    assert [note for note in setting.lanes.notes if note[0] == LOADS] == [(LOADS, "holds", second)]
    assert setting.mover.queue_depth == 1  # step 2 has not been launched
    setting.mover.before_step(2)  # and would wait for itself
    ended = setting.collect(4)
    assert [ended[n].ok for n in (1, 2, 3, 4)] == [True, False, True, True]
    assert "awaited by 2" in str(ended[2].error)
    setting.mover.close()


def test_steps_that_have_ended_are_forgotten() -> None:
    setting = Setting()
    for step in range(100):
        setting.mover.before_step(step)
        setting.mover.after_step(step)
    assert len(setting.mover._steps) <= 2
    setting.mover.close()


def test_tickets_end_when_the_device_has_copied() -> None:
    setting = Setting(max_copies=0)
    setting.mover.submit([store(1, 0, 5, 0), load(2, 1, 3, 2)])
    for _ in range(20):
        setting.mover.poll()
    assert setting.events.take() == []
    assert setting.mover.busy
    setting.mover._launched[STORES][0].end.synchronize()
    setting.mover.poll()
    assert [event.ticket for event in setting.events.take()] == [1]  # type: ignore[union-attr]
    setting.mover._launched[LOADS][0].end.synchronize()
    setting.mover.close()
    assert [event.ticket for event in setting.events.take()] == [2]  # type: ignore[union-attr]


def test_a_device_that_hangs_leaves_the_slab_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamella.kvtier.data.cuda_mover.CLOSE_S", 0.1)
    setting = Setting(max_copies=0)
    setting.mover.submit([load(2, 1, 3, 2)])
    setting.mover.close()
    assert setting.pinner.num_bytes > 0


def test_a_copier_that_breaks_ends_its_tickets_once_the_rest_has_happened() -> None:
    setting = Setting(max_copies=0)
    setting.mover._chosen = [FakeCopier(setting.lanes, fail_every=2)] * 2
    setting.mover.submit([load(1, 0, 2, 4)])
    setting.mover.poll()
    assert setting.events.take() == [], "one copy is still under way"
    setting.mover.before_step(0)
    setting.mover.wait_layer(2)
    setting.mover._launched[LOADS][0].end.synchronize()
    (result,) = setting.collect(1).values()
    assert not result.ok
    assert "broke" in str(result.error)
    setting.mover.close()


def test_hazards_are_seen() -> None:
    """The fake's own promise: it would notice a block or a slot that is handed out too early."""
    setting = Setting(max_copies=0)
    setting.mover.submit([store(1, 0, 5, 0)])
    setting.caches[0][0][5] += 1.0
    with pytest.raises(AssertionError, match="changed under its store"):
        setting.mover._launched[STORES][0].end.synchronize()
    setting = Setting(max_copies=0)
    setting.mover.submit([load(1, 0, 1, 4)])
    assert torch.isnan(setting.caches[2][1][4]).all()
    setting.buffer.view(0, 1)[:] = bytes(2 * SIZES[0])
    with pytest.raises(AssertionError, match="handed out while a load read it"):
        setting.mover._launched[LOADS][0].end.synchronize()


@pytest.mark.parametrize("lane", [LOADS, STORES])
def test_copies_are_launched_in_parts_that_others_can_cut_in_between(
    monkeypatch: pytest.MonkeyPatch, lane: int
) -> None:
    monkeypatch.setattr("lamella.kvtier.data.cuda_mover.PART_BYTES", 1)
    monkeypatch.setattr("lamella.kvtier.data.cuda_mover.MAX_PARTS", 2)
    setting = Setting(max_copies=0)
    make = load if lane == LOADS else lambda n, group, slot, block: store(n, group, block, slot)
    setting.mover.submit([make(n, 0, n, n + 1) for n in range(6)])
    assert (len(setting.mover._launched[lane]), setting.mover.queue_depth) == (2, 4)
    setting.mover._launched[lane][0].end.synchronize()
    setting.mover.poll()
    assert (len(setting.mover._launched[lane]), setting.mover.queue_depth) == (2, 3)
    setting.mover.before_step(0, waits=False)
    assert setting.mover.queue_depth == 3
    setting.mover.before_step(0)
    assert setting.mover.queue_depth == (0 if lane == LOADS else 3), "a step waits for all loads, and for no store"
    for layer in range(3):
        setting.mover.wait_layer(layer)
    assert setting.lanes.num_done[LOADS] == setting.lanes.num_launched[LOADS]
    while setting.mover.busy:
        setting.mover._launched[lane][0].end.synchronize()
        setting.mover.poll()
    assert sorted(event.ticket for event in setting.events.take()) == list(range(6))  # type: ignore[union-attr]
    setting.mover.close()


def test_the_longer_a_caller_was_away_the_more_waits_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamella.kvtier.data.cuda_mover.PART_BYTES", 1)
    monkeypatch.setattr("lamella.kvtier.data.cuda_mover.LINK_BYTES_PER_S", 1.0)
    setting = Setting(max_copies=0)
    setting.mover._started -= 3.5
    setting.mover.submit([store(n, 0, n + 1, n) for n in range(6)])
    assert (len(setting.mover._launched[STORES]), setting.mover.queue_depth) == (5, 1)
    setting.lanes.max_copies = 3
    setting.mover.close()


def test_two_thousand_random_jobs_against_plain_bytes() -> None:
    """Rounds of stores, loads and steps; within a round no block and no slot is in two jobs, as pins have it."""
    setting, rng = Setting(seed=4, rank=0), random.Random(5)
    device = {(g, b): setting.block(g, b) for g, count in ((0, 12), (1, 9)) for b in range(1, count)}
    host = {(g, s): bytes(setting.buffer.rank_view(g, s, 0)) for g, count in ((0, 6), (1, 5)) for s in range(count)}
    ticket = step = 0
    while ticket < 2000:
        blocks, slots = list(device), list(host)
        rng.shuffle(blocks)
        rng.shuffle(slots)
        jobs: list[CopyJob] = []
        for group, slot in slots[: rng.randint(1, 8)]:
            block = next(b for g, b in blocks if g == group)
            blocks.remove((group, block))
            ticket += 1
            after = step if rng.random() < 0.3 else -1
            if rng.random() < 0.5:
                jobs.append(load(ticket, group, slot, block, after))
                device[group, block] = host[group, slot]
            else:
                jobs.append(store(ticket, group, block, slot, after))
                host[group, slot] = device[group, block]
        cut = rng.randint(0, len(jobs))
        setting.mover.submit(jobs[:cut])
        setting.mover.after_step(step)
        setting.mover.submit(jobs[cut:])
        step += 1
        setting.mover.before_step(step)
        for layer in range(3):
            setting.mover.wait_layer(layer)
        for job in jobs:
            if job.target.tier == "device":
                place = job.target.group, job.target.slot
                assert setting.block(*place) == device[place], "a step would have read it too early"
        assert all(result.ok for result in setting.collect(len(jobs)).values())
    for (group, slot), content in host.items():
        assert bytes(setting.buffer.rank_view(group, slot, 0)) == content
    assert setting.lanes.num_held > 100
    assert any(lane == COMPUTE for lane, _, _ in setting.lanes.notes)
    setting.mover.close()


def test_a_tier_mover_on_such_a_device() -> None:
    caches = [tuple(torch.rand(WIDE) for _ in range(2)) for _ in range(2)]
    buffer = HostBuffer([SIZES[0]], [6])
    lanes = FakeLanes(random.Random(2))
    mover = TierMover(buffer, make_device=fake_cuda_mover(lanes))
    mover.bind([[0, 1]], caches)
    speed = mover.measure_link()
    assert speed is not None
    assert speed > 0
    assert mover.poll() == []
    mover.submit([store(1, 0, 5, 0), store(2, 0, 6, 1)])
    ended = []
    while len(ended) < 2:
        assert mover.wait(5.0)
        ended += mover.poll()
    assert not mover.wait(0.01)
    assert mover.stats()["host"]["copied_by"] == ("fake", "fake")
    mover.close()


class Named(FakeCopier):
    """One of several; names tells whose copies were launched, and how."""

    def __init__(self, lanes: FakeLanes, name: str, used: list[tuple[str, bool]]) -> None:
        super().__init__(lanes)
        self.name = name
        self.used = used

    def copy(self, *args: Any, beside: bool = False, **options: Any) -> None:
        self.used.append((self.name, beside))
        super().copy(*args, **options)


def measured(first: Speed, second: Speed) -> tuple[Setting, list[tuple[str, bool]]]:
    """A mover that found copiers of such speeds."""
    setting = Setting()
    used: list[tuple[str, bool]] = []
    speeds = {"first": first, "second": second}
    setting.mover._copiers = tuple(Named(setting.lanes, name, used) for name in speeds)
    setting.mover._speed = lambda jobs, lane, copier: speeds[copier.name]  # type: ignore[assignment,return-value]
    assert setting.mover.measure(0, 3) == max(first.rate, second.rate)
    return setting, used


@pytest.mark.parametrize(("rates", "taken"), [((1.0, 2.0), "second"), ((2.0, 2.1), "first"), ((2.0, 1.0), "first")])
def test_the_faster_copier_is_taken_unless_the_first_is_as_good(rates: tuple[float, float], taken: str) -> None:
    setting, _ = measured(Speed(rates[0], 1.0), Speed(rates[1], 1.0))
    assert setting.mover.stats()["copied_by"] == (taken, taken)
    setting.mover.close()


@pytest.mark.parametrize(("rate", "quiet"), [(6.0, "second"), (4.0, "first")])
def test_what_nobody_waits_for_is_launched_by_whom_takes_the_caller_the_shortest(
    rate: float, quiet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """… if it is not too slow: stores always, loads while a step is under way that does not wait for them."""
    setting, used = measured(Speed(10.0, 1.0), Speed(rate, 0.1))
    setting.run([load(1, 0, 3, 5)])
    assert set(used) == {("first", False)}, "no step is under way: the fastest one loads"
    used.clear()
    setting.run([store(2, 0, 5, 3)])
    assert set(used) == {(quiet, True)}
    used.clear()
    setting.lanes.num_launched[COMPUTE] += 1
    setting.mover.before_step(1)
    setting.mover.after_step(1)  # runs
    setting.mover.submit([load(3, 0, 3, 5)])
    assert set(used) == {(quiet, True)}
    used.clear()
    monkeypatch.setattr("lamella.kvtier.data.cuda_mover.PART_BYTES", 1)
    monkeypatch.setattr("lamella.kvtier.data.cuda_mover.MAX_PARTS", 2)
    setting.mover.submit([load(4 + n, 0, n, 6 + n) for n in range(3)])
    used.clear()
    setting.mover.before_step(2)
    assert set(used) == {("first", False)}, "a step waits for it"
    setting.lanes.num_done[COMPUTE] += 1
    setting.collect(4)
    setting.mover.close()


def test_where_no_copier_works_blocks_are_staged(caplog: pytest.LogCaptureFixture) -> None:
    setting = Setting()
    setting.mover._copiers = (FakeCopier(setting.lanes, fail_every=1),)
    assert setting.mover.measure(0, 3)
    assert "no copier works" in caplog.text
    assert setting.mover.stats()["copied_by"] == ("staging",)
    assert setting.run([store(1, 0, 5, 0)])[1].ok
    assert bytes(setting.buffer.rank_view(0, 0, 1)) == setting.block(0, 5)
    setting.mover.close()


def test_nothing_pinned_is_measured_as_it_is_copied() -> None:
    setting = Setting(error_at=0)
    speed = setting.mover.measure(0, 3)
    assert speed is not None
    assert speed > 0
    assert setting.mover.stats()["bytes_staged"] > 0
    assert setting.events.take() == []
    setting.mover.close()


# ---- the driver's batched copies -------------------------------------------------------------------------------------


class Driver:
    """cuMemcpyBatchAsync on the memory of this process."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.counts: list[int] = []

    def __call__(self, *args: Any) -> int:
        targets, sources, sizes, count, attributes, first, num_attributes, failed, stream = args
        assert (num_attributes.value, stream.value or 0) == (1, 0)
        assert first._obj.value == 0
        assert ctypes.sizeof(attributes._obj) == 24
        assert [attributes._obj.source_order, attributes._obj.flags] == [1, 1]
        assert failed._obj.value == 0
        self.counts.append(count.value)
        lists = [(ctypes.c_uint64 * count.value).from_address(p.value) for p in (targets, sources, sizes)]
        for target, source, size in zip(*lists):
            ctypes.memmove(target, source, size)
        return self.code


def test_the_drivers_copies_have_the_right_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamella.kvtier.data.driver_copier.MAX_COPIES", 3)
    slots, cache = torch.arange(80, dtype=torch.int64).view(8, 10), torch.zeros(6, 5, dtype=torch.int64)
    driver = Driver()
    sources = np.array([slots[row, 2].data_ptr() for row in (0, 7, 3, 2)])
    targets = np.array([cache[row].data_ptr() for row in (5, 1, 0, 4)])
    DriverCopier(driver).copy(sources, targets, 40, torch.device("cpu"), loads=True, beside=False)
    assert driver.counts == [3, 1]
    want = torch.zeros_like(cache)
    want[[5, 1, 0, 4]] = slots[[0, 7, 3, 2], 2:7]
    assert torch.equal(cache, want)


def test_a_refusal_of_the_driver_is_told() -> None:
    block = np.zeros(4)
    address = np.array([block.ctypes.data])
    with pytest.raises(RuntimeError, match="801"):
        DriverCopier(Driver(code=801)).copy(address, address, 8, torch.device("cpu"), loads=True, beside=False)
