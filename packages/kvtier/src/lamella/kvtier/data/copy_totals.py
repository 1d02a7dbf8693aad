"""What the copies of one device mover came to, and how each is told to its owner."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from lamella.kvtier.data.queue import EventQueue
from lamella.kvtier.jobs import CopyJob, TicketResult


class CopyTotals:
    """Counts while it tells. Any thread may call."""

    def __init__(self, events: EventQueue) -> None:
        self.bytes_in = 0
        """Host to device, of jobs that ended well."""
        self.bytes_out = 0
        self.num_failed = 0
        self.seconds_waited = 0.0
        """That steps, or the host for them, waited for layers."""
        self._events = events
        self._lock = threading.Lock()

    def fail(self, results: Sequence[TicketResult]) -> None:
        """These never began."""
        if not results:
            return
        with self._lock:
            self.num_failed += len(results)
        self._events.put(results)

    def report(self, jobs: Sequence[CopyJob], error: str | None, seconds: float) -> None:
        """These, all in one direction, have ended. seconds is of the batch: each job is told its share, so that bytes
        by seconds is the speed."""
        if not jobs:
            return
        num_bytes = sum(job.num_bytes for job in jobs)
        with self._lock:
            if error is not None:
                self.num_failed += len(jobs)
            elif jobs[0].target.tier == "device":
                self.bytes_in += num_bytes
            else:
                self.bytes_out += num_bytes
        share = seconds / len(jobs)
        self._events.put([TicketResult(job.ticket, error is None, error, share) for job in jobs])

    def stats(self) -> dict[str, Any]:
        """Bytes host → device in, device → host out; failures; seconds waited."""
        return {
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "failures": self.num_failed,
            "seconds_waited": self.seconds_waited,
        }
