"""Tiers that exist in memory only, with every fault a mover can have, on a FakeClock.

What a block holds is an object (in tests: the tokens that it was computed from), so that a copy of the wrong bytes
shows. The device's memory belongs to the caller, who runs the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from lamella.kvtier.jobs import (
    ClearJob,
    CopyJob,
    Job,
    Location,
    LookupJob,
    LookupResult,
    Presence,
    TicketResult,
    TierEvent,
)
from lamella.kvtier.keys import Key
from lamella.kvtier.testing.fake_clock import FakeClock

GARBAGE = "garbage"


@dataclass
class Faults:
    """Probabilities per copy or question, and times in seconds."""

    fails: float = 0.0
    """The copy fails, and what its target holds is garbage."""
    lost: float = 0.0
    """It hangs, and is told as failed after timeout_s."""
    lies: float = 0.0
    """An external manager says it has what it has not."""
    latency_s: tuple[float, float] = (0.001, 0.001)
    """Between the first and the second, each by itself: copies overtake each other."""
    disk_factor: float = 1.0
    """The disk takes so many times longer."""
    timeout_s: float = 5.0
    vanish: float = 0.0
    """Per poll: the disk reclaims a record."""


@dataclass(order=True)
class _Running:
    due_s: float
    order: int
    job: CopyJob | LookupJob = field(compare=False)
    ok: bool = field(compare=False)
    epoch: int = field(compare=False)


class FakeTiers:
    """Mover and memory of all tiers: submit() takes jobs, poll() says what has ended by the clock."""

    def __init__(
        self,
        clock: FakeClock,
        rng: Random,
        faults: Faults,
        device: Sequence[list[object]],
        externals: Sequence[str] = (),
    ) -> None:
        """device: memory per group, by block id."""
        self.clock = clock
        self.device = device
        self.host: list[dict[int, object]] = [{} for _ in device]
        self.disk: dict[tuple[int, Key], tuple[Key | None, object]] = {}
        self.externals: dict[str, dict[tuple[int, Key], object]] = {name: {} for name in externals}
        self.faults = faults
        self.num_jobs = 0
        self.steps_run = -1
        """The last step that has run."""
        self._rng = rng
        self._running: list[_Running] = []
        self._epoch = 0

    def submit(self, jobs: Sequence[Job]) -> None:
        """Start these."""
        rng, faults = self._rng, self.faults
        for job in jobs:
            if isinstance(job, ClearJob):
                self._clear(job)
                continue
            self.num_jobs += 1
            low, high = faults.latency_s
            seconds = low + (high - low) * rng.random()
            ok = rng.random() >= faults.fails
            if isinstance(job, CopyJob) and "disk" in (job.source.tier, job.target.tier):
                seconds *= faults.disk_factor
            if rng.random() < faults.lost:
                seconds, ok = faults.timeout_s, False
            self._running.append(_Running(self.clock.now() + seconds, self.num_jobs, job, ok, self._epoch))

    def poll(self, only_restores: bool = False) -> list[TierEvent]:
        """What has ended by now; only_restores: run those to the device at once, whatever the clock says."""
        events: list[TierEvent] = []
        left: list[_Running] = []
        for running in sorted(self._running):
            job = running.job
            restores = isinstance(job, CopyJob) and job.target.tier == "device"
            if restores if only_restores else running.due_s <= self.clock.now():
                events.append(self._end(running))
            else:
                left.append(running)
        self._running = left
        if not only_restores and self.disk and self._rng.random() < self.faults.vanish:
            group, key = sorted(self.disk)[self._rng.randrange(len(self.disk))]
            del self.disk[group, key]
            events.append(Presence("disk", "", (), ((group, key),)))
        return events

    def content(self) -> Presence:
        """What the disk says after it was opened, in no order."""
        added = [(group, key, parent) for (group, key), (parent, _) in self.disk.items()]
        self._rng.shuffle(added)
        return Presence("disk", "", tuple(added), ())

    @property
    def idle(self) -> bool:
        return not self._running

    @property
    def next_s(self) -> float:
        """When the next copy ends."""
        return min(running.due_s for running in self._running)

    def _end(self, running: _Running) -> TierEvent:
        job = running.job
        if isinstance(job, LookupJob):
            return LookupResult(job.ticket, self._look_up(job) if running.ok else 0)
        assert job.after_step <= self.steps_run, "a copy ran before the step that it has to wait for"
        there, content = self._read(job.source, job.key)
        ok = running.ok and there
        if running.epoch == self._epoch or job.target.tier in ("device", "host"):
            self._write(job.target, job, content, ok)
        return TicketResult(job.ticket, ok, None if ok else "fault: injected", 0.001)

    def _look_up(self, job: LookupJob) -> int:
        if self._rng.random() < self.faults.lies:
            return len(job.keys)
        store = self.externals[job.tier_name]
        return next((n for n, key in enumerate(job.keys) if (job.group, key) not in store), len(job.keys))

    def _read(self, place: Location, key: Key) -> tuple[bool, object]:
        """Whether it is there, and what it is: memory is never asked whether it makes sense."""
        if place.tier == "device":
            return True, self.device[place.group][place.slot]
        if place.tier == "host":
            return True, self.host[place.group][place.slot]
        if place.tier == "disk":
            return (place.group, key) in self.disk, self.disk.get((place.group, key), (None, GARBAGE))[1]
        store = self.externals[place.name]
        return (place.group, key) in store, store.get((place.group, key), GARBAGE)

    def _write(self, place: Location, job: CopyJob, content: object, ok: bool) -> None:
        if place.tier == "device":
            self.device[place.group][place.slot] = content if ok else GARBAGE
        elif place.tier == "host":
            self.host[place.group][place.slot] = content if ok else GARBAGE
        elif ok and place.tier == "disk":
            self.disk[place.group, job.key] = (job.parent, content)
        elif ok:
            self.externals[place.name][place.group, job.key] = content

    def _clear(self, job: ClearJob) -> None:
        self._epoch += 1
        if job.tier == "disk":
            self.disk.clear()
        else:
            self.externals[job.name].clear()
