"""Moves the blocks of a fake runner between tiers that are dictionaries: late, out of order, and not always.

host → device      before the next step that waits for copies, or by a poll; until then its target holds poison, and
                   the ticket comes with a later poll. Where no runner tells of its steps: at once
everything else    at some later poll, reading its source only then: a source that was reused shows as a wrong id
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lamella.kvtier import ClearJob, CopyJob, Job, Key, LookupJob, LookupResult, Presence, TicketResult, TierEvent


@dataclass(frozen=True)
class Faults:
    """Probabilities."""

    fail: float = 0.0
    """That a copy fails."""
    delay: float = 0.5
    """That a copy waits for a later poll."""
    forget: float = 0.0
    """Per poll, that a slow tier drops something and says so."""
    lie: float = 0.0
    """That a slow tier has lost a block without saying so."""


class FakeMover:
    """A BlockMover over blocks that are bytes."""

    def __init__(self, memory: Callable[[], Sequence[bytearray]], rng: random.Random, faults: Faults) -> None:
        """memory: the device's blocks, per group one after the other."""
        self.memory = memory
        self.rng = rng
        self.faults = faults
        self.host: dict[tuple[int, int], bytes] = {}
        self.stores: dict[str, dict[tuple[int, Key], tuple[bytes, Key | None]]] = {}
        """By the name of the store: (group, key) -> bytes and parent."""
        self.closed = False
        self.num_moved = 0
        self.late = False
        """Set by whoever sees to it that before_step() is called."""
        self._events: list[TierEvent] = []
        self._pending: list[Job] = []

    def submit(self, jobs: Sequence[Job]) -> None:
        """Take jobs over; where steps do not say that they wait, what they would wait for is done now."""
        for job in jobs:
            if not (isinstance(job, CopyJob) and job.target.tier == "device"):
                self._pending.append(job)
            elif not self.late:
                self._end(job)
            else:
                self._device(job.target.group, job.target.slot, job.num_bytes)[:] = b"\xff" * job.num_bytes
                self._pending.append(job)

    def before_step(self, step_id: int, waits: bool) -> None:
        """The step reads what was submitted, if it waits: that is copied now."""
        loads = [job for job in self._pending if isinstance(job, CopyJob) and job.target.tier == "device"]
        if waits:
            self._pending = [job for job in self._pending if job not in loads]
            for job in loads:
                self._end(job)

    def poll(self) -> list[TierEvent]:
        """What has ended, in any order."""
        still: list[Job] = []
        for job in self._pending:
            if self.rng.random() < self.faults.delay:
                still.append(job)
            else:
                self._end(job)
        self._pending = still
        if self.stores and self.rng.random() < self.faults.forget:
            self._forget()
        events, self._events = self._events, []
        self.rng.shuffle(events)
        return events

    def wait(self, timeout_s: float) -> bool:
        """Time is the simulation's."""
        return bool(self._events)

    def close(self) -> None:
        self.closed = True

    def _end(self, job: Job) -> None:
        if isinstance(job, ClearJob):
            self.stores.get(job.name or job.tier, {}).clear()
        elif isinstance(job, LookupJob):
            found = self.stores.get(job.tier_name, {})
            count = next((n for n, key in enumerate(job.keys) if (job.group, key) not in found), len(job.keys))
            self._events.append(LookupResult(job.ticket, count, 0.001))
        else:
            copied = self.rng.random() >= self.faults.fail and self._copy(job)
            self._events.append(TicketResult(job.ticket, copied, None if copied else "it broke", 0.001))

    def _copy(self, job: CopyJob) -> bool:
        source, target = job.source, job.target
        size = job.num_bytes
        if source.tier == "device":
            content = bytes(self._device(source.group, source.slot, size))
        elif source.tier == "host":
            content = self.host[source.group, source.slot]
        else:
            store = self.stores.setdefault(source.name or source.tier, {})
            if (source.group, job.key) not in store or self.rng.random() < self.faults.lie:
                return False
            content = store[source.group, job.key][0]
        assert len(content) == size
        if target.tier == "device":
            self._device(target.group, target.slot, size)[:] = content
        elif target.tier == "host":
            self.host[target.group, target.slot] = content
        else:
            self.stores.setdefault(target.name or target.tier, {})[target.group, job.key] = (content, job.parent)
        self.num_moved += 1
        return True

    def _device(self, group: int, block: int, size: int) -> memoryview:
        return memoryview(self.memory()[group])[block * size : (block + 1) * size]

    def _forget(self) -> None:
        name = self.rng.choice(sorted(self.stores))
        store = self.stores[name]
        if store:
            group, key = self.rng.choice(sorted(store))
            del store[group, key]
            self._events.append(Presence("disk" if name == "disk" else "external", name, (), ((group, key),)))
