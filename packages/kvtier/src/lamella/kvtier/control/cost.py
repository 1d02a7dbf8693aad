"""What loading a prefix costs beside computing it again.

    load        latency + bytes / speed                    of each tier, kept current by the copies that have ended
    recompute   a · tokens + b · sum of their positions    measured at start

    [ there already | disk's part | an external manager's part | … tokens that nobody has )
                    start         end of disk                  end of external           length

Computing grows with the square of the length, loading does not: a slow disk pays for long prefixes only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

SMOOTHING = 0.2
"""Weight of the newest copy in a tier's measured speed."""


class Part(NamedTuple):
    """What one tier would bring of a prefix: from the end of the part before it to `end`."""

    tier: str
    end: int
    """In tokens."""
    num_bytes: int
    queued_bytes: int = 0
    """What the tier has to move before that."""


@dataclass(slots=True)
class CostModel:
    """Seconds of loads and of prefill. Unknown speeds count as infinite: the first load measures them."""

    bytes_per_s: dict[str, float] = field(default_factory=dict)
    """By the tier's name: "host" is the link to the device, "disk", external managers by name."""
    latency_s: dict[str, float] = field(default_factory=dict)
    prefill_s_per_token: float = 0.0
    """a: a token with nothing before it. 0: prefill was not measured, and loading always pays."""
    prefill_s_per_position: float = 0.0
    """b: what each token before it adds."""

    def load_s(self, tier: str, num_bytes: int, queued_bytes: int = 0) -> float:
        """Until num_bytes behind queued_bytes are there."""
        speed = self.bytes_per_s.get(tier, 0.0)
        moving_s = (num_bytes + queued_bytes) / speed if speed else 0.0
        return self.latency_s.get(tier, 0.0) + moving_s

    def recompute_s(self, start: int, end: int) -> float:
        """Prefill of the tokens [start, end)."""
        positions = (end * (end - 1) - start * (start - 1)) / 2
        return self.prefill_s_per_token * (end - start) + self.prefill_s_per_position * positions

    def choose(self, start: int, length: int, parts: Sequence[Part]) -> int:
        """Up to which token to load, the rest of [start, length) being computed; start: load nothing.

        parts: in order of their ends. The tiers work at the same time, and the computation follows.
        """
        if not self.prefill_s_per_token:
            return max((part.end for part in parts), default=start)
        best, best_s = start, self.recompute_s(start, length)
        loading_s = 0.0
        for part in parts:
            loading_s = max(loading_s, self.load_s(part.tier, part.num_bytes, part.queued_bytes))
            total_s = loading_s + self.recompute_s(part.end, length)
            if total_s < best_s:
                best, best_s = part.end, total_s
        return best

    def observe(self, tier: str, num_bytes: int, seconds: float) -> None:
        """A copy from the tier has ended; seconds that the tier was busy with it."""
        if seconds <= 0.0 or num_bytes <= 0:
            return
        speed = num_bytes / seconds
        known = self.bytes_per_s.get(tier)
        self.bytes_per_s[tier] = speed if not known else known + SMOOTHING * (speed - known)

    @classmethod
    def of(cls, bytes_per_s: Mapping[str, float], prefill: tuple[float, float]) -> CostModel:
        """Without latencies; prefill: (a, b)."""
        return cls(dict(bytes_per_s), {}, *prefill)
