"""Copies between the host tier and what lies below it: the disk store and external managers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lamella.kvtier.data.disk_mover import DiskMover
from lamella.kvtier.data.external_mover import ExternalMover
from lamella.kvtier.data.queue import EventQueue
from lamella.kvtier.jobs import ClearJob, CopyJob, Job, LookupJob, LookupResult, TicketResult


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
        for job in jobs:
            if isinstance(job, ClearJob):
                self._clear(job)
            elif isinstance(job, LookupJob):
                external = self._externals.get(job.tier_name)
                if external is None:
                    self._events.put([LookupResult(job.ticket, 0)])
                else:
                    external.submit([job])
        disk: list[CopyJob] = []
        by_name: dict[str, list[CopyJob]] = {}
        for job in jobs:
            if isinstance(job, CopyJob):
                below = job.target if job.source.tier == "host" else job.source
                if below.tier == "disk" and self._disk is not None:
                    disk.append(job)
                elif below.tier == "external" and below.name in self._externals:
                    by_name.setdefault(below.name, []).append(job)
                else:
                    self._events.put([TicketResult(job.ticket, False, f"no tier {below.tier} {below.name}".rstrip())])
        if disk and self._disk is not None:
            self._disk.submit(disk)
        for name, copies in by_name.items():
            self._externals[name].submit(copies)

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
            for external in self._externals.values():
                external.clear()
