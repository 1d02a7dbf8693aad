"""Copies between a device and host slots that are not pinned, through a staging buffer.

    load     slots ─gather─▶ staging (host) ──▶ staging (device) ─scatter─▶ caches
    store    caches ─gather─▶ staging (device) ──▶ staging (host) ─scatter─▶ slots

Whole slots travel, a few at a time, on a thread that waits for each part: what has ended here has ended on the device.
Several times slower than copies of pinned slots, and for those that no pinning reaches.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from lamella.kvtier.data.block_map import BlockMap, Piece, pairs_by_group
from lamella.kvtier.data.cuda_lanes import STAGED, Lanes, Mark
from lamella.kvtier.jobs import CopyJob

PART_BYTES = 32 << 20
"""Of the staging buffers, on both sides."""

Report = Callable[[Sequence[CopyJob], str | None, float], None]


class Part(NamedTuple):
    """Jobs that are copied at once."""

    number: int
    jobs: Sequence[CopyJob]
    loads: bool
    behind: Mark | None
    """Of the step whose end the copies wait for."""


class StagedCopies:
    """One thread, loads before stores. Copies of one rank."""

    def __init__(
        self, blocks: BlockMap, ranges: Sequence[slice], lanes: Lanes, device: torch.device, report: Report
    ) -> None:
        """ranges: this rank's bytes of a slot, per group. report: told of each part's end, on the thread: its jobs, an
        error or None, seconds."""
        self._map = blocks
        self._ranges = ranges
        self._lanes = lanes
        self._device = device
        self._report = report
        self._changed = threading.Condition()
        self._loads: deque[Part] = deque()
        self._stores: deque[Part] = deque()
        self._running: Part | None = None
        self._number = 0
        self._closed = False
        self.num_bytes = 0
        """Copied so far."""
        self._thread = threading.Thread(target=self._run, name="kvtier-staged", daemon=True)
        self._thread.start()

    def submit(self, jobs: Sequence[CopyJob], loads: bool, behind: Mark | None) -> None:
        """Copy these, in parts."""
        size = max(slots.shape[1] for slots in self._map.slots)
        count = max(1, PART_BYTES // size)
        with self._changed:
            for start in range(0, len(jobs), count):
                self._number += 1
                part = Part(self._number, jobs[start : start + count], loads, behind)
                (self._loads if loads else self._stores).append(part)
            self._changed.notify_all()

    @property
    def last_load(self) -> int:
        """Number of the last load that has not ended; 0: all have."""
        with self._changed:
            if self._loads:
                return self._loads[-1].number
            return self._running.number if self._running is not None and self._running.loads else 0

    @property
    def queue_depth(self) -> int:
        """Jobs that have not begun."""
        return sum(len(part.jobs) for part in (*self._loads, *self._stores))

    def wait(self, number: int) -> None:
        """Return once all loads up to this number have ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._is_under_way(number))

    def close(self) -> bool:
        """End the thread; what has not begun is reported as failed. False: a part still runs after five seconds."""
        with self._changed:
            self._closed = True
            left = [*self._loads, *self._stores]
            self._loads.clear()
            self._stores.clear()
            self._changed.notify_all()
        for part in left:
            self._report(part.jobs, "the mover is closed", 0.0)
        self._thread.join(timeout=5.0)
        return not self._thread.is_alive()

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _is_under_way(self, number: int) -> bool:
        running = self._running
        if running is not None and running.loads and running.number <= number:
            return True
        return bool(self._loads) and self._loads[0].number <= number

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        with torch.inference_mode():
            while (part := self._take()) is not None:
                start = time.perf_counter()
                error: str | None = None
                try:
                    self._copy(part)
                except (RuntimeError, IndexError, ValueError) as problem:
                    error = f"staged copy failed: {problem}"
                self._report(part.jobs, error, time.perf_counter() - start)
                with self._changed:
                    self._running = None
                    self._changed.notify_all()

    def _take(self) -> Part | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or bool(self._loads) or bool(self._stores))
            if self._closed:
                return None
            self._running = (self._loads or self._stores).popleft()
            return self._running

    def _copy(self, part: Part) -> None:
        lanes = self._lanes
        if part.behind is not None:
            lanes.hold_lane(STAGED, part.behind)
        for group, (slots, blocks) in pairs_by_group(part.jobs).items():
            with lanes.on(STAGED):
                copy = self._load if part.loads else self._store
                copy(group, torch.tensor(slots), torch.tensor(blocks).to(self._device))
            self.num_bytes += len(slots) * self._map.slots[group].shape[1]

    def _load(self, group: int, slots: torch.Tensor, blocks: torch.Tensor) -> None:
        host = self._staging(group, len(slots))
        torch.index_select(self._map.slots[group], 0, slots, out=host)
        staging = host.to(self._device, non_blocking=True)
        for piece in self._pieces(group):
            piece.cache.index_copy_(0, blocks, _part(staging, piece))
        self._lanes.mark_lane(STAGED).synchronize()

    def _store(self, group: int, slots: torch.Tensor, blocks: torch.Tensor) -> None:
        host = self._staging(group, len(slots))
        staging = torch.empty(host.shape, dtype=torch.uint8, device=self._device)
        for piece in self._pieces(group):
            _part(staging, piece).copy_(piece.cache.index_select(0, blocks))
        host.copy_(staging, non_blocking=True)
        self._lanes.mark_lane(STAGED).synchronize()
        mine = self._ranges[group]  # other ranks write theirs
        self._map.slots[group][:, mine].index_copy_(0, slots, host[:, mine])

    def _staging(self, group: int, count: int) -> torch.Tensor:
        """[count, slot_bytes] uint8, pinned where there is a device to pin it for: torch keeps such memory."""
        size = self._map.slots[group].shape[1]
        return torch.empty(count, size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")

    def _pieces(self, group: int) -> list[Piece]:
        return [piece for layer, owner in self._map.order if owner == group for piece in self._map.pieces[layer]]


def _part(staging: torch.Tensor, piece: Piece) -> torch.Tensor:
    """[n, num_words]: the bytes of a piece in slots on the device."""
    num_bytes = piece.cache.shape[1] * piece.cache.element_size()
    return staging[:, piece.start : piece.start + num_bytes].view(piece.cache.dtype)
