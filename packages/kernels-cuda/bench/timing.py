"""How kernels are timed: replays of a CUDA graph with inputs that rotate, so that they do not lie in the L2 cache."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

L2_BYTES = 60 << 20


def sets_for(bytes_per_set: int) -> int:
    """How many sets of inputs make a rotation that the L2 cache cannot hold."""
    return max(2, min(64, -(-4 * L2_BYTES // max(bytes_per_set, 1))))


def seconds(calls: Sequence[Callable[[], object]], launches: int = 20, replays: int = 15) -> float:
    """Median seconds of one call. calls: the same work on different inputs, called in turn."""
    launches = max(launches, len(calls))
    for call in calls[:3]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            calls[i % len(calls)]()
    times = []
    for i in range(replays + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 3:
            times.append(start.elapsed_time(end) * 1e-3 / launches)
    return statistics.median(times)
