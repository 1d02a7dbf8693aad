"""Replays whole steps where the device can record them: build, forward, sample or verify, advance, draft.

What makes two steps the same recording is their GraphKey. Rows inside a recording are ragged by device offsets; padding
and missing drafts are -1. On a CPU there is nothing to record and every step runs eagerly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

T = TypeVar("T")
SamplingClass = Literal["none", "greedy", "random", "masked"]


class GraphKey(NamedTuple):
    """Everything that a recording is fixed to."""

    num_tokens: int
    num_rows: int
    max_query_len: int
    sampling_class: SamplingClass
    """none: prompt chunks only; masked: cut before sampling, which waits for the host."""
    lora: bool = False
    lane: int = 0
    """Which of the plan buffers the step uses."""


class Recorder(Protocol):
    """A device's way to record a step."""

    def record(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """Run the call once, recording it; the result replays it and returns the same (refilled) outputs."""


class GraphCache:
    """Recordings by key."""

    def __init__(self, recorder: Recorder | None = None) -> None:
        """recorder: None runs every step eagerly."""
        self._recorder = recorder
        self._recordings: dict[GraphKey, Callable[[], Any]] = {}

    def run(self, key: GraphKey, call: Callable[[], T]) -> T:
        """Replay the step recorded under the key; without a recording make one, or run eagerly."""
        if self._recorder is None:
            return call()
        recording = self._recordings.get(key)
        if recording is None:
            recording = self._recordings[key] = self._recorder.record(call)
        result: T = recording()
        return result

    def __len__(self) -> int:
        return len(self._recordings)
