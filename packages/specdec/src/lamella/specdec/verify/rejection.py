"""Verification of drafts that were drawn: speculative rejection sampling, one draft after the other.

The rule of Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023), and Chen et al.,
"Accelerating Large Language Model Decoding with Speculative Sampling" (2023). With p_i the target's law at position i
and q_i the one that draft d_i was drawn from:

    accept d_i             if u_i · q_i(d_i) < p_i(d_i)                    that is with probability min(1, p_i / q_i)
    at the first refusal   next id from max(p_i - q_i, 0) over its sum
    all k accepted         next id from p_k

The joint law of the new tokens is the target's, for every q. A position's draft is accepted with probability
Σ_x min(p_i(x), q_i(x)) behind accepted ones.
"""

from __future__ import annotations

import torch

from lamella.specdec.batch import Verdict
from lamella.specdec.verify.judged import Judged, below_one, check_uniforms


def verify_rejection(
    probs: torch.Tensor,  # [num_logits, vocab] the target's, behind all sampling transforms
    drafts: torch.Tensor,  # [num_rows, width] NO_DRAFT where there is none
    logits_start: torch.Tensor,  # [num_rows + 1]
    draft_probs: torch.Tensor | None,  # [num_rows, width, draft_vocab]; None: the drafts were chosen, not drawn
    accept_uniforms: torch.Tensor,  # [num_rows, width] in [0, 1)
    next_uniforms: torch.Tensor,  # [num_rows, width + 1] in [0, 1)
) -> Verdict[torch.Tensor]:  # [num_rows] int32 each
    """Accept the drafts of each row one by one, up to the first that is refused, and draw the id behind them.

    Row i's logits rows are [logits_start[i], logits_start[i + 1]), as in verify_one_hot: k of them judge k - 1 drafts.
    NO_DRAFT ends a row like the end of its logits rows does: the next id comes from the target's plain law there. How
    many drafts a row has must not depend on the ids of its later ones, else the law is bent.

    accept_uniforms[:, i] decides on draft i; next_uniforms[:, n] draws the next id behind n accepted drafts. All of
    them must be independent of one another and of the noise that drew the drafts. Each is used for one position at
    most and none beyond the next id, so both may be functions of seed and position (with different salts): then the
    outcome does not depend on the batch. It does depend on which positions had drafts; only chosen drafts, compared
    with samples (verify_one_hot), leave every id as it is.

    A draft to which q gives nothing was not drawn from q: it is refused. Temperature 0 is a target law with all its
    mass on one id. Reads nothing back to the host. Raises InputError naming the argument that does not fit.
    """
    judged = Judged(probs, drafts, logits_start, draft_probs)
    check_uniforms("accept_uniforms", accept_uniforms, (judged.num_rows, judged.width))
    check_uniforms("next_uniforms", next_uniforms, (judged.num_rows, judged.width + 1))
    if probs.shape[0] == 0:
        return judged.no_verdict()
    accept, num_drafts = below_one(accept_uniforms), judged.num_drafts()
    num_accepted = torch.zeros_like(judged.start)
    for i in range(judged.width):
        ids = judged.drafts[:, i]
        p, q = judged.at(judged.target(i), ids), judged.at(judged.draft(i), ids)
        # strict, so that u = 0 does not accept what the target never says
        stands = (q > 0) & (accept[:, i] * q < p) & (num_drafts > i)
        num_accepted = num_accepted + (stands & (num_accepted == i))
    whole = torch.ones(judged.num_rows, dtype=torch.float64, device=probs.device)
    return judged.close_chain(num_accepted, num_drafts, whole, next_uniforms)
