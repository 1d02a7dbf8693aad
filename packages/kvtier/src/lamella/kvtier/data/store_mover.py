"""Copies between the host tier and what lies below it: the disk store and external managers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lamella.kvtier.data.disk_mover import DiskMover
from lamella.kvtier.data.external_mover import ExternalMover
from lamella.kvtier.data.queue import EventQueue
from lamella.kvtier.jobs import ClearJob, CopyJob, Job, Location, LookupJob, LookupResult, TicketResult


class StoreMover:
    """Hands jobs to the mover of the tier that they name."""

    def __init__(
        self, events: EventQueue, disk: DiskMover | None = None, externals: Sequence[ExternalMover] = ()
    ) -> None:
        """The movers put their events into the same queue."""
        self._events = events
        self._disk = disk
        self._externals = {mover.name: mover for mover in externals}

    def submit(self, jobs: Sequence[Job]) -> None:
        """Start these. A job of a tier that is not here ends as failed."""
        waiting: dict[str, list[CopyJob | LookupJob]] = {}
        for job in jobs:
            if isinstance(job, ClearJob):
                self._flush(waiting)  # what comes before it is cleared, what comes after it is not
                self._clear(job)
            elif isinstance(job, LookupJob):
                if job.tier_name in self._externals:
                    waiting.setdefault(job.tier_name, []).append(job)
                else:
                    self._events.put([LookupResult(job.ticket, 0)])
            else:
                below = job.target if job.source.tier == "host" else job.source
                above = job.source if job.source.tier == "host" else job.target
                known = below.name in self._externals if below.tier == "external" else self._disk is not None
                if above.tier == "host" and below.tier in ("disk", "external") and known:
                    waiting.setdefault(below.name, []).append(job)
                else:
                    error = f"no copy from {_place(job.source)} to {_place(job.target)} here"
                    self._events.put([TicketResult(job.ticket, False, error)])
        self._flush(waiting)

    def _flush(self, waiting: dict[str, list[CopyJob | LookupJob]]) -> None:
        for name, jobs in waiting.items():
            if name:
                self._externals[name].submit(jobs)
            elif self._disk is not None:
                self._disk.submit([job for job in jobs if isinstance(job, CopyJob)])
        waiting.clear()

    def wait_told(self, timeout_s: float) -> bool:
        """Whether the disk's content was told, after at most timeout_s."""
        return self._disk is None or self._disk.told.wait(timeout_s)

    def close(self) -> None:
        """End all threads; what has not ended is told as failed."""
        if self._disk is not None:
            self._disk.close()
        for external in self._externals.values():
            external.close()

    def stats(self) -> dict[str, dict[str, Any]]:
        """Per tier."""
        told: dict[str, dict[str, Any]] = {}
        if self._disk is not None:
            told["disk"] = self._disk.stats()
        for name, external in self._externals.items():
            told[name] = external.stats()
        return told

    def _clear(self, job: ClearJob) -> None:
        if job.tier == "disk" and self._disk is not None:
            self._disk.clear()
        if job.tier == "external":
            for name, external in self._externals.items():
                if job.name in ("", name):
                    external.clear()


def _place(location: Location) -> str:
    return f"{location.tier} {location.name}".rstrip()
