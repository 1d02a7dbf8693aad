"""Which share of a trace's tokens a manager finds, with copies that cost nothing and never fail."""

from __future__ import annotations

from collections.abc import Iterable

from lamella.kvtier.control.manager import TierManager
from lamella.kvtier.control.plan import TierPlan
from lamella.kvtier.jobs import CopyJob, TicketResult
from lamella.kvtier.keys import KeyChain
from lamella.kvtier.layout import Group, Layout

SIZE = 16


def hit_ratio(plan: TierPlan | None, device_blocks: int, trace: Iterable[list[int]]) -> float:
    """Requests come one at a time. A prompt longer than the device is cut."""
    manager = TierManager(Layout((Group("full", "full", SIZE, 1),), (device_blocks + 1,)), tiers=plan)
    asked = found = 0
    for sequence, request in enumerate(trace):
        ids = request[: device_blocks * SIZE]
        got = manager.acquire(sequence, ids, KeyChain(SIZE), chunk_len=len(ids))
        assert got is not None
        asked += len(ids)
        found += got.cached_len
        _copy(manager)
        manager.seal(sequence, ids, len(ids))
        _copy(manager)
        manager.release(sequence, 0)
    return found / asked


def _copy(manager: TierManager) -> None:
    while jobs := manager.take_jobs():
        for job in jobs:
            if isinstance(job, CopyJob):
                manager.complete(TicketResult(job.ticket, True))
