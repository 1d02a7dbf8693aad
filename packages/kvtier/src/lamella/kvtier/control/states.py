"""Groups of recurrent states: a block is one whole state, not a number of tokens.

    live       num_columns blocks of a sequence, always being written, never sealed, never shared
    snapshot   a copy of the live state at one position, a multiple of block_size that the caller chooses:
               planned ─▶ written by the step that ends there ─▶ sealed: named by the key of the block that ends there

A prefix of h tokens is a hit if there is a snapshot at h. Its block is held until the sequence has gone on from it; the
caller copies it into the live state first. Snapshots hang on nothing: each can be evicted by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from lamella.kvtier.control.groups import Books, GroupBlocks
from lamella.kvtier.keys import Key


class StateBlocks(GroupBlocks):
    """Pool and index of one group of states."""

    chained = False
    is_state = True

    def match(self, keys: Sequence[Key], max_blocks: int) -> int:
        return self.match_over(keys, max_blocks, ())

    def match_over(self, keys: Sequence[Key], max_blocks: int, books: Sequence[Books]) -> int:
        """The last position, at most max_blocks, that has a snapshot; 0 needs none."""
        for n in range(max_blocks, 0, -1):
            key = keys[n - 1]
            if key in self.index or (books and any(key in book for book in books)):
                return n
        return 0

    def left_edge(self, length: int) -> int:
        """The one block that is read: the snapshot at this position."""
        return max(0, length // self.block_size - 1)

    def num_new(self, num_tokens: int, chunk_end: int, hit: int) -> int:
        return self.group.num_columns

    def max_len(self) -> int:
        """Any length, if a live state fits beside the snapshot that it goes on from."""
        return 1 << 62 if self.pool.capacity > self.group.num_columns else 0

    def max_chunk_len(self, max_len: int) -> int:
        return max_len


class States:
    """One sequence's blocks in all groups of states, in their order."""

    __slots__ = ("live", "planned", "source")

    def __init__(self, live: list[list[int]], source: list[int]) -> None:
        self.live = live
        self.source = source
        """The snapshots that it goes on from, while they are held; empty: it began with nothing, or has gone on."""
        self.planned: dict[int, list[int]] = {}
        """Position, in blocks -> where the caller writes the snapshots."""

    def blocks(self, group: int) -> list[int]:
        """All blocks that it references in one of the groups, counted from the first group of states."""
        return [*self.live[group], *self.source[group : group + 1], *(p[group] for p in self.planned.values())]
