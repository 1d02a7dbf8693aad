"""The same number of drafts for every row, cut where a sequence has no room for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FixedLength:
    """num_drafts for each row that can use them."""

    num_drafts: int

    def choose(self, rooms: Sequence[int]) -> list[int]:
        """Drafts per row. rooms: how many more tokens each row may gain (to max_tokens, to the context's end), the
        next token included: a row with room 1 ends with its next token and needs no draft."""
        return [max(0, min(self.num_drafts, room - 1)) for room in rooms]
