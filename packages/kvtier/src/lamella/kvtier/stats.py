"""Totals since start, and what is in use now."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(slots=True)
class Counters:
    """Totals since start."""

    acquired: int = 0
    """Sequences admitted."""
    refused: int = 0
    """Acquires that did not fit."""
    queried_tokens: int = 0
    """Tokens looked up in the prefix index by admitted sequences."""
    hit_tokens: int = 0
    sealed_blocks: int = 0
    evicted_blocks: int = 0
    duplicate_blocks: int = 0
    """Blocks sealed while another block held the same content."""
    dropped_events: int = 0
    """Events nobody took before the buffer was full."""


class GroupUsage(NamedTuple):
    """Blocks of one group, the null block not counted."""

    name: str
    total: int
    in_use: int
    """Referenced by sequences, or pinned."""
    cached: int
    """Unreferenced, with a key: can be hit, and can be reused."""
    empty: int

    @property
    def share(self) -> float:
        return self.in_use / self.total


@dataclass(slots=True)
class TierStats:
    """One tier below the device: counters since start, gauges where said."""

    num_blocks: int = 0
    """Gauge, as are capacity and queue_depth."""
    capacity: int = 0
    """In blocks; 0: not known."""
    queue_depth: int = 0
    """Copies to and from it that have not ended."""
    lookups: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    """Found there and in no faster tier."""
    partial_hits: int = 0
    """Lookups of which less was brought than was found."""
    bytes_in: int = 0
    bytes_out: int = 0
    evictions: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    """Blocks that were not taken in, by reason."""
    failures: dict[str, int] = field(default_factory=dict)
    """Copies that failed, by kind."""
    loads: int = 0
    """Blocks brought from it."""
    load_seconds: float = 0.0
    """Time of these copies."""
    prefill_tokens_saved: int = 0
    seconds_saved: float = 0.0
    """Of prefill, by the cost model."""
    seconds_spent: float = 0.0
    """That requests waited for it."""

    def refuse(self, reason: str, count: int = 1) -> None:
        """Count blocks that were not taken in."""
        self.refused[reason] = self.refused.get(reason, 0) + count

    def fail(self, kind: str) -> None:
        """Count a copy that failed."""
        self.failures[kind] = self.failures.get(kind, 0) + 1
