"""How many tokens a step may still compute.

max_num_batched_tokens, and what so many cost from an empty context on
├── one token for every decoding row        always fits: max_num_seqs is at most the budget
├── their drafts                            cut where they would not fit
└── chunks of prompts                       what is left, in the order of the policy; shorter in a long context
"""

from __future__ import annotations

from lamella.engine.scheduler.cost import TokenCost


class Budget:
    """The tokens that are left of a step, and what they may cost."""

    __slots__ = ("_cost", "_cost_left", "_granted", "left", "max_chunk_len")

    def __init__(self, num_tokens: int, max_chunk_len: int, cost: TokenCost) -> None:
        self.left = num_tokens
        self.max_chunk_len = max_chunk_len
        self._cost = cost
        self._cost_left = cost.of(0, num_tokens)
        self._granted = cost.least_tokens

    def take_rows(self, num_rows: int) -> None:
        """One token for each of these rows."""
        self.left -= num_rows
        self._cost_left -= num_rows
        assert self.left >= 0, "more rows than tokens"

    def take_drafts(self, num_drafts: int) -> int:
        """Spend what fits of it; returns that."""
        taken = min(num_drafts, self.left)
        self.left -= taken
        self._cost_left -= taken
        return taken

    def take_contexts(self, num_tokens: int) -> None:
        """What the tokens taken so far cost more because of the num_tokens before them, over all of them."""
        self._cost_left -= self._cost.slope * num_tokens

    def next_chunk(self) -> int:
        """Longest chunk that one sequence could get now, wherever it begins."""
        return self._chunk(0)

    def take_chunk(self, start: int, num_missing: int) -> int:
        """Spend tokens on a sequence whose [start, start + num_missing) is not computed; returns the chunk's length, 0
        only where next_chunk() is 0."""
        taken = min(num_missing, self._chunk(start))
        self.left -= taken
        self._cost_left -= self._cost.of(start, taken)
        self._granted = max(0, self._granted - taken)
        return taken

    def _chunk(self, start: int) -> int:
        affordable = max(self._granted, self._cost.fitting(start, self._cost_left))
        return min(self.left, self.max_chunk_len, affordable)
