"""Acceptance by given rates, whatever the target says: for measuring what drafts would be worth. The output is garbage.

    rates       r_1 >= r_2 >= … >= r_k      probability that the first i drafts of a row all stand
    draft i     stands behind accepted ones with probability r_i / r_(i - 1), 0 where r_(i - 1) is

The names are vLLM's: `synthetic_acceptance_rates`, or a `synthetic_acceptance_length` L of 1 to k + 1 tokens a step,
which stands for rates of 1 for the first drafts, then the fraction, then 0: they sum to L - 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lamella.specdec.batch import NO_DRAFT, Verdict
from lamella.specdec.rules import conditional_rates, rates_of_length
from lamella.specdec.verify.judged import below_one, check_uniforms

__all__ = ["SyntheticAcceptance", "rates_of_length"]


class SyntheticAcceptance:
    """Made once for its rates; judges every step."""

    def __init__(self, rates: Sequence[float], device: torch.device | str = "cpu") -> None:
        """Raises ConfigError naming the rate that is no probability or above the one before it."""
        self._conditional = torch.tensor(conditional_rates(rates), dtype=torch.float64, device=device)  # [num_drafts]

    def verify(
        self,
        target_ids: torch.Tensor,  # [num_logits] id that the target chose at each logits row
        drafts: torch.Tensor,  # [num_rows, width] NO_DRAFT where there is none
        logits_start: torch.Tensor,  # [num_rows + 1]
        accept_uniforms: torch.Tensor,  # [num_rows, width] in [0, 1)
    ) -> Verdict[torch.Tensor]:  # [num_rows] int32 each
        """Accept drafts by the rates; the next id is what the target chose behind them, as in verify_one_hot.

        Drafts beyond the rates never stand. Reads nothing back to the host. Raises InputError if the uniforms do not
        fit.
        """
        num_rows, width = drafts.shape
        check_uniforms("accept_uniforms", accept_uniforms, (num_rows, width))
        if target_ids.shape[0] == 0:
            none = torch.zeros(num_rows, dtype=torch.int32, device=drafts.device)
            return Verdict(none, torch.full_like(none, NO_DRAFT))
        known = self._conditional[:width]
        conditional = torch.cat([known, known.new_zeros(width - len(known))])
        start = logits_start[:-1].long()  # [num_rows]
        num_logits = logits_start[1:].long() - start
        judged = torch.arange(width, device=drafts.device) < (num_logits - 1)[:, None]
        stands = judged & (drafts != NO_DRAFT) & (below_one(accept_uniforms) < conditional)
        num_accepted = stands.int().cumprod(dim=1).sum(dim=1)
        next_ids = target_ids[(start + num_accepted).clamp(max=target_ids.shape[0] - 1)]
        return Verdict(num_accepted.int(), torch.where(num_logits > 0, next_ids.int(), NO_DRAFT))
