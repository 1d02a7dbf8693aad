"""Copies between the device's caches and the host tier, for caches in the memory of the CPU.

                          ┌ loads  (host → device): in order; layer by layer over all that wait
    submit(jobs) ──▶ queue┤                                                           ──▶ EventQueue
                          └ stores (device → host): few at a time; loads overtake them between two layers, and
                            while a step runs they take a small share of the time

A step waits for the loads that were submitted before its before_step(), and for each layer only as long as that layer
is not there: wait_layer(l) returns once layer l of all those loads is. A load that failed counts as being there (its
ticket says that it failed). Stores wait for their after_step and nobody waits for them.

Ordering of copies that touch the same block is up to the pins: source and target of a job in flight are in no other
job that writes them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from lamella.kvtier.data.block_map import BlockMap, pairs_by_group
from lamella.kvtier.data.copy_totals import CopyTotals
from lamella.kvtier.data.host_buffer import HostBuffer
from lamella.kvtier.data.queue import EventQueue
from lamella.kvtier.jobs import CopyJob, TicketResult

MAX_STORE_ROWS = 16
SINGLE_THREAD_WORDS = 32768
"""torch copies up to this many elements on the calling thread. More threads would take the cores of a step, and where
cores are busy they wait for each other."""
STORE_DUTY = 0.05
"""Share of a step's time in which stores are copied: one core of the step's, at most so long."""


class Queued(NamedTuple):
    """A job and its number in the order of submission."""

    number: int
    job: CopyJob


class Rows(NamedTuple):
    """The blocks of one group in a batch."""

    group: int
    slots: torch.Tensor  # [n] int64
    blocks: torch.Tensor  # [n] int64


class DeviceMover:
    """Copies of one rank, on one thread."""

    polls = False
    """Its thread tells of what has ended."""

    def __init__(
        self,
        buffer: HostBuffer,
        layers: Sequence[Sequence[int]],
        caches: Sequence[Sequence[torch.Tensor]],
        events: EventQueue,
        *,
        rank: int = 0,
    ) -> None:
        """layers: per group, indices into caches. caches: per layer its tensors, each [num_blocks, ...].

        Raises LayoutError when a block of the layers is not what a slot of the buffer holds.
        """
        with torch.inference_mode():
            self.map = BlockMap(buffer, layers, caches, rank)
        self._buffer = buffer
        self._totals = CopyTotals(events)
        self._place = {layer: place for place, (layer, _) in enumerate(self.map.order)}
        self._store_rows = max(1, min(MAX_STORE_ROWS, SINGLE_THREAD_WORDS // self.map.max_words()))
        self._changed = threading.Condition()
        self._loads: deque[Queued] = deque()
        self._stores: deque[Queued] = deque()
        self._num_submitted = 0
        self._running = 0
        """Number of the oldest load in the batch being copied; 0: none."""
        self._layers_done = 0
        """Of that batch, in the order of the map."""
        self._mark = 0
        """The step waits for the loads up to this number."""
        self._awaiting = False
        self._last_step = -1
        self._in_step = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvtier-device", daemon=True)
        self._thread.start()

    # ---- jobs ------------------------------------------------------------------------------------------------------

    def submit(self, jobs: Sequence[CopyJob]) -> None:
        """Start these copies. Each ends in one TicketResult; a job that makes no sense ends as failed."""
        with self._changed:
            good, failed = self.map.sort_out(jobs, "the mover is closed" if self._closed else None)
            for job in good:
                self._num_submitted += 1
                queue = self._loads if job.target.tier == "device" else self._stores
                queue.append(Queued(self._num_submitted, job))
            self._changed.notify_all()
        self._totals.fail(failed)

    def poll(self) -> None:
        """There is nothing to look at."""

    @property
    def busy(self) -> bool:
        """poll() may have something to do."""
        return False

    @property
    def queue_depth(self) -> int:
        """Jobs that have not begun."""
        return len(self._loads) + len(self._stores)

    # ---- around a step ---------------------------------------------------------------------------------------------

    def before_step(self, step_id: int, waits: bool = True) -> None:
        """waits: from here on wait_layer() waits for the loads submitted so far. Steps run one after the other: all
        before this one have run."""
        failed: list[TicketResult] = []
        with self._changed:
            self._note_step(step_id - 1)
            for queued in [queued for queued in self._loads if waits and queued.job.after_step >= step_id]:
                # it would wait for the step that waits for it
                self._loads.remove(queued)
                after = queued.job.after_step
                failed.append(TicketResult(queued.job.ticket, False, f"waits for step {after}, awaited by {step_id}"))
            self._mark = self._num_submitted
            self._in_step = True
            self._awaiting = waits and (bool(self._loads) or self._running != 0)
            self._changed.notify_all()
        self._totals.fail(failed)

    def wait_layer(self, layer_idx: int) -> None:
        """Return once the bytes of this layer are there, of every load submitted before before_step()."""
        if not self._awaiting:
            return
        place = self._place.get(layer_idx)
        if place is None:
            return
        with self._changed:
            if not self._is_there(place):
                start = time.perf_counter()
                self._changed.wait_for(lambda: self._is_there(place))
                self._totals.seconds_waited += time.perf_counter() - start
            queued = bool(self._loads) and self._loads[0].number <= self._mark
            self._awaiting = not self._closed and (queued or 0 < self._running <= self._mark)

    def after_step(self, step_id: int) -> None:
        """This step has run: what it wrote may be copied."""
        with self._changed:
            self._note_step(step_id)
            self._in_step = False
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread; what has not begun ends as failed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout=5.0)

    def stats(self) -> dict[str, Any]:
        """Bytes host → device in, device → host out; jobs waiting; failures; seconds that steps waited."""
        return {**self._totals.stats(), "queue_depth": self.queue_depth}

    # ---- the copies ------------------------------------------------------------------------------------------------

    def _note_step(self, step_id: int) -> None:
        self._last_step = max(self._last_step, step_id)

    def _rows(self, jobs: Sequence[CopyJob]) -> dict[int, Rows]:
        """The jobs by group."""
        return {
            group: Rows(group, torch.tensor(slots), torch.tensor(blocks))
            for group, (slots, blocks) in pairs_by_group(jobs).items()
        }

    def _load_layer(self, layer: int, rows: Rows) -> None:
        for piece in self.map.pieces[layer]:
            count = max(1, SINGLE_THREAD_WORDS // piece.cache.shape[1])
            for slots, blocks in zip(torch.split(rows.slots, count), torch.split(rows.blocks, count)):
                piece.cache.index_copy_(0, blocks, piece.host.index_select(0, slots))

    def _store_layer(self, layer: int, rows: Rows) -> None:
        for piece in self.map.pieces[layer]:
            piece.host.index_copy_(0, rows.slots, piece.cache.index_select(0, rows.blocks))

    def _rest(self, seconds: float) -> None:
        """Between two parts of a store that took so long. While a step runs, most of the time is the step's."""
        if not self._in_step:
            return
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or not self._in_step or bool(self._loads), seconds * (1 / STORE_DUTY - 1)
            )

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._wait_for_work():
                    if not self._run_loads():
                        self._run_stores()
        finally:
            with self._changed:
                self._closed = True  # also if the thread fell over: nobody may wait for it
                left = [*self._loads, *self._stores]
                self._loads.clear()
                self._stores.clear()
                self._running = 0
                self._changed.notify_all()
            self._totals.report([queued.job for queued in left], "the mover is closed", 0.0)

    def _wait_for_work(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._has_ready(self._loads, self._stores))
            return not self._closed

    def _has_ready(self, *queues: deque[Queued]) -> bool:
        return any(queued.job.after_step <= self._last_step for queue in queues for queued in queue)

    def _take(self, queue: deque[Queued], limit: int) -> list[Queued]:
        """Up to so many ready jobs; the others keep their order."""
        taken: list[Queued] = []
        kept: list[Queued] = []
        while queue and len(taken) < limit:
            queued = queue.popleft()
            (taken if queued.job.after_step <= self._last_step else kept).append(queued)
        queue.extendleft(reversed(kept))
        return taken

    def _run_loads(self) -> bool:
        """Copy all loads that can begin, layer by layer. False: there were none."""
        with self._changed:
            batch = self._take(self._loads, 1 << 30)
            if not batch:
                return False
            self._running = batch[0].number
            self._layers_done = 0
        jobs = [queued.job for queued in batch]
        start = time.perf_counter()
        error: str | None = None
        try:
            rows = self._rows(jobs)
            for done, (layer, group) in enumerate(self.map.order, start=1):
                if group in rows:
                    self._load_layer(layer, rows[group])
                with self._changed:
                    self._layers_done = done
                    if self._awaiting:
                        self._changed.notify_all()
        except (RuntimeError, IndexError, ValueError) as problem:
            error = f"copy to the device failed: {problem}"
        self._totals.report(jobs, error, time.perf_counter() - start)
        with self._changed:
            self._running = 0
            self._changed.notify_all()
        return True

    def _run_stores(self) -> None:
        """Copy a few stores; loads that come meanwhile go first."""
        with self._changed:
            batch = self._take(self._stores, self._store_rows)
        if not batch:
            return
        jobs = [queued.job for queued in batch]
        seconds = 0.0
        error: str | None = None
        try:
            rows = self._rows(jobs)
            for layer, group in self.map.order:
                if self._loads:
                    self._run_loads()
                if group in rows:
                    start = time.perf_counter()
                    self._store_layer(layer, rows[group])
                    spent = time.perf_counter() - start
                    seconds += spent
                    self._rest(spent)
        except (RuntimeError, IndexError, ValueError) as problem:
            error = f"copy from the device failed: {problem}"
        self._totals.report(jobs, error, seconds)

    # ---- private ---------------------------------------------------------------------------------------------------

    def _is_there(self, place: int) -> bool:
        """Whether the layer at this place of the order is loaded, as far as the step waits for it."""
        if self._closed:
            return True
        if self._loads and self._loads[0].number <= self._mark:
            return False
        return not self._running or self._running > self._mark or self._layers_done > place
