"""Verification of chosen drafts by a lossy rule: keeps what `verify_one_hot` keeps, and what the rule lets through.

With p_i the target's law behind the first i drafts, x_i what the caller sampled from it, u_i a uniform:

    draft d_i stands       if x_i = d_i, or the rule admits it by p_i and u_i
    at the first refusal   next id x_i, which is then a sample of p_i without d_i
    all k accepted         next id x_k

    typical     admits p_i(d_i) > min(threshold, alpha · exp(-H(p_i)))
    relaxed     admits d_i among the topk largest of p_i, ln max p_i - ln p_i(d_i) <= delta
    threshold   admits p_i(d_i) >= single, or u_i < (min(1, p_i(d_i) / acc) - p_i(d_i)) / (1 - p_i(d_i)):
                together with x_i = d_i that is a probability of min(1, p_i(d_i) / acc)

So a position's token is d_i where the rule admits it and a sample of the target elsewhere: not the target's law, but
never an id that the target excludes. What a rule does is enumerated in the tests.
"""

from __future__ import annotations

import torch

from lamella.specdec.batch import Verdict
from lamella.specdec.errors import InputError
from lamella.specdec.rules import LossyRule, Relaxed, Threshold, Typical
from lamella.specdec.verify.judged import Judged, below_one, check_uniforms


def verify_lossy(
    rule: LossyRule,
    target_ids: torch.Tensor,  # [num_logits] id that the target chose at each logits row
    probs: torch.Tensor,  # [num_logits, vocab] what it was sampled from, behind all sampling transforms
    drafts: torch.Tensor,  # [num_rows, width] NO_DRAFT where there is none
    logits_start: torch.Tensor,  # [num_rows + 1]
    accept_uniforms: torch.Tensor | None = None,  # [num_rows, width] in [0, 1); only a Threshold needs them
) -> Verdict[torch.Tensor]:  # [num_rows] int32 each
    """Accept the drafts of each row that stand by the rule, up to the first that does not.

    Rows of logits as in verify_one_hot. The uniforms must be independent of the noise behind target_ids. Reads nothing
    back to the host. Raises InputError naming the argument that does not fit.
    """
    judged = Judged(probs, drafts, logits_start, None)
    if list(target_ids.shape) != [probs.shape[0]]:
        raise InputError(f"target_ids: expected [{probs.shape[0]}] as probs has rows, got {list(target_ids.shape)}")
    if isinstance(rule, Threshold):
        if accept_uniforms is None:
            raise InputError("accept_uniforms: thresholds need them")
        check_uniforms("accept_uniforms", accept_uniforms, (judged.num_rows, judged.width))
        uniforms = below_one(accept_uniforms)
    else:
        uniforms = torch.ones(drafts.shape, dtype=torch.float64, device=probs.device)  # no coin is won by them
    if probs.shape[0] == 0:
        return judged.no_verdict()
    last = probs.shape[0] - 1
    num_drafts = judged.num_drafts()
    num_accepted = torch.zeros_like(judged.start)
    for i in range(judged.width):
        ids = judged.drafts[:, i]
        law = judged.target(i)
        stands = target_ids[(judged.start + i).clamp(max=last)] == ids
        stands = stands | admits(rule, law, judged.at(law, ids), uniforms[:, i])
        num_accepted = num_accepted + (stands & (num_drafts > i) & (num_accepted == i))
    return judged.verdict(num_accepted, target_ids[(judged.start + num_accepted).clamp(max=last)])


def admits(
    rule: LossyRule,
    law: torch.Tensor,  # [num_rows, vocab] float64, summing to 1
    p: torch.Tensor,  # [num_rows] float64 of the draft
    uniforms: torch.Tensor,  # [num_rows] float64
) -> torch.Tensor:  # [num_rows] bool
    """Whether the rule lets a draft stand that the target did not sample."""
    if isinstance(rule, Typical):
        entropy = torch.special.entr(law).sum(dim=1)
        return p > (rule.posterior_alpha * torch.exp(-entropy)).clamp(max=rule.posterior_threshold)
    if isinstance(rule, Relaxed):
        best = law.topk(min(rule.relaxed_topk, law.shape[1]), dim=1).values  # largest first; ties at the end all count
        near = p.log() >= best[:, 0].log() - rule.relaxed_delta
        return (p > 0) & near & (p >= best[:, -1])
    wanted = (p / rule.accept_threshold_acc).clamp(max=1.0)
    rest = 1.0 - p
    coin = torch.where(rest > 0, (wanted - p) / torch.where(rest > 0, rest, 1.0), 1.0)
    return (p > 0) & ((p >= rule.accept_threshold_single) | (uniforms < coin))
