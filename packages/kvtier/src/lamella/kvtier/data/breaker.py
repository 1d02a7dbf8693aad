"""When to stop asking something that fails.

         failures in a row                    back-off is over
CLOSED ───────────────────▶ OPEN ───────────────────────────▶ HALF_OPEN: one call is let through
  ▲                          ▲  └──────────── failed ─────────────┘│       (each time the back-off doubles)
  └──────────────────────────┼───────────── succeeded ────────────┘
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum


class BreakerState(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    """Decides call by call. Not thread-safe: the caller's thread asks and tells."""

    def __init__(
        self,
        now: Callable[[], float],
        *,
        max_failures: int = 3,
        backoff_s: float = 1.0,
        max_backoff_s: float = 60.0,
    ) -> None:
        """now: seconds of any clock. max_failures in a row open it."""
        self.state = BreakerState.CLOSED
        self.num_opened = 0
        self._now = now
        self._max_failures = max_failures
        self._first_backoff_s = backoff_s
        self._max_backoff_s = max_backoff_s
        self._backoff_s = backoff_s
        self._failures = 0
        self._until = 0.0

    def allows(self) -> bool:
        """Whether to call now. An open one whose back-off is over becomes half-open, and the call is its probe."""
        if self.state is BreakerState.OPEN and self._now() >= self._until:
            self.state = BreakerState.HALF_OPEN
            return True
        return self.state is BreakerState.CLOSED

    def succeeded(self) -> None:
        """The call ended well."""
        self.state = BreakerState.CLOSED
        self._failures = 0
        self._backoff_s = self._first_backoff_s

    def failed(self) -> None:
        """The call raised, took too long or answered nonsense."""
        self._failures += 1
        if self.state is BreakerState.HALF_OPEN:
            self._backoff_s = min(2 * self._backoff_s, self._max_backoff_s)
        if self.state is BreakerState.HALF_OPEN or self._failures >= self._max_failures:
            self.state = BreakerState.OPEN
            self.num_opened += 1
            self._until = self._now() + self._backoff_s
