"""The streams beside the one that computes: one for loads, one for stores, one for what goes through a staging buffer.

    compute   step n ──▶ mark ────────── step n+1 ── hold(layer mark) ─▶ layer …
    loads          └─ hold_lane ─▶ layer 0 ─▶ mark ─▶ layer 1 ─▶ mark …
    stores                                                              lowest priority

Nothing here waits on the host but Mark.synchronize().
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

LOADS, STORES, STAGED = 0, 1, 2


class Mark(Protocol):
    """A place in the order of a stream."""

    def query(self) -> bool:
        """Whether the stream has passed it."""

    def synchronize(self) -> None:
        """Wait until it has."""

    def elapsed_time(self, later: Any) -> float:
        """Milliseconds to a later mark; both timed and passed."""


class Lanes(Protocol):
    """Side streams of one device. A lane is LOADS, STORES or STAGED."""

    def on(self, lane: int) -> AbstractContextManager[Any]:
        """Inside, what is launched goes to this lane."""

    def mark(self) -> Mark:
        """Behind all that the caller's current stream was given: the one that computes."""

    def mark_lane(self, lane: int, *, timed: bool = False) -> Mark:
        """Behind all that the lane was given."""

    def hold(self, mark: Mark) -> None:
        """What the caller's current stream is given from now on waits for the mark."""

    def hold_lane(self, lane: int, mark: Mark) -> None:
        """What the lane is given from now on waits for the mark."""


class CudaLanes:
    """Streams of a CUDA device. A load is waited for, a store is not: loads have the higher priority."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = [
            torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
            for priority in (-1, 0, 0)
        ]

    def on(self, lane: int) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._streams[lane])

    def mark(self) -> Mark:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def mark_lane(self, lane: int, *, timed: bool = False) -> Mark:
        event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
        event.record(self._streams[lane])
        return event

    def hold(self, mark: Mark) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)  # type: ignore[arg-type]

    def hold_lane(self, lane: int, mark: Mark) -> None:
        self._streams[lane].wait_event(mark)  # type: ignore[arg-type]
