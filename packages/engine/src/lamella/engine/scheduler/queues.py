"""Sequences that wait, in the order of the policy.

A sequence that ends while it waits stays where it is and is skipped when its turn comes; when such ghosts are the
majority the queue is rebuilt. So every operation is O(log n), amortised.
"""

from __future__ import annotations

import heapq

from lamella.engine.sequence import Sequence, State


class WaitingQueue:
    """A heap by Sequence.key. Keys are unique."""

    __slots__ = ("_heap", "_num_gone")

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, ...], Sequence]] = []
        self._num_gone = 0

    def push(self, sequence: Sequence) -> None:
        """Take its place by key: a preempted sequence comes before those that arrived later."""
        assert sequence.state is State.WAITING
        heapq.heappush(self._heap, (sequence.key, sequence))

    def head(self) -> Sequence | None:
        """The next one to be admitted; it stays in the queue."""
        while self._heap:
            sequence = self._heap[0][1]
            if sequence.state is State.WAITING:
                return sequence
            heapq.heappop(self._heap)
            self._num_gone -= 1
        return None

    def leave(self, head: Sequence) -> None:
        """The head was admitted."""
        _, sequence = heapq.heappop(self._heap)
        assert sequence is head

    def forget(self, sequence: Sequence) -> None:
        """A sequence of this queue has ended."""
        assert sequence.state is State.FINISHED
        self._num_gone += 1
        if self._num_gone > 16 and 2 * self._num_gone > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[1].state is State.WAITING]
            heapq.heapify(self._heap)
            self._num_gone = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_gone
