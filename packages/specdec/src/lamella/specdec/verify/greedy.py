"""Verification at temperature 0: a draft stands if it is the target's best id at its position."""

from __future__ import annotations

import torch

from lamella.specdec.batch import Verdict
from lamella.specdec.verify.one_hot import verify_one_hot


def verify_greedy(
    logits: torch.Tensor,  # [num_logits, vocab]
    drafts: torch.Tensor,  # [num_rows, width] NO_DRAFT where there is none
    logits_start: torch.Tensor,  # [num_rows + 1]
) -> Verdict[torch.Tensor]:  # [num_rows] int32 each
    """verify_one_hot against the best id of each logits row: the lowest id wins a tie, NaN counts as -inf."""
    best = torch.nan_to_num(logits, nan=float("-inf"), posinf=float("inf"), neginf=float("-inf")).argmax(dim=-1)
    return verify_one_hot(best, drafts, logits_start)
