"""Verification of drafts that were chosen, not drawn (n-gram, suffix, greedy draft models).

The caller samples every logits row as if there were no drafts; a draft stands if it equals the sample at its position.
That keeps the target's distribution: the accepted prefix is a prefix of samples, and the sample at the first mismatch
was drawn from the target behind exactly the tokens that were kept. Where the caller's noise depends on seed and
position alone, the output is id for id the one without drafts.
"""

from __future__ import annotations

import torch

from lamella.specdec.batch import NO_DRAFT, Verdict


def verify_one_hot(
    target_ids: torch.Tensor,  # [num_logits] id that the target chose at each logits row
    drafts: torch.Tensor,  # [num_rows, width] NO_DRAFT where there is none
    logits_start: torch.Tensor,  # [num_rows + 1]
) -> Verdict[torch.Tensor]:  # [num_rows] int32 each
    """Accept the drafts of each row that equal the target's choice, up to the first that does not.

    Row i's logits rows are [logits_start[i], logits_start[i + 1]): the first belongs to the last known token, so k
    logits rows judge k - 1 drafts, and further ones are not looked at. Reads nothing back to the host.
    """
    num_rows, width = drafts.shape
    if target_ids.shape[0] == 0:
        none = torch.zeros(num_rows, dtype=torch.int32, device=drafts.device)
        return Verdict(none, torch.full_like(none, NO_DRAFT))
    start = logits_start[:-1].long()  # [num_rows]
    num_logits = logits_start[1:].long() - start
    last = target_ids.shape[0] - 1
    offsets = torch.arange(width, device=drafts.device)  # [width]
    chosen = target_ids[(start[:, None] + offsets).clamp(max=last)]  # [num_rows, width]
    judged = offsets < (num_logits - 1)[:, None]
    stands = (judged & (chosen == drafts) & (drafts != NO_DRAFT)).int().cumprod(dim=1)
    num_accepted = stands.sum(dim=1)
    next_ids = target_ids[(start + num_accepted).clamp(max=last)]
    next_ids = torch.where(num_logits > 0, next_ids.int(), NO_DRAFT)
    return Verdict(num_accepted.int(), next_ids.int())
