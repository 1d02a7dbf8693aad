"""A drafter that always proposes as many ids as it may, without looking for good ones: to measure what drafts cost.

With `synthetic` acceptance it stands for a drafter of given rates; with the standard rule it shows speculation at its
worst.
"""

from __future__ import annotations

from lamella.specdec.config import ArbitraryConfig
from lamella.specdec.drafters.index_drafter import IndexDrafter, ReferenceIndex, ReferenceRow


class ArbitraryDrafter(IndexDrafter):
    """Proposes the row's latest ids, the last one first, again and again: they are in every vocabulary."""

    def __init__(self, config: ArbitraryConfig) -> None:
        super().__init__(config, _LatestIds(config.num_speculative_tokens))
        self.config = config


class _LatestIds(ReferenceIndex[ReferenceRow]):
    """Nothing but the rows."""

    def __init__(self, max_drafts: int) -> None:
        super().__init__()
        self._max_drafts = max_drafts

    def _new_row(self, generation: int) -> ReferenceRow:
        return ReferenceRow(generation)

    def _append(self, row: ReferenceRow, token_id: int) -> None:
        row.ids.append(token_id)

    def _propose(self, row: ReferenceRow, max_len: int) -> list[int]:
        latest = row.ids[-self._max_drafts :][::-1]
        return [latest[i % len(latest)] for i in range(max_len)] if latest else []
