"""One worker in this process.

    depth 1, no thread    submit runs the step; poll hands its output out
    thread                submit queues the step; a thread runs one after the other; poll waits
    a device behind       submit launches the step; poll waits for the oldest. What the worker does between launch and
                          finish is the device's business, so no thread is needed

A step with masked rows starts once provide() has brought the masks of all of them.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from lamella.engine.executor.protocol import Events, RankDied
from lamella.kvtier import CopyJob, Job, LookupJob, LookupResult, TicketResult, TierEvent
from lamella.runner_v2.step import KvLayout, Mask, RankReport, Step, StepOutput

log = logging.getLogger("lamella.executor")


class Worker(Protocol):
    """One rank. Every method is called by one thread at a time."""

    @property
    def runs_behind(self) -> bool:
        """launch() and finish() serve; known once it is open."""

    def open(self) -> RankReport: ...
    def allocate(self, layout: KvLayout) -> None: ...
    def step(self, step: Step) -> StepOutput: ...
    def launch(self, step: Step) -> None: ...
    def finish(self) -> StepOutput: ...
    def provide(self, step_id: int, masks: Sequence[Mask]) -> None: ...
    def call(self, op: str, **arguments: Any) -> Any: ...
    def close(self) -> None: ...


class BlockMover(Protocol):
    """Moves blocks between the tiers of the worker's node."""

    def submit(self, jobs: Sequence[Job]) -> None: ...
    def poll(self) -> Sequence[TierEvent]: ...
    def wait(self, timeout_s: float) -> bool: ...
    def close(self) -> None: ...


class InProcess:
    """An Executor over one Worker. A worker that raises in a step has died; poll() says so."""

    def __init__(
        self, worker: Worker, *, depth: int = 1, threaded: bool = False, mover: BlockMover | None = None
    ) -> None:
        """threaded: steps run on a thread of their own. mover: None: there is no tier but the device, and every copy
        ends as failed."""
        assert depth >= 1
        self.depth = depth
        self._worker = worker
        self._mover = mover
        self._pending: deque[Step] = deque()
        """Submitted, not started: waiting for masks, or behind one that does."""
        self._masked: dict[int, set[int]] = {}
        """step_id -> rows whose masks have come."""
        self._outputs: deque[StepOutput] = deque()
        self._tickets: list[TierEvent] = []
        self._num_in_flight = 0
        self._num_launched = 0
        """Of those in flight: launched by a worker that runs behind, and not finished."""
        self._runs_behind = False
        self._died: RankDied | None = None
        self._thread = StepThread(worker.step) if threaded else None

    def open(self) -> tuple[RankReport, ...]:
        """Load the model; errors of the worker are raised as they are."""
        report = self._worker.open()
        self._runs_behind = self._thread is None and self._worker.runs_behind
        return (report,)

    def allocate(self, layout: KvLayout) -> None:
        """Allocate the KV cache."""
        self._worker.allocate(layout)

    def submit(self, step: Step) -> None:
        """Run the step now, or as soon as its masks are there; with a thread, behind the caller's back."""
        assert self._num_in_flight < self.depth, f"{self._num_in_flight} steps are in flight, depth is {self.depth}"
        self._num_in_flight += 1
        self._pending.append(step)
        self._start_ready()

    def provide(self, step_id: int, masks: Sequence[Mask]) -> None:
        """Masks for a step; it starts with the last of its rows' masks."""
        self._worker.provide(step_id, masks)
        self._masked.setdefault(step_id, set()).update(mask.row for mask in masks)
        self._start_ready()

    def copy(self, jobs: Sequence[Job]) -> None:
        """Hand jobs to the mover; without one they fail, which is a miss and never wrong data."""
        if self._mover is None:
            copies = [job for job in jobs if isinstance(job, CopyJob)]
            self._tickets += [TicketResult(job.ticket, False, "there is no tier beside the device") for job in copies]
            self._tickets += [LookupResult(job.ticket, 0) for job in jobs if isinstance(job, LookupJob)]
        else:
            self._mover.submit(jobs)

    def call(self, method: str, args: Mapping[str, Any]) -> list[Any]:
        """An operation of the worker between steps."""
        assert self._num_in_flight == 0, "a call while steps are in flight"
        return [self._worker.call(method, **args)]

    def poll(self, timeout_s: float | None) -> Events:
        """Outputs of steps that have ended, in order; waits for one if steps are running, else for a copy.

        Without a thread one output at a time, as from a device that is still at work on the step behind it.
        """
        if self._thread is not None and self._num_in_flight > len(self._pending) and not self._died:
            ended = self._thread.take(timeout_s)
            self._died = self._thread.died or self._died
            self._outputs += ended
        elif self._num_launched and not self._died:
            self._finish_oldest()
        outputs = tuple(self._outputs if self._thread is not None else list(self._outputs)[:1])
        for _ in outputs:
            self._outputs.popleft()
        self._num_in_flight -= len(outputs)
        tickets = self._tickets
        self._tickets = []
        if self._mover is not None:
            if timeout_s and not outputs and not tickets and not self._num_in_flight:
                self._mover.wait(timeout_s)
            tickets += self._mover.poll()
        return Events(outputs, tickets, self._died)

    def close(self) -> None:
        """Stop the thread, then the worker."""
        if self._thread is not None:
            self._thread.close()
        if self._mover is not None:
            self._mover.close()
        self._worker.close()

    def _finish_oldest(self) -> None:
        """Wait for the device."""
        try:
            self._outputs.append(self._worker.finish())
            self._num_launched -= 1
        except Exception as error:  # noqa: BLE001 - whatever it was, no step can follow
            self._died = death(error)

    def _start_ready(self) -> None:
        """Start pending steps in order, up to the first that still waits for masks."""
        while self._pending and not self._died:
            step = self._pending[0]
            if not self._masked.get(step.step_id, set()).issuperset(step.masked_rows):
                return
            self._pending.popleft()
            self._masked.pop(step.step_id, None)
            if self._thread is not None:
                self._thread.put(step)
                continue
            try:
                if self._runs_behind:
                    self._worker.launch(step)
                    self._num_launched += 1
                else:
                    self._outputs.append(self._worker.step(step))
            except Exception as error:  # noqa: BLE001 - whatever it was, no step can follow
                self._died = death(error)


class StepThread:
    """Runs steps one after the other."""

    def __init__(self, run: Callable[[Step], StepOutput]) -> None:
        self.died: RankDied | None = None
        self._run = run
        self._steps: queue.SimpleQueue[Step | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[StepOutput | RankDied] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="worker", daemon=True)
        self._thread.start()

    def put(self, step: Step) -> None:
        """Queue a step."""
        self._steps.put(step)

    def take(self, timeout_s: float | None) -> list[StepOutput]:
        """Outputs since the last call; waits for one of them. Sets `died` if the worker raised."""
        outputs: list[StepOutput] = []
        try:
            ended = self._ended.get(timeout=timeout_s)
            while True:
                if isinstance(ended, RankDied):
                    self.died = ended
                    return outputs
                outputs.append(ended)
                ended = self._ended.get_nowait()
        except queue.Empty:
            return outputs

    def close(self) -> None:
        """Return once the step that runs, if any, has ended."""
        self._steps.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (step := self._steps.get()) is not None:
            try:
                self._ended.put(self._run(step))
            except Exception as error:  # noqa: BLE001 - whatever it was, the owner of the core must hear of it
                self._ended.put(death(error))
                return


def death(error: Exception) -> RankDied:
    """What is told of a worker that raised; where it did so goes to the log."""
    log.error("the worker failed in a step", exc_info=error)
    return RankDied(0, f"{type(error).__name__}: {error}")
