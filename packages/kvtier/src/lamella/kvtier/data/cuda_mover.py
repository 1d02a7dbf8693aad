"""Copies between caches in the memory of a CUDA device and the host tier, on side streams.

    submit ──▶ loads    layer 0 ─ mark ─ layer 1 ─ mark … mark      a step that reads them holds for each layer's mark
           ──▶ stores   part ─ mark, part ─ mark …                  nobody holds for them
    poll   ──▶ marks that were passed end their tickets

Nothing waits on the host, and there is no thread: whoever submits launches, some microseconds a layer and less than one
a piece, and whoever polls looks at marks. A load waits for the mark of the step that was the last to read its
target, and for no other. Slots that are not pinned (yet) go through a StagedCopies instead.

Copies that no step waits for are launched in parts, a few ahead of the device: a caller has other things to launch, and
while a step computes for long the link stays busy. Stores wait for pinning as long as it goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from lamella.kvtier.data.block_map import BlockMap, Piece, pairs_by_group
from lamella.kvtier.data.copy_totals import CopyTotals
from lamella.kvtier.data.cuda_lanes import LOADS, STORES, CudaLanes, Lanes, Mark
from lamella.kvtier.data.driver_copier import Addresses
from lamella.kvtier.data.host_buffer import HostBuffer
from lamella.kvtier.data.pinning import SlabPinner
from lamella.kvtier.data.queue import EventQueue
from lamella.kvtier.data.staged_copies import StagedCopies
from lamella.kvtier.jobs import CopyJob, Location, TicketResult
from lamella.kvtier.protocols import BlockCopier

logger = logging.getLogger("lamella.kvtier")

PART_BYTES = 256 << 20
"""That are launched at once where nobody waits: some milliseconds of a link, and less than one of the host."""
MIN_PARTS, MAX_PARTS = 2, 8
"""Of loads, and of stores, that wait on the device at once: the more, the longer the caller was away."""
LINK_BYTES_PER_S = 50e9
"""What may have been copied meanwhile; no more than a guess is needed."""
FIRST_CALL_BYTES = 1 << 20
"""That the first call of a launch copies at least, where layers are small, and each behind it twice as much: a call
takes the longer the more it copies, and until the first one returns the link is idle."""
LOAD_CALL_BYTES, STORE_CALL_BYTES = 8 << 20, 64 << 20
"""… up to so much: of loads some 150 microseconds of a link, for a step holds for each call's end."""
CLOSE_S = 5.0
"""What close() waits for copies under way."""
FIRST_SLAB_S = 2.0
"""What measuring waits for its slots to be pinned."""
MAX_LOOKED_AT = 256
"""Jobs that cannot begin yet, of a queue; whoever polls does not look at more."""
AS_GOOD = 0.93
"""A copier that reaches so much of the fastest one's speed, and stands before it, is taken."""
QUIET_RATE = 0.5
"""… and for copies that nobody waits for, one that reaches so much and is launched the fastest: a batched copy takes
the driver more than a microsecond a piece, and a caller that decodes has none to spare."""


class Speed(NamedTuple):
    """Of a copier."""

    rate: float
    """Bytes per second; 0: it failed."""
    launch_s: float
    """Of the caller's thread."""


class Pairs(NamedTuple):
    """Blocks of one group."""

    slots: Addresses  # [n]
    blocks: Addresses  # [n]


class Ends(NamedTuple):
    """Where the blocks of one tensor of one layer lie: addresses, and bytes from one block to the next."""

    host: int
    host_stride: int
    cache: int
    cache_stride: int
    num_bytes: int
    """Of a block."""


class Batch:
    """Copies that were launched together."""

    __slots__ = ("end", "error", "jobs", "marks", "next_mark", "num_bytes", "start")

    def __init__(self, jobs: Sequence[CopyJob]) -> None:
        self.jobs = jobs
        self.num_bytes = sum(job.num_bytes for job in jobs)
        self.marks: list[tuple[int, Mark]] = []
        """Of loads: (place of a run of layers in their order, behind that run)."""
        self.next_mark = 0
        """The first that the step under way has not held for."""
        self.error: str | None = None
        self.start: Mark
        self.end: Mark


class CudaDeviceMover:
    """Copies of one rank. The face is that of DeviceMover; any thread may call, one launches steps."""

    polls = True

    def __init__(
        self,
        buffer: HostBuffer,
        layers: Sequence[Sequence[int]],
        caches: Sequence[Sequence[torch.Tensor]],
        events: EventQueue,
        *,
        rank: int = 0,
        copiers: Sequence[BlockCopier] = (),
        lanes: Lanes | None = None,
        pinner: SlabPinner | None = None,
    ) -> None:
        """copiers: ways to copy blocks to and from pinned slots, the one that is least in the way of others first;
        none: everything is staged. lanes, pinner: None: those of the caches' device.

        Raises LayoutError when a block of the layers is not what a slot of the buffer holds.
        """
        with torch.inference_mode():
            self.map = BlockMap(buffer, layers, caches, rank)
        self._ends = {layer: [_ends(piece) for piece in pieces] for layer, pieces in self.map.pieces.items()}
        self._buffer = buffer
        self._device = caches[layers[0][0]][0].device
        self._events = events
        self._totals = CopyTotals(events)
        self._copiers = tuple(copiers)
        self._chosen = [copiers[0], copiers[0]] if copiers else []
        """By lane."""
        self._quiet = copiers[0] if copiers else None
        """The one that takes the caller's thread the shortest, for copies beside a step that nobody waits for."""
        self._lanes: Lanes = CudaLanes(self._device) if lanes is None else lanes
        self._pinner = SlabPinner(buffer, device=self._device) if pinner is None else pinner
        ranges = [slice(rank * size, (rank + 1) * size) for size in buffer.bytes_per_block]
        self._staged = StagedCopies(self.map, ranges, self._lanes, self._device, self._totals.report)
        self._place = {layer: place for place, (layer, _) in enumerate(self.map.order)}
        self._lock = threading.RLock()
        self._loads: deque[CopyJob] = deque()
        self._stores: deque[CopyJob] = deque()
        self._launched: tuple[deque[Batch], deque[Batch]] = (deque(), deque())
        """By lane, in the order of the device."""
        self._steps: dict[int, Mark] = {}
        """Behind each step that may still run."""
        self._last_step = -1
        self._started = time.perf_counter()
        """When something was last launched, or could have been."""
        self._held: list[Batch] = []
        """Loads that the step under way has to hold for."""
        self._held_staged = 0
        self._closed = False

    # ---- jobs ------------------------------------------------------------------------------------------------------

    def submit(self, jobs: Sequence[CopyJob]) -> None:
        """Start these copies. Each ends in one TicketResult; a job that makes no sense ends as failed."""
        with self._lock:
            good, failed = self.map.sort_out(jobs, "the mover is closed" if self._closed else None)
            for job in good:
                (self._loads if job.target.tier == "device" else self._stores).append(job)
            self._start()
        self._totals.fail(failed)

    def poll(self) -> None:
        """Tell of what has ended on the device, and start what waited for that."""
        with self._lock:
            for lane, batches in enumerate(self._launched):
                while batches and self._has_ended(batches[0]):
                    self._end(batches.popleft(), lane)
            self._start()

    @property
    def busy(self) -> bool:
        """poll() may have something to do."""
        return bool(self._loads or self._stores or self._launched[LOADS] or self._launched[STORES])

    @property
    def queue_depth(self) -> int:
        """Jobs that have not begun."""
        return len(self._loads) + len(self._stores) + self._staged.queue_depth

    # ---- around a step ---------------------------------------------------------------------------------------------

    def before_step(self, step_id: int, waits: bool = True) -> None:
        """waits: from here on wait_layer() lets the step wait for the loads submitted so far. All steps before this one
        have been launched."""
        failed: list[TicketResult] = []
        with self._lock:
            self._last_step = max(self._last_step, step_id - 1)
            if waits:
                for job in [job for job in self._loads if job.after_step >= step_id]:
                    # it would wait for the step that waits for it
                    self._loads.remove(job)
                    text = f"waits for step {job.after_step}, awaited by {step_id}"
                    failed.append(TicketResult(job.ticket, False, text))
            self._start(every_load=waits)
            under_way = self._launched[LOADS] if waits else ()
            self._held = [batch for batch in under_way if batch.marks and not batch.end.query()]
            for batch in self._held:
                batch.next_mark = 0
            self._held_staged = self._staged.last_load if waits else 0
        self._totals.fail(failed)

    def wait_layer(self, layer_idx: int) -> None:
        """What the current stream is given from now on waits until this layer is there, of every load submitted before
        before_step(). Staged loads are waited for here, all layers at once."""
        if self._held_staged:
            start = time.perf_counter()
            self._staged.wait(self._held_staged)
            self._totals.seconds_waited += time.perf_counter() - start
            self._held_staged = 0
        if not self._held or layer_idx not in self._place:
            return
        place = self._place[layer_idx]
        for batch in self._held:
            mark: Mark | None = None
            while batch.next_mark < len(batch.marks) and batch.marks[batch.next_mark][0] <= place:
                mark = batch.marks[batch.next_mark][1]
                batch.next_mark += 1
            if mark is not None:
                self._lanes.hold(mark)
        if self._held[-1].next_mark == len(self._held[-1].marks):  # a lane keeps order
            self._held = []

    def after_step(self, step_id: int) -> None:
        """This step has been launched: what it wrote may be copied behind it."""
        with self._lock:
            self._steps[step_id] = self._lanes.mark()
            self._last_step = max(self._last_step, step_id)
            for old in list(self._steps)[:-1]:
                if not self._steps[old].query():
                    break
                del self._steps[old]
            self._start()

    def close(self) -> None:
        """End what is under way, at most some seconds; what has not begun ends as failed, and the slab is unpinned."""
        with self._lock:
            self._closed = True
            left = [*self._loads, *self._stores]
            self._loads.clear()
            self._stores.clear()
        self._totals.report(left, "the mover is closed", 0.0)
        end = time.monotonic() + CLOSE_S
        while self.busy and time.monotonic() < end:
            self.poll()
            time.sleep(1e-4)
        if self._staged.close() and not self.busy:
            self._pinner.close()  # else the device still reads or writes the slab

    def stats(self) -> dict[str, Any]:
        """Bytes host → device in, device → host out; jobs waiting; failures; seconds that the host waited; how blocks
        are copied; bytes of the slab that are pinned, and bytes that went through a staging buffer."""
        return {
            **self._totals.stats(),
            "queue_depth": self.queue_depth,
            "copied_by": tuple(copier.name for copier in self._chosen) or ("staging",),
            "bytes_pinned": self._pinner.num_bytes,
            "bytes_staged": self._staged.num_bytes,
        }

    # ---- at the start ----------------------------------------------------------------------------------------------

    def measure(self, group: int, count: int) -> float | None:
        """Bytes per second of loads of so many blocks of a group, and from now on the copiers that suit loads and
        stores best. Nothing may be under way; the first slots, and blocks from 1 on, hold anything afterwards. None: no
        copy went well."""
        size = self._buffer.bytes_per_block[group]
        host, device = [[Location(tier, group, first + n) for n in range(count)] for tier, first in _FIRST]
        jobs = [
            [CopyJob(-1 - n, b"", h, d, size) for n, (h, d) in enumerate(zip(host, device))],
            [CopyJob(-1 - n, b"", d, h, size) for n, (h, d) in enumerate(zip(host, device))],
        ]
        if not self._copiers or not self._pinner.wait_for(group, count, FIRST_SLAB_S):
            return self._measure_staged(jobs[LOADS])
        told: list[float] = []
        for lane in (STORES, LOADS):  # the slots' pages exist by then
            speeds = [self._speed(jobs[lane], lane, copier) for copier in self._copiers]
            best = max(speed.rate for speed in speeds)
            if not best:
                logger.warning("blocks of the KV tier go through a staging buffer: no copier works here")
                self._chosen, self._quiet = [], None
                return self._measure_staged(jobs[LOADS])
            good = [copier for copier, speed in zip(self._copiers, speeds) if speed.rate >= AS_GOOD * best]
            self._chosen[lane] = good[0]
            quiet = [(speed.launch_s, n) for n, speed in enumerate(speeds) if speed.rate >= QUIET_RATE * best]
            self._quiet = self._copiers[min(quiet)[1]]
            told.append(best)
        return told[-1]

    # ---- private ---------------------------------------------------------------------------------------------------

    def _speed(self, jobs: Sequence[CopyJob], lane: int, copier: BlockCopier) -> Speed:
        seconds = launch_s = 0.0
        for _ in range(2):  # the first time kernels are loaded
            began = time.perf_counter()
            batch = self._launch(jobs, lane, copier)
            launch_s = time.perf_counter() - began
            batch.end.synchronize()
            if batch.error is not None:
                return Speed(0.0, launch_s)
            seconds = batch.start.elapsed_time(batch.end) / 1e3
        return Speed(batch.num_bytes / seconds if seconds else 0.0, launch_s)

    def _measure_staged(self, jobs: Sequence[CopyJob]) -> float | None:
        failed = self._totals.num_failed
        start = time.perf_counter()
        self._staged.submit(jobs, True, None)
        self._staged.wait(self._staged.last_load)
        seconds = time.perf_counter() - start
        self._events.take()  # of tickets that nobody has
        return sum(job.num_bytes for job in jobs) / seconds if self._totals.num_failed == failed else None

    def _start(self, every_load: bool = False) -> None:
        """Launch what can be launched, in parts, unless a step is to wait for every load."""
        now = time.perf_counter()
        away_s, self._started = now - self._started, now
        parts = min(MAX_PARTS, MIN_PARTS + int(away_s * LINK_BYTES_PER_S / PART_BYTES))
        while self._loads and (every_load or len(self._launched[LOADS]) < parts):
            ready = self._take(self._loads, 1 << 62 if every_load else PART_BYTES)
            pinned = [job for job in ready if self._is_pinned(job.source)]
            if pinned:
                self._launched[LOADS].append(self._launch(pinned, LOADS, beside=not every_load and self._computes()))
            if len(pinned) < len(ready):
                staged = [job for job in ready if not self._is_pinned(job.source)]
                self._staged.submit(staged, True, self._mark_of(staged))
            if not ready:
                break
        while self._stores and self._chosen and len(self._launched[STORES]) < parts:
            part = self._take(self._stores, PART_BYTES, pinned=True)
            if not part:
                break
            self._launched[STORES].append(self._launch(part, STORES, beside=True))
        if self._stores and (self._pinner.ended or not self._chosen):
            staged = self._take(self._stores, 1 << 62, pinned=False)
            if staged:
                self._staged.submit(staged, False, self._mark_of(staged))

    def _take(self, queue: deque[CopyJob], limit: int, pinned: bool | None = None) -> list[CopyJob]:
        """Jobs that may begin, up to so many bytes; the others keep their order. pinned: only stores to slots that are,
        or are not."""
        taken: list[CopyJob] = []
        kept: list[CopyJob] = []
        num_bytes = 0
        while queue and num_bytes < limit and len(kept) < MAX_LOOKED_AT:
            job = queue.popleft()
            if job.after_step <= self._last_step and pinned in (None, self._is_pinned(job.target)):
                taken.append(job)
                num_bytes += job.num_bytes
            else:
                kept.append(job)
        queue.extendleft(reversed(kept))
        return taken

    def _is_pinned(self, place: Location) -> bool:
        return bool(self._chosen) and self._pinner.covers(place.group, place.slot)

    def _mark_of(self, jobs: Sequence[CopyJob]) -> Mark | None:
        """Of the last step that they wait for; None: it has ended."""
        return self._steps.get(max(job.after_step for job in jobs))

    def _computes(self) -> bool:
        """A step that was launched has not ended, as far as is known."""
        return any(not mark.query() for mark in list(self._steps.values())[-1:])

    def _launch(
        self, jobs: Sequence[CopyJob], lane: int, copier: BlockCopier | None = None, *, beside: bool = False
    ) -> Batch:
        """beside: steps go on meanwhile, and nobody waits for these copies."""
        if copier is None:
            copier = self._quiet if beside else self._chosen[lane]
        assert copier is not None
        lanes, batch = self._lanes, Batch(jobs)
        behind = self._mark_of(jobs)
        if behind is not None:
            lanes.hold_lane(lane, behind)
        batch.start = lanes.mark_lane(lane, timed=True)
        pairs = _pairs(jobs)
        try:
            with torch.inference_mode(), lanes.on(lane):
                for places in self._runs(pairs, STORE_CALL_BYTES if lane == STORES or beside else LOAD_CALL_BYTES):
                    self._copy_layers(places, pairs, lane, copier, beside)
                    if lane == LOADS:
                        batch.marks.append((places[0], lanes.mark_lane(lane)))
        except (RuntimeError, ValueError) as problem:
            batch.error = f"copy failed: {problem}"  # told when what was launched before has ended
        batch.end = lanes.mark_lane(lane, timed=True)
        return batch

    def _runs(self, pairs: Mapping[int, Pairs], most: int) -> list[list[int]]:
        """Places of layers that are copied by one call, and held for together; no call but of one layer has more bytes
        than twice the most."""
        runs: list[list[int]] = []
        num_bytes = 0
        for place, (layer, group) in enumerate(self.map.order):
            if group not in pairs:
                continue
            if not runs or num_bytes >= min(most, FIRST_CALL_BYTES << (len(runs) - 1)):
                runs.append([])
                num_bytes = 0
            runs[-1].append(place)
            num_bytes += sum(end.num_bytes for end in self._ends[layer]) * len(pairs[group].slots)
        return runs

    def _copy_layers(
        self, places: Sequence[int], pairs: Mapping[int, Pairs], lane: int, copier: BlockCopier, beside: bool
    ) -> None:
        by_size: dict[int, list[tuple[Addresses, Addresses]]] = {}
        for place in places:
            layer, group = self.map.order[place]
            slots, blocks = pairs[group]
            for end in self._ends[layer]:
                host, cache = end.host + slots * end.host_stride, end.cache + blocks * end.cache_stride
                by_size.setdefault(end.num_bytes, []).append((host, cache) if lane == LOADS else (cache, host))
        for num_bytes, addresses in by_size.items():
            sources, targets = (np.concatenate(part) for part in zip(*addresses))
            copier.copy(sources, targets, num_bytes, self._device, loads=lane == LOADS, beside=beside)

    def _has_ended(self, batch: Batch) -> bool:
        try:
            return batch.end.query()
        except RuntimeError as problem:  # the device is lost, and every step will say so
            batch.error = f"copy failed: {problem}"
            return True

    def _end(self, batch: Batch, lane: int) -> None:
        seconds = 0.0 if batch.error is not None else batch.start.elapsed_time(batch.end) / 1e3
        if batch in self._held:
            self._held.remove(batch)
        self._totals.report(batch.jobs, batch.error, seconds)


_FIRST: tuple[tuple[Any, int], ...] = (("host", 0), ("device", 1))
"""Where measuring begins: block 0 of a device is nobody's."""


def _pairs(jobs: Sequence[CopyJob]) -> dict[int, Pairs]:
    """By group."""
    return {
        group: Pairs(np.array(slots, np.int64), np.array(blocks, np.int64))
        for group, (slots, blocks) in pairs_by_group(jobs).items()
    }


def _ends(piece: Piece) -> Ends:
    size = piece.cache.element_size()
    return Ends(
        piece.host.data_ptr(),
        piece.host.stride(0) * size,
        piece.cache.data_ptr(),
        piece.cache.stride(0) * size,
        piece.cache.shape[1] * size,
    )
