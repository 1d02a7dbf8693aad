"""Copies between the host tier and one external manager, and lookups there.

    submit ──▶ lookups, loads (never dropped, go first) ┐
               stores (bounded: what is too much fails) ┴▶ driver's thread ──▶ IsolatedManager

The manager never sees host slots: what it fills or reads is memory of its own call, so a call that hangs harms no
block. What it filled is checked (frame.py) before it is copied into the slot; wrong bytes are a miss, and counted.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from lamella.kvtier.data import frame
from lamella.kvtier.data.breaker import Breaker
from lamella.kvtier.data.external import CallFailed, IsolatedManager
from lamella.kvtier.data.host_buffer import HostBuffer
from lamella.kvtier.data.queue import EventQueue
from lamella.kvtier.jobs import CopyJob, LookupJob, LookupResult, TicketResult
from lamella.kvtier.keys import Key
from lamella.kvtier.protocols import ExternalManager

MAX_BATCH = 32
"""Blocks in one call."""


class ExternalMover:
    """host ⇄ one external manager."""

    def __init__(
        self,
        name: str,
        make: Callable[[], ExternalManager],
        buffer: HostBuffer,
        fingerprint: bytes,
        events: EventQueue,
        *,
        timeout_s: float = 5.0,
        max_restarts: int = 3,
        max_stores: int = 256,
        max_failures: int = 3,
        backoff_s: float = 1.0,
        max_backoff_s: float = 60.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """fingerprint: 16 bytes, of the layout. max_stores: queued ones; further ones fail at once."""
        self.name = name
        self.breaker = Breaker(now, max_failures=max_failures, backoff_s=backoff_s, max_backoff_s=max_backoff_s)
        self.bytes_in = 0
        """Manager to host, of jobs that ended well."""
        self.bytes_out = 0
        self.num_dropped = 0
        self._failures: Counter[str] = Counter()
        self._manager = IsolatedManager(make, timeout_s=timeout_s, max_restarts=max_restarts, name=name)
        self._buffer = buffer
        self._fingerprint = fingerprint
        self._name_root = fingerprint
        self._batch_root = fingerprint
        """The root under which the running batch was submitted: a clear() meanwhile must not rename its blocks."""
        self._events = events
        self._max_stores = max_stores
        self._changed = threading.Condition()
        self._urgent: deque[CopyJob | LookupJob] = deque()
        self._stores: deque[CopyJob] = deque()
        self._num_running = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"kvtier-driver-{name}", daemon=True)
        self._thread.start()

    def submit(self, jobs: Sequence[CopyJob | LookupJob]) -> None:
        """Start these. Each ends in one event; a store beyond max_stores fails at once."""
        refused: list[TicketResult | LookupResult] = []
        with self._changed:
            for job in jobs:
                if self._closed:
                    refused.append(_failed(job, "the mover is closed"))
                elif isinstance(job, LookupJob) or job.source.tier == "external":
                    self._urgent.append(job)
                elif len(self._stores) >= self._max_stores:
                    self.num_dropped += 1
                    refused.append(_failed(job, "queue full"))
                else:
                    self._stores.append(job)
            self._changed.notify_all()
        self._events.put(refused)

    def clear(self) -> None:
        """Blocks get other names from now on: what was stored so far is not found again while this mover lives. Stores
        that wait are dropped."""
        with self._changed:
            self._name_root = hashlib.blake2b(self._fingerprint + os.urandom(16), digest_size=16).digest()
            dropped = [_failed(job, "cleared") for job in self._stores]
            self._stores.clear()
        self._events.put(dropped)

    @property
    def queue_depth(self) -> int:
        """Jobs that have not ended."""
        return len(self._urgent) + len(self._stores) + self._num_running

    @property
    def failures(self) -> dict[str, int]:
        """Counts by kind: timeout, raised, exited, answer (of the wrong form), bytes (wrong), open (not asked)."""
        return {**self._manager.failures, **self._failures}

    @property
    def num_restarts(self) -> int:
        """Threads of the manager that hung and were replaced."""
        return self._manager.num_restarts

    def close(self, timeout_s: float = 1.0) -> None:
        """End the threads. A call that runs longer than timeout_s is given up; what has not ended fails."""
        with self._changed:
            self._closed = True
            left = [*self._urgent, *self._stores]
            self._urgent.clear()
            self._stores.clear()
            self._changed.notify_all()
        self._events.put([_failed(job, "the mover is closed") for job in left])
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._manager.abort()
            self._thread.join(2.0)

    def stats(self) -> dict[str, Any]:
        """Bytes manager → host in, host → manager out; jobs, drops, failures by kind; state of the breaker."""
        return {
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "queue_depth": self.queue_depth,
            "dropped": self.num_dropped,
            "failures": self.failures,
            "breaker": self.breaker.state.value,
            "opened": self.breaker.num_opened,
            "restarts": self.num_restarts,
        }

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or bool(self._urgent) or bool(self._stores))
                if self._closed:
                    break
                batch = _take_batch(self._urgent) if self._urgent else _take_batch(self._stores)
                self._num_running = len(batch)
                self._batch_root = self._name_root
            start = time.perf_counter()
            results: list[TicketResult | LookupResult] = []
            try:
                results = self._handle(batch)
            except Exception as error:  # noqa: BLE001  every job ends, whatever happens
                self._failures["broken"] += 1
                results = [_failed(job, f"{type(error).__name__}: {error}") for job in batch]
            seconds = (time.perf_counter() - start) / len(batch)
            self._num_running = 0
            self._events.put([result._replace(seconds=seconds) for result in results])
        self._manager.close()

    def _handle(self, batch: Sequence[Any]) -> list[TicketResult | LookupResult]:
        if self._manager.gone or not self.breaker.allows():
            self._failures["open"] += len(batch)
            reason = "hung too often" if self._manager.gone else "is not asked for a while after failures"
            return [_failed(job, f"external manager {self.name} {reason}") for job in batch]
        try:
            if isinstance(batch[0], LookupJob):
                results = self._lookup(batch[0])
            elif batch[0].source.tier == "external":
                results = self._load(batch)
            else:
                results = self._store(batch)
        except CallFailed as failure:
            if failure.kind == "answer":
                self._failures["answer"] += 1
            self.breaker.failed()
            return [_failed(job, f"external manager {self.name}: {failure}") for job in batch]
        return results

    def _lookup(self, job: LookupJob) -> list[TicketResult | LookupResult]:
        found = self._manager.call("lookup", [self._record_name(job.group, key) for key in job.keys])
        if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found <= len(job.keys):
            raise CallFailed("answer", f"lookup of {len(job.keys)} keys answered {found!r:.80}")
        self.breaker.succeeded()
        return [LookupResult(job.ticket, found)]

    def _load(self, jobs: Sequence[CopyJob]) -> list[TicketResult | LookupResult]:
        views = [self._buffer.view(job.target.group, job.target.slot) for job in jobs]
        frames = [bytearray(frame.HEADER_BYTES + len(view)) for view in views]
        items = [(self._record_name(job.target.group, job.key), memoryview(data)) for job, data in zip(jobs, frames)]
        answers = self._answers(self._manager.call("load", items), len(jobs), "load")
        results: list[TicketResult | LookupResult] = []
        num_wrong = 0
        for job, ok, view, data in zip(jobs, answers, views, frames):
            if not ok:
                results.append(TicketResult(job.ticket, False, "missing"))
                continue
            private = memoryview(bytes(data))  # the manager may still hold its buffer: checked bytes must not change
            fault = frame.fault(private, self._fingerprint, job.target.group, job.key)
            if fault is not None:
                num_wrong += 1
                results.append(TicketResult(job.ticket, False, f"wrong bytes: {fault}"))
                continue
            view[:] = private[frame.HEADER_BYTES :]
            self.bytes_in += len(view)
            results.append(TicketResult(job.ticket, True))
        if num_wrong:
            self._failures["bytes"] += num_wrong
            self.breaker.failed()
        else:
            self.breaker.succeeded()
        return results

    def _store(self, jobs: Sequence[CopyJob]) -> list[TicketResult | LookupResult]:
        items: list[tuple[bytes, bytes | None, memoryview]] = []
        for job in jobs:
            group = job.source.group
            payload = self._buffer.view(group, job.source.slot)
            data = frame.pack(self._fingerprint, group, job.key, job.parent, payload)
            parent = None if job.parent is None else self._record_name(group, job.parent)
            items.append((self._record_name(group, job.key), parent, memoryview(data).toreadonly()))
        answers = self._answers(self._manager.call("store", items), len(jobs), "store")
        self.breaker.succeeded()
        results: list[TicketResult | LookupResult] = []
        for job, ok, (_, _, data_view) in zip(jobs, answers, items):
            if ok:
                self.bytes_out += len(data_view) - frame.HEADER_BYTES
            results.append(TicketResult(job.ticket, ok, None if ok else "declined"))
        return results

    def _answers(self, answers: Any, count: int, method: str) -> list[bool]:
        if not isinstance(answers, (list, tuple)) or len(answers) != count:
            raise CallFailed("answer", f"{method} of {count} blocks answered {answers!r:.80}")
        if not all(isinstance(answer, bool) for answer in answers):
            raise CallFailed("answer", f"{method} answered other things than True and False: {answers!r:.80}")
        return list(answers)

    def _record_name(self, group: int, key: Key) -> bytes:
        """Equal for equal content under one layout: 16 bytes of layout, the key, 4 bytes of group."""
        return self._batch_root + key + group.to_bytes(4, "big")


def _take_batch(queue: deque[Any]) -> list[Any]:
    """Jobs from the front that one call can carry: a lookup alone, or copies of one direction."""
    batch = [queue.popleft()]
    if isinstance(batch[0], CopyJob):
        while queue and len(batch) < MAX_BATCH and isinstance(queue[0], CopyJob):
            batch.append(queue.popleft())
    return batch


def _failed(job: CopyJob | LookupJob, error: str) -> Any:
    return LookupResult(job.ticket, 0) if isinstance(job, LookupJob) else TicketResult(job.ticket, False, error)
