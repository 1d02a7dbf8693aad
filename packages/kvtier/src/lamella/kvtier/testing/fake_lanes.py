"""Side streams of a device, played on a CPU: what is launched happens late, and whoever cuts in is caught.

    lanes = FakeLanes(random.Random(1))
    mover = TierMover(buffer, make_device=fake_cuda_mover(lanes))

A copy that was launched happens when somebody holds for a mark behind it, or as marks are asked: some of what waits, at
each question, as chance has it. Until then the blocks that a load fills hold NaN, so that a step that reads one without
holding shows; and a source that changes between launch and copy is an AssertionError: it was handed out too early.
What computes has happened when it was launched, as on a CPU it does.
"""

from __future__ import annotations

import ctypes
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lamella.kvtier.data.cuda_lanes import LOADS, STAGED, STORES
from lamella.kvtier.data.cuda_mover import CudaDeviceMover
from lamella.kvtier.data.host_buffer import HostBuffer
from lamella.kvtier.data.pinning import SlabPinner
from lamella.kvtier.data.queue import EventQueue

COMPUTE = -1


class FakeMark:
    """A place in a lane: behind so many copies."""

    def __init__(self, lanes: FakeLanes, lane: int, count: int) -> None:
        self.lane = lane
        self.count = count
        self._lanes = lanes

    def query(self) -> bool:
        self._lanes.move_on(self.lane)
        return self._lanes.num_done[self.lane] >= self.count

    def synchronize(self) -> None:
        self._lanes.reach(self)

    def elapsed_time(self, later: FakeMark) -> float:
        assert self._lanes.num_done[self.lane] >= later.count, "the time of copies that have not ended"
        return 1.0 + later.count - self.count


class FakeLanes:
    """Lanes whose copies happen by chance. notes tells what held for what: ("compute" or lane, "holds", mark)."""

    def __init__(self, rng: random.Random, max_copies: int = 3) -> None:
        """max_copies: at each question happen so many at most."""
        self.notes: list[tuple[int, str, FakeMark]] = []
        self.num_launched = {COMPUTE: 0, LOADS: 0, STORES: 0, STAGED: 0}
        self.num_done = dict(self.num_launched)
        self.num_held = 0
        """Copies that happened because a step held for them."""
        self.max_copies = max_copies
        self._rng = rng
        self._waiting: dict[int, deque[Callable[[], None]]] = {lane: deque() for lane in self.num_launched}
        self._current = COMPUTE

    @contextmanager
    def on(self, lane: int) -> Iterator[None]:
        if lane == STAGED:  # a thread of its own, whose copies happen at once
            yield
            return
        assert self._current == COMPUTE, "lanes are not nested"
        self._current = lane
        try:
            yield
        finally:
            self._current = COMPUTE

    def mark(self) -> FakeMark:
        """Passed, unless a test says num_launched[COMPUTE] = 1."""
        return FakeMark(self, COMPUTE, self.num_launched[COMPUTE])

    def mark_lane(self, lane: int, *, timed: bool = False) -> FakeMark:
        return FakeMark(self, lane, self.num_launched[lane])

    def hold(self, mark: Any) -> None:
        self.notes.append((COMPUTE, "holds", mark))
        before = self.num_done[mark.lane]
        self.reach(mark)
        self.num_held += self.num_done[mark.lane] - before

    def hold_lane(self, lane: int, mark: Any) -> None:
        self.notes.append((lane, "holds", mark))

    # ---- for the copier --------------------------------------------------------------------------------------------

    def launch(self, sources: Sequence[int], targets: Sequence[int], num_bytes: int, loads: bool) -> None:
        """Copy from and to these addresses, later, on the lane that is current."""
        lane = self._current
        assert lane == (LOADS if loads else STORES), "a copy between tiers on another stream"
        before = [ctypes.string_at(source, num_bytes) for source in sources]
        if loads:
            for target in targets:
                ctypes.memset(target, 0xFF, num_bytes)  # every bit set: NaN in all formats

        def happen() -> None:
            for source, target, content in zip(sources, targets, before):
                what = "a slot was handed out while a load read it" if loads else "a block changed under its store"
                assert ctypes.string_at(source, num_bytes) == content, what
                ctypes.memmove(target, content, num_bytes)

        self.num_launched[lane] += 1
        self._waiting[lane].append(happen)

    def move_on(self, lane: int) -> None:
        """Some copies happen, in order."""
        for _ in range(self._rng.randint(0, self.max_copies)):
            self._one(lane)

    def reach(self, mark: FakeMark) -> None:
        """All copies before the mark happen."""
        while self.num_done[mark.lane] < mark.count:
            self._one(mark.lane)

    def _one(self, lane: int) -> None:
        if self._waiting[lane]:
            self._waiting[lane].popleft()()
            self.num_done[lane] += 1


class FakeCopier:
    """A BlockCopier on FakeLanes."""

    name = "fake"

    def __init__(self, lanes: FakeLanes, fail_every: int = 0) -> None:
        """fail_every: each so many copies one raises; 0: none."""
        self._lanes = lanes
        self._fail_every = fail_every
        self._numbers = itertools.count(1)

    def copy(
        self, sources: Any, targets: Any, num_bytes: int, device: Any, *, loads: bool, beside: bool = False
    ) -> None:
        if self._fail_every and next(self._numbers) % self._fail_every == 0:
            raise RuntimeError("the copier broke")
        self._lanes.launch(sources.tolist(), targets.tolist(), num_bytes, loads)


def pinned(buffer: HostBuffer, error_at: int | None = None, slab_bytes: int = 1 << 20) -> SlabPinner:
    """A pinner that pins nothing; error_at: the system refuses the slab of this number, from 0."""
    numbers = itertools.count()
    return SlabPinner(buffer, lambda *_: 2 if next(numbers) == error_at else 0, lambda _: 0, slab_bytes)


def fake_cuda_mover(
    lanes: FakeLanes, *, fail_every: int = 0, error_at: int | None = None, slab_bytes: int = 1 << 20
) -> Callable[..., CudaDeviceMover]:
    """What TierMover(make_device=…) takes."""

    def make(buffer: HostBuffer, layers: Any, caches: Any, events: EventQueue, *, rank: int = 0) -> CudaDeviceMover:
        return CudaDeviceMover(
            buffer,
            layers,
            caches,
            events,
            rank=rank,
            copiers=(FakeCopier(lanes, fail_every),),
            lanes=lanes,
            pinner=pinned(buffer, error_at, slab_bytes),
        )

    return make
