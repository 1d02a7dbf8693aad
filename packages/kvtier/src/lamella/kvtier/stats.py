"""Totals since start, and what is in use now."""

from __future__ import annotations

from dataclasses import dataclass
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
