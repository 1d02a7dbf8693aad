"""Verification of chosen drafts in one kernel: what `verify.one_hot` and `verify.synthetic` take a dozen for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from lamella.specdec.batch import Verdict
from lamella.specdec.rules import conditional_rates
from lamella.specdec.verify.judged import check_uniforms


@triton.jit(do_not_specialize=["width", "drafts_stride", "num_rates"])
def _compare(
    target_ids,  # [num_logits]
    drafts,  # [num_rows, width]
    logits_start,  # [num_rows + 1]
    uniforms,  # [num_rows, width], or anything
    rates,  # [num_rates] float64, or anything
    num_accepted,  # [num_rows] int32
    next_ids,  # [num_rows] int32
    width,
    drafts_stride,
    num_rates,
    BY_RATES: tl.constexpr,
    WIDTH: tl.constexpr,  # power of 2, not below width
):
    row = tl.program_id(0)
    start = tl.load(logits_start + row).to(tl.int64)
    num_logits = tl.load(logits_start + row + 1).to(tl.int64) - start
    places = tl.arange(0, WIDTH)
    judged = (places < width) & (places < num_logits - 1)
    draft = tl.load(drafts + row.to(tl.int64) * drafts_stride + places, mask=judged, other=-1).to(tl.int64)
    if BY_RATES:
        rate = tl.load(rates + places, mask=judged & (places < num_rates), other=0.0)
        drawn = tl.load(uniforms + row.to(tl.int64) * width + places, mask=judged, other=1.0).to(tl.float64)
        # a float32 may have been rounded up to 1; 1 - 2**-53 is the largest float64 below
        stands = judged & (draft != -1) & (tl.minimum(drawn, 0.99999999999999988898) < rate)
    else:
        chosen = tl.load(target_ids + start + places, mask=judged, other=-1).to(tl.int64)
        stands = judged & (draft != -1) & (chosen == draft)
    accepted = tl.min(tl.where(stands, WIDTH, places), axis=0)
    following = tl.load(target_ids + start + accepted, mask=num_logits > 0, other=-1)
    tl.store(num_accepted + row, accepted)
    tl.store(next_ids + row, following.to(tl.int32))


def verify_one_hot(
    target_ids: torch.Tensor,  # [num_logits] id that the target chose at each logits row
    drafts: torch.Tensor,  # [num_rows, width] NO_DRAFT where there is none
    logits_start: torch.Tensor,  # [num_rows + 1]
) -> Verdict[torch.Tensor]:  # [num_rows] int32 each
    """`verify.one_hot.verify_one_hot` in one launch."""
    return _launch(target_ids, drafts, logits_start, None, None)


class SyntheticAcceptance:
    """`verify.synthetic.SyntheticAcceptance` in one launch a step."""

    def __init__(self, rates: Sequence[float], device: torch.device | str) -> None:
        """Raises ConfigError naming the rate that is no probability or above the one before it."""
        self._conditional = torch.tensor(conditional_rates(rates), dtype=torch.float64, device=device)

    def verify(
        self,
        target_ids: torch.Tensor,  # [num_logits]
        drafts: torch.Tensor,  # [num_rows, width]
        logits_start: torch.Tensor,  # [num_rows + 1]
        accept_uniforms: torch.Tensor,  # [num_rows, width] in [0, 1)
    ) -> Verdict[torch.Tensor]:  # [num_rows] int32 each
        """Accept drafts by the rates. Raises InputError if the uniforms do not fit."""
        check_uniforms("accept_uniforms", accept_uniforms, tuple(drafts.shape))
        return _launch(target_ids, drafts, logits_start, accept_uniforms.contiguous(), self._conditional)


def _launch(
    target_ids: torch.Tensor,
    drafts: torch.Tensor,
    logits_start: torch.Tensor,
    uniforms: torch.Tensor | None,
    rates: torch.Tensor | None,
) -> Verdict[torch.Tensor]:
    num_rows, width = drafts.shape
    # one allocation for both, each at 16 bytes: for others the kernel is compiled again
    results = torch.empty(2, -(-num_rows // 4) * 4, dtype=torch.int32, device=drafts.device)[:, :num_rows]
    if drafts.stride(1) != 1 and width > 1:
        drafts = drafts.contiguous()
    if num_rows:
        kernel: Any = _compare
        kernel[(num_rows,)](
            target_ids.contiguous(),
            drafts,
            logits_start.contiguous(),
            target_ids if uniforms is None else uniforms,
            target_ids if rates is None else rates,
            results[0],
            results[1],
            width,
            drafts.stride(0),
            0 if rates is None else len(rates),
            BY_RATES=rates is not None,
            WIDTH=triton.next_power_of_2(max(width, 1)),
            num_warps=1,
            enable_fp_fusion=False,
        )
    return Verdict(results[0], results[1])
