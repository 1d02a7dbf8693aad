"""What the books of the tiers cost on the scheduler's thread, and which hit ratios their policies reach.

    hatch run bench kvtier control [--json FILE]

Costs are per block of one full group and one call each over many blocks, the best of several rounds; copies cost
nothing here. Lookups have their keys given. Hit ratios are tokens found on device or host, of all tokens asked for;
the device holds a quarter of the host's blocks.

keys             of a prompt, where its request comes in
lookup           begin_load of a prefix that device, host, disk and an external manager hold up to four points
restore          acquire with hits in the host, and the jobs
seal + demote    a prompt was computed; keys, and jobs to the host
complete         the end of a copy to the host, of one from the host, of one to the disk
load             begin_load with jobs from the disk, and their ends
"""

from __future__ import annotations

import argparse
import gc
import time
from array import array
from collections.abc import Callable

from lamella.engine.cli.report import Report, Row, merge_rows
from lamella.kvtier import (
    AdmissionPlan,
    CopyJob,
    Group,
    KeyChain,
    Layout,
    LookupJob,
    LookupResult,
    Presence,
    TicketResult,
    TierManager,
    TierPlan,
)
from lamella.kvtier.control.eviction.registry import POLICIES
from lamella.kvtier.testing.hit_ratio import hit_ratio
from lamella.kvtier.testing.traces import TRACES

SIZE = 16
TARGET_US = 2.0
TARGET_LOOKUP_MS = 1.0
TARGET_KEYS_MS = 10.0


def make(device: int, host: int, **plan: object) -> TierManager:
    layout = Layout((Group("full", "full", SIZE, 2 << 20),), (device + 1,))
    whole = {"max_demoting": 1 << 20, "max_storing": 1 << 20, "max_waiting": 1 << 20, "max_loading_share": 1.0}
    return TierManager(layout, tiers=TierPlan(host_slots=(host,), **{**whole, **plan}))  # type: ignore[arg-type]


def end_all(manager: TierManager) -> int:
    """Copies until nothing is left to copy."""
    count = 0
    while jobs := manager.take_jobs():
        for job in jobs:
            if isinstance(job, CopyJob):
                manager.complete(TicketResult(job.ticket, True))
                count += 1
            elif isinstance(job, LookupJob):
                manager.complete(LookupResult(job.ticket, 0))
    return count


def chain_of(ids: list[int]) -> KeyChain:
    chain = KeyChain(SIZE)
    chain.extend(ids)
    return chain


def keys_ms(num_blocks: int) -> float:
    """Of packed ids, as requests come to the scheduler."""
    ids = array("I", range(num_blocks * SIZE))
    best = float("inf")
    for _ in range(20):
        chain = KeyChain(SIZE)
        start = time.perf_counter()
        chain.extend(ids)
        best = min(best, time.perf_counter() - start)
    return 1e3 * best


def lookup_ms(num_blocks: int) -> float:
    """A prefix whose parts are on ever slower tiers; what would be loaded is limited to nothing by its cost."""
    ids = list(range(num_blocks * SIZE + 1))
    chain = chain_of(ids)
    keys = chain.keys
    quarter = num_blocks // 4
    manager = make(num_blocks, num_blocks, has_disk=True, externals=("shop",))
    cost = manager._below._shared.plan.cost  # type: ignore[union-attr]
    cost.bytes_per_s.update(disk=1.0, shop=1.0)
    cost.prefill_s_per_token = 1e-9
    manager.acquire(1, ids[: quarter * SIZE + 1], chain, chunk_len=1)
    manager.seal(1, ids, quarter * SIZE)
    end_all(manager)
    rows = [(0, key, keys[n - 1] if n else None) for n, key in enumerate(keys)]
    manager.complete(Presence("disk", "", tuple(rows[: 3 * quarter]), ()))
    manager.complete(Presence("external", "shop", tuple(rows), ()))
    best = float("inf")
    for sequence in range(2, 12):
        start = time.perf_counter()
        manager.begin_load(sequence, ids, chain)
        best = min(best, time.perf_counter() - start)
        manager.end_load(sequence)
        manager.take_jobs()
    return 1e3 * best


def cycle_us(num_blocks: int) -> dict[str, float]:
    """A prompt goes down to the disk and comes up again, everything timed apart."""
    times: dict[str, float] = {}

    def clock(name: str, call: Callable[[], object]) -> object:
        start = time.perf_counter()
        result = call()
        times[name] = 1e6 * (time.perf_counter() - start) / num_blocks
        return result

    def end(name: str, jobs: list[CopyJob]) -> None:
        results = [TicketResult(job.ticket, True, None, 1e-4) for job in jobs]
        clock(name, lambda: manager.complete_all(results))

    ids = list(range(num_blocks * SIZE + 1))
    other = list(range(1 << 24, (1 << 24) + num_blocks * SIZE + 1))
    manager = make(num_blocks + 1, 2 * num_blocks, has_disk=True)
    chain = chain_of(ids)
    manager.acquire(1, ids, chain, chunk_len=len(ids))
    clock("seal + demote", lambda: (manager.seal(1, ids, len(ids)), manager.take_jobs()))
    jobs = list(manager._below._demotion.copies)  # type: ignore[union-attr]
    assert len(jobs) == num_blocks
    results = [TicketResult(ticket, True, None, 1e-4) for ticket in jobs]
    clock("complete, to the host", lambda: manager.complete_all(results))
    stores = clock("store", manager.take_jobs)
    end("complete, to the disk", stores)  # type: ignore[arg-type]
    clock("release", lambda: manager.release(1, 0))
    manager.acquire(2, other, None, chunk_len=len(other))
    manager.release(2, 0)
    restores: list[CopyJob] = []

    def restore() -> None:
        got = manager.acquire(3, ids, chain, chunk_len=len(ids))
        assert got is not None
        assert got.loaded_len == num_blocks * SIZE
        restores.extend(manager.take_jobs())  # type: ignore[arg-type]

    clock("restore", restore)
    end("complete, to the device", restores)
    manager.release(3, 1)
    manager.acquire(4, other, None, chunk_len=len(other))
    manager._below.host[0].drop_all()  # type: ignore[union-attr]
    loads = clock("load", lambda: (manager.begin_load(5, ids, chain), manager.take_jobs())[1])
    assert len(loads) == num_blocks  # type: ignore[arg-type]
    end("complete, from the disk", loads)  # type: ignore[arg-type]
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the rows; rows of other benches are kept")
    parser.add_argument("--blocks", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--requests", type=int, default=600, help="of each trace")
    options = parser.parse_args()
    gc.disable()
    rows = [
        limited("keys of 100,000 blocks", keys_ms(100_000), "ms", TARGET_KEYS_MS),
        limited("lookup of 100,000 blocks over four tiers", lookup_ms(100_000), "ms", TARGET_LOOKUP_MS),
    ]
    best: dict[str, float] = {}
    for _ in range(options.rounds):
        for name, value in cycle_us(options.blocks).items():
            best[name] = min(best.get(name, value), value)
        gc.collect()
    rows += [limited(f"books: {name}", value, "us/block", TARGET_US) for name, value in best.items()]
    for trace, make_trace in TRACES.items():
        for eviction in POLICIES:
            for mode in ("all", "reused"):
                admission = AdmissionPlan(mode)  # type: ignore[arg-type]
                plan = TierPlan(host_slots=(1600,), eviction=eviction, admission=admission, max_demoting=1 << 20)
                ratio = hit_ratio(plan, 400, make_trace(1, options.requests))
                rows.append(Row(name=f"hit ratio, {trace}, {eviction}, admit {mode}", value=ratio, unit="of tokens"))
        ratio = hit_ratio(None, 400, make_trace(1, options.requests))
        rows.append(Row(name=f"hit ratio, {trace}, device alone", value=ratio, unit="of tokens"))
    report = Report.of(rows)
    print(report.table())
    if options.json:
        merge_rows(options.json, report).write(options.json)
    return 0 if all(row.ok is not False for row in rows) else 1


def limited(name: str, value: float, unit: str, limit: float) -> Row:
    """A figure that must not be above its limit."""
    return Row(name=name, value=value, unit=unit, target=f"<= {limit:g} {unit}", ok=value <= limit)


if __name__ == "__main__":
    raise SystemExit(main())
