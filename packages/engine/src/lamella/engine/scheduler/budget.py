"""How many tokens a step may still compute.

max_num_batched_tokens
├── one token for every decoding row        always fits: max_num_seqs is at most the budget
├── their drafts                            cut where they would not fit
└── chunks of prompts                       in the order of the policy, what is left
"""

from __future__ import annotations


class Budget:
    """The tokens that are left of a step."""

    __slots__ = ("left", "max_chunk_len")

    def __init__(self, num_tokens: int, max_chunk_len: int) -> None:
        self.left = num_tokens
        self.max_chunk_len = max_chunk_len

    def take_rows(self, num_rows: int) -> None:
        """One token for each of these rows."""
        self.left -= num_rows
        assert self.left >= 0, "more rows than tokens"

    def take_drafts(self, num_drafts: int) -> int:
        """Spend what fits of it; returns that."""
        taken = min(num_drafts, self.left)
        self.left -= taken
        return taken

    def next_chunk(self) -> int:
        """Longest chunk that one sequence could get now."""
        return min(self.left, self.max_chunk_len)

    def take_chunk(self, num_missing: int) -> int:
        """Spend tokens on a sequence of which num_missing are not computed; returns the chunk's length, 0 if none."""
        taken = min(num_missing, self.left, self.max_chunk_len)
        self.left -= taken
        return taken
