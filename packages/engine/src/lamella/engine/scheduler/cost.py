"""What the tokens of a step cost: the further back a token looks, the longer it takes.

The unit is the time of a token that has nothing before it. A token at position p reads the keys of p others:

    cost(p) = 1 + p * slope

               ┌ slope                     a chunk [start, end) costs the area below
    1 ─────────┴──────────────▶ p

A step may cost as much as the longest chunk of an empty context, [0, max_num_batched_tokens). So a step of a long
context has fewer tokens, and takes no longer. Pure arithmetic; the slope is measured at start (config/resolve.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class TokenCost:
    """The cost model. slope 0: a token costs 1 wherever it stands."""

    slope: float = 0.0
    least_tokens: int = 64
    """Prompt tokens that a step may compute whatever they cost: below, a step's fixed work would weigh more, and rows
    with long contexts would keep prompts out."""

    def of(self, start: int, num_tokens: int) -> float:
        """Cost of the chunk [start, start + num_tokens)."""
        return num_tokens + self.slope * (num_tokens * start + num_tokens * (num_tokens - 1) / 2)

    def fitting(self, start: int, cost: float) -> int:
        """Longest chunk from start on for so much; the last token may go over, so that any cost above 0 buys one."""
        if cost <= 0.0:
            return 0
        linear = 1.0 + self.slope * (start - 0.5)
        # the positive root of  slope / 2 * n^2 + linear * n = cost
        root = 2.0 * cost / (linear + math.sqrt(linear * linear + 2.0 * self.slope * cost))
        return math.ceil(root * (1.0 - 1e-9))  # rounding must not make a whole number the next one


FLAT: Final = TokenCost()
"""The context costs nothing: steps are bound by their number of tokens alone."""
