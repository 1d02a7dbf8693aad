"""Replays steps where the device can record them, in two parts: up to the logits, and from them to the next step's
state. Between the two lies what only the host knows (grammar masks, penalties); mostly nothing.

What makes two steps the same recording is their GraphKey: padding rows fill a batch up to a size that was recorded. On
a CPU there is nothing to record and every step runs eagerly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

T = TypeVar("T")
Part = Literal["logits", "sample"]


class GraphKey(NamedTuple):
    """Everything that a recording is fixed to."""

    part: Part
    num_rows: int
    """One token each."""
    lora: bool = False
    lane: int = 0
    """Which of the plan buffers the step uses."""


class Recorder(Protocol):
    """A device's way to record a step."""

    last_num_nodes: int
    """Kernels and copies in the last recording; 0: not known."""

    def record(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """Run the call once, recording it; the result replays it and returns the same (refilled) outputs."""

    def forget(self) -> None:
        """All recordings were dropped: the memory that they shared is not to be used again."""


class GraphCache:
    """Recordings by key. All are made before the first step: no step waits for one."""

    def __init__(self, recorder: Recorder | None = None) -> None:
        """recorder: None runs every step eagerly."""
        self._recorder = recorder
        self._recordings: dict[GraphKey, Callable[[], Any]] = {}
        self._num_nodes: dict[GraphKey, int] = {}

    @property
    def records(self) -> bool:
        """Whether this device can record."""
        return self._recorder is not None

    def record(self, key: GraphKey, call: Callable[[], Any]) -> None:
        """Run the call and keep its recording."""
        assert self._recorder is not None, "this device cannot record"
        self._recordings[key] = self._recorder.record(call)
        self._num_nodes[key] = self._recorder.last_num_nodes

    def num_nodes(self, part: Part) -> dict[int, int]:
        """Number of rows -> nodes of the recording of this part, as far as the device tells."""
        return {key.num_rows: count for key, count in self._num_nodes.items() if key.part == part and count}

    def run(self, key: GraphKey, call: Callable[[], T]) -> T:
        """Replay the step recorded under the key; without a recording run it eagerly."""
        recording = self._recordings.get(key)
        if recording is None:
            return call()
        result: T = recording()
        return result

    def clear(self) -> None:
        """Drop the recordings: the memory that they name goes away."""
        self._recordings.clear()
        self._num_nodes.clear()
        if self._recorder is not None:
            self._recorder.forget()

    def __len__(self) -> int:
        return len(self._recordings)
