"""What a drafter asks of the network that it drafts with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class DraftModel(Protocol):
    """A network over tokens of rows, which remembers what it has seen of each row (its KV).

    A pass writes positions [starts, starts + lens) of each row, and reads those before it; what an earlier pass wrote
    behind them is stale. Rows are whatever numbers the caller's views have; a row with a new owner starts anew.
    """

    @property
    def vocab_size(self) -> int:
        """Ids that it can choose from."""

    def forward(
        self,
        rows: Sequence[int],
        starts: Sequence[int],
        lens: Sequence[int],
        ids: torch.Tensor,  # [n] int32, row after row
        hidden: torch.Tensor | None = None,  # [n, w]
    ) -> torch.Tensor:
        """[n, h] behind the tokens. hidden: the target's states at these positions, or for drafts what an earlier pass
        returned; None for a network that reads ids alone."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:  # [m, h] -> [m, vocab_size]
        """Of some rows of what forward() returned."""

    def target_ids(self, ids: torch.Tensor) -> torch.Tensor:  # [m] -> [m]
        """What ids of its vocabulary are in the target's."""
