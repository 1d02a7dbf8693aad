"""A clock that moves when told to."""

from __future__ import annotations


class FakeClock:
    """now() is what advance() made of it."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        """Seconds."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Let time pass; never backwards."""
        assert seconds >= 0
        self._now_s += seconds
