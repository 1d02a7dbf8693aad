"""Events on their way from the movers' threads to whoever polls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from lamella.kvtier.jobs import TierEvent


class EventQueue:
    """Filled by any thread, emptied by one. What is put wakes a waiting reader at once.

    It is bounded by what is in flight: every job ends in one event.
    """

    def __init__(self, on_event: Callable[[], None] | None = None) -> None:
        """on_event is called, on the thread that put something, when the queue was empty before."""
        self._changed = threading.Condition()
        self._events: list[TierEvent] = []
        self._on_event = on_event

    def put(self, events: Iterable[TierEvent]) -> None:
        with self._changed:
            was_empty = not self._events
            self._events.extend(events)
            ring = was_empty and bool(self._events)
            if ring:
                self._changed.notify_all()
        if ring and self._on_event is not None:
            self._on_event()

    def take(self) -> list[TierEvent]:
        """All events since the last call, oldest first."""
        if not self._events:  # read without the lock: polled at every step, and what comes now is taken the next time
            return []
        with self._changed:
            events, self._events = self._events, []
            return events

    def wait(self, timeout_s: float) -> bool:
        """Wait until there is an event; False: there is none after timeout_s."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._events), timeout_s)
