"""Verification of drawn drafts as one block: keeps at least as many of them as one by one, at the same law.

The rule of Sun et al., "Block Verification Accelerates Speculative Decoding" (2024). With p_i, q_i as in `rejection`
and k drafts in a row:

    w_0 = 1        w_i = min(1, w_{i-1} · p_{i-1}(d_{i-1}) / q_{i-1}(d_{i-1}))        weight of the first i drafts
    S_i = Σ_x max(w_i · p_i(x) - q_i(x), 0)
    h_i = S_i / (S_i + 1 - w_i)  for i < k,        h_k = w_k
    keep the largest n with u_n < h_n, or 0        every n is looked at: one refusal does not end the block
    n < k          next id from max(w_n · p_n - q_n, 0) over its sum
    n = k          next id from p_k

A draft that looks bad alone is kept if those behind it make up for it; in expectation no rule of this kind keeps more.
"""

from __future__ import annotations

import torch

from lamella.specdec.batch import Verdict
from lamella.specdec.verify.judged import Judged, below_one, check_uniforms


def verify_block(
    probs: torch.Tensor,  # [num_logits, vocab] the target's, behind all sampling transforms
    drafts: torch.Tensor,  # [num_rows, width] NO_DRAFT where there is none
    logits_start: torch.Tensor,  # [num_rows + 1]
    draft_probs: torch.Tensor | None,  # [num_rows, width, draft_vocab]; None: the drafts were chosen, not drawn
    accept_uniforms: torch.Tensor,  # [num_rows, width] in [0, 1)
    next_uniforms: torch.Tensor,  # [num_rows, width + 1] in [0, 1)
) -> Verdict[torch.Tensor]:  # [num_rows] int32 each
    """verify_rejection by the block's rule; arguments, NO_DRAFT and refusals of impossible drafts as there.

    accept_uniforms[:, i] decides whether the block may end behind draft i.

    Unlike there, what lies behind the kept drafts has had its say: the uniforms and the ids of later positions. The
    next step must judge and draft those positions with fresh noise. Uniforms or draft noise that are functions of seed
    and position alone would be used twice, and bend the law.
    """
    judged = Judged(probs, drafts, logits_start, draft_probs)
    check_uniforms("accept_uniforms", accept_uniforms, (judged.num_rows, judged.width))
    check_uniforms("next_uniforms", next_uniforms, (judged.num_rows, judged.width + 1))
    if probs.shape[0] == 0:
        return judged.no_verdict()
    accept, num_drafts = below_one(accept_uniforms), judged.num_drafts()
    num_accepted = torch.zeros_like(judged.start)
    weight = torch.ones(judged.num_rows, dtype=torch.float64, device=probs.device)  # w_i
    kept_weight = weight  # w of the drafts that are kept
    for i in range(judged.width):
        ids = judged.drafts[:, i]
        p, q = judged.at(judged.target(i), ids), judged.at(judged.draft(i), ids)
        weight = torch.where(q > 0, (weight * p / torch.where(q > 0, q, 1.0)).clamp(max=1.0), 0.0)
        threshold = weight  # h_k, behind the row's last draft
        if i + 1 < judged.width:
            excess = (weight[:, None] * judged.target(i + 1) - judged.draft(i + 1)).clamp(min=0.0).sum(dim=1)
            whole = excess + 1.0 - weight
            # 0 / 0: w_i p_i and q_i are equal, so whatever is decided here, the next position keeps more
            inner = torch.where(whole > 0, excess / torch.where(whole > 0, whole, 1.0), 1.0)
            threshold = torch.where(num_drafts > i + 1, inner, weight)
        keeps = (accept[:, i] < threshold) & (num_drafts > i)
        num_accepted = torch.where(keeps, i + 1, num_accepted)
        kept_weight = torch.where(keeps, weight, kept_weight)
    return judged.close_chain(num_accepted, num_drafts, kept_weight, next_uniforms)
