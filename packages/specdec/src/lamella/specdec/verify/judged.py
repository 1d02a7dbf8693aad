"""Drawn drafts beside the probabilities that judge them: what every sampled verification reads.

    row r's logits rows    start             start + 1          ...  start + k        k + 1 logits rows judge k drafts
    target                 p_0               p_1                     p_k              p_i: behind the first i drafts
    draft                  q_0               q_1                     –                q_i: what draft i was drawn from
    drafts                 d_0               d_1                     –

Probabilities need not sum to 1 exactly: each row is divided by its own sum in float64, so a row in bfloat16 stands for
the law that a sampler makes of it. NaN, infinities and negative numbers count as 0. Only one [num_rows, vocab] slice
in float64 exists at a time, whatever the number of drafts. Nothing is read back to the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from lamella.specdec.batch import NO_DRAFT, Verdict
from lamella.specdec.errors import InputError

LARGEST_BELOW_ONE = 1.0 - 2.0**-53


class Judged:
    """Rows of drafts, the target's law at each of their positions and the law each draft was drawn from."""

    def __init__(
        self,
        probs: torch.Tensor,  # [num_logits, vocab]
        drafts: torch.Tensor,  # [num_rows, width] NO_DRAFT where there is none
        logits_start: torch.Tensor,  # [num_rows + 1]
        draft_probs: torch.Tensor | None,  # [num_rows, width, draft_vocab]
    ) -> None:
        """Raises InputError naming the argument whose shape or dtype does not fit the others."""
        check_chain(probs, drafts, logits_start, draft_probs)
        self.num_rows, self.width = drafts.shape
        self.vocab = probs.shape[1]
        self.drafts = drafts.long()
        self.start = logits_start[:-1].long()  # [num_rows]
        self.num_logits = logits_start[1:].long() - self.start  # [num_rows]
        self.ids = torch.arange(self.vocab, device=probs.device)  # [vocab]
        self.one_hot = draft_probs is None
        self._probs = probs
        self._draft_probs = draft_probs

    def num_drafts(self) -> torch.Tensor:  # [num_rows]
        """Drafts up to the first NO_DRAFT, as far as there are logits rows behind them."""
        offsets = torch.arange(self.width, device=self.drafts.device)
        present = (self.drafts >= 0) & (offsets < (self.num_logits - 1)[:, None])
        return present.long().cumprod(dim=1).sum(dim=1)

    def target(self, position: torch.Tensor | int) -> torch.Tensor:  # [num_rows, vocab] float64
        """p at a position of each row, summing to 1. Rows without such a position get another row's law."""
        last = self._probs.shape[0] - 1
        return normalised(self._probs[(self.start + position).clamp(min=0, max=last)])

    def draft(self, position: torch.Tensor | int) -> torch.Tensor:  # [num_rows, vocab] float64
        """q at a position [num_rows] (or one for all) below width, on the target's ids.

        Without draft_probs it is all on the draft. Where the vocabularies differ, ids that the target lacks are cut
        off behind the division (their mass is the draft's, not the target's), ids that the draft lacks have 0.
        """
        rows = torch.arange(self.num_rows, device=self.drafts.device)
        if self._draft_probs is None:
            return (self.ids == self.drafts[rows, position][:, None]).double()
        q = normalised(self._draft_probs[rows, position])
        return F.pad(q, (0, self.vocab - q.shape[1]))

    def at(self, law: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:  # [num_rows] float64
        """The law [num_rows, vocab] at one id of each row; 0 for NO_DRAFT and for ids beyond the vocabulary."""
        known = (ids >= 0) & (ids < self.vocab)
        value = law.gather(1, ids.clamp(min=0, max=self.vocab - 1)[:, None])[:, 0]
        return torch.where(known, value, 0.0)

    def close_chain(
        self,
        num_accepted: torch.Tensor,  # [num_rows]
        num_drafts: torch.Tensor,  # [num_rows]
        kept_weight: torch.Tensor,  # [num_rows] of the target's law, where a draft was refused
        next_uniforms: torch.Tensor,  # [num_rows, width + 1]
    ) -> Verdict[torch.Tensor]:
        """Draw the id behind the accepted drafts: of what the refused one's law leaves, or else of the target's."""
        weights = self.target(num_accepted)
        if self.width:
            refused = (num_accepted < num_drafts)[:, None]
            q_row = self.draft(num_accepted.clamp(max=self.width - 1))
            weights = torch.where(refused, residual_or(weights, kept_weight, q_row), weights)
        return self.verdict(
            num_accepted, draw(weights, below_one(next_uniforms).gather(1, num_accepted[:, None])[:, 0])
        )

    def verdict(self, num_accepted: torch.Tensor, next_ids: torch.Tensor) -> Verdict[torch.Tensor]:
        """The two [num_rows] as int32; rows without logits say 0 and NO_DRAFT."""
        sampled = self.num_logits > 0
        return Verdict(
            torch.where(sampled, num_accepted, 0).int(),
            torch.where(sampled, next_ids, NO_DRAFT).int(),
        )

    def no_verdict(self) -> Verdict[torch.Tensor]:
        """That of a batch without any logits row."""
        none = torch.zeros(self.num_rows, dtype=torch.int32, device=self.drafts.device)
        return Verdict(none, torch.full_like(none, NO_DRAFT))


def normalised(probs: torch.Tensor) -> torch.Tensor:  # [..., vocab] -> [..., vocab] float64
    """Each row over its sum; all 0 where there is no mass. What is no probability counts as 0."""
    law = torch.nan_to_num(probs.double(), nan=0.0, posinf=0.0, neginf=0.0).clamp(min=0.0)
    total = law.sum(dim=-1, keepdim=True)
    return law / torch.where(total > 0, total, 1.0)


def residual_or(law: torch.Tensor, scale: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    """max(scale · law - draft, 0) per row [num_rows, vocab], not normalised; the law where nothing remains.

    Nothing remains, although a draft was refused, only where law and draft are equal up to rounding: then the law
    itself is what rounding hid.
    """
    rest = (scale[:, None] * law - draft).clamp(min=0.0)
    return torch.where(rest.sum(dim=1, keepdim=True) > 0, rest, law)


def draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:  # [num_rows, vocab], [num_rows] -> [num_rows]
    """The id at which the running sum of weights first exceeds u · total: inverse CDF, weights need not sum to 1.

    Never an id of weight 0, whatever u is: a parallel running sum in floating point may rise or fall there. A row
    without any weight gives 0.
    """
    ids = torch.arange(weights.shape[1], device=weights.device)
    running = weights.cumsum(dim=1)
    positive = weights > 0
    beyond = positive & (running > uniforms[:, None] * running[:, -1:])
    last = torch.where(positive, ids, 0).amax(dim=1)
    return torch.where(beyond, ids, weights.shape[1]).amin(dim=1).minimum(last)


def below_one(uniforms: torch.Tensor) -> torch.Tensor:
    """Uniforms as float64 in [0, 1): a float32 may have been rounded up to 1, at which p = q would be refused."""
    return uniforms.double().clamp(min=0.0, max=LARGEST_BELOW_ONE)


def check_uniforms(name: str, uniforms: torch.Tensor, shape: Sequence[int]) -> None:
    """Raises InputError unless it is floating point of that shape."""
    if list(uniforms.shape) != list(shape) or not uniforms.is_floating_point():
        raise InputError(f"{name}: expected floating point {list(shape)}, got {uniforms.dtype} {list(uniforms.shape)}")


def check_chain(
    probs: torch.Tensor, drafts: torch.Tensor, logits_start: torch.Tensor, draft_probs: torch.Tensor | None
) -> None:
    """Raises InputError naming the argument whose shape or dtype does not fit the others."""
    if probs.dim() != 2 or not probs.is_floating_point() or probs.shape[1] == 0:
        raise InputError(
            f"probs: expected floating point [num_logits, vocab] with vocab > 0, got {probs.dtype} {list(probs.shape)}"
        )
    if drafts.dim() != 2 or not _integer(drafts):
        raise InputError(f"drafts: expected integers [num_rows, width], got {drafts.dtype} {list(drafts.shape)}")
    num_rows, width = drafts.shape
    if list(logits_start.shape) != [num_rows + 1] or not _integer(logits_start):
        raise InputError(
            f"logits_start: expected integers [{num_rows + 1}] (one more than rows of drafts), "
            f"got {logits_start.dtype} {list(logits_start.shape)}"
        )
    if draft_probs is not None and (
        draft_probs.dim() != 3
        or list(draft_probs.shape[:2]) != [num_rows, width]
        or not draft_probs.is_floating_point()
    ):
        raise InputError(
            f"draft_probs: expected floating point [{num_rows}, {width}, vocab] or None, "
            f"got {draft_probs.dtype} {list(draft_probs.shape)}"
        )


def _integer(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
