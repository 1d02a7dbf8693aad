"""Verification of drawn drafts in a few kernels: what `verify.rejection` and `verify.block` take some fifty for.

    masses      [rows of p and q, blocks]    sums of what each row gives to each block of the vocabulary
    weigh       [rows]                       drafts present; by rejection also which stand; by the block's rule w_i
    excess      [rows, width, blocks]        only the block's rule: max(w_i · p_i - q_i, 0) summed by blocks
    decide      [rows]                       only the block's rule: which stand
    residual    [rows, blocks]               what is left for the next id, summed by blocks
    pick        [rows]                       the block where the running sum passes u · total, then the id in it

Every sum is in float64, in an order that depends on the row alone, so a verdict does not depend on the batch. A row
takes as many programs as its vocabulary has blocks: one row fills a GPU as well as many do. Kernels are compiled once a
vocabulary: neither the number of rows nor that of drafts makes another one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from lamella.specdec.batch import Verdict
from lamella.specdec.verify.judged import check_chain, check_uniforms

BLOCK = 2048
"""Ids of a block."""
UNFUSED = {"enable_fp_fusion": False}
"""Products are rounded before they are added to, as the references round them."""


@triton.jit
def _probability(x):
    """What is no probability counts as 0."""
    x = x.to(tl.float64)
    return tl.where((x > 0.0) & (x < float("inf")), x, 0.0)


@triton.jit
def _total(masses, row, num_blocks, limit, BLOCKS: tl.constexpr):
    """Mass of a row of p or q in the blocks below limit; 1 where it has none, so that it can be divided by."""
    blocks = tl.arange(0, BLOCKS)
    total = tl.sum(tl.load(masses + row * num_blocks + blocks, mask=blocks < limit, other=0.0), axis=0)
    return tl.where(total > 0.0, total, 1.0)


@triton.jit
def _law(laws, row, stride, ids, limit):
    """A row of p or q at some ids, not divided yet; 0 from limit on."""
    return _probability(tl.load(laws + row * stride + ids, mask=ids < limit, other=0.0))


@triton.jit(do_not_specialize=["num_logits"])
def _mass_kernel(
    probs,  # [num_logits, vocab]
    draft_probs,  # [num_rows * width, draft_vocab]
    drafts,  # [num_rows * width]
    masses,  # [num_logits + num_rows * width, blocks] float64
    num_logits,
    vocab,
    draft_vocab,
    probs_stride,
    draft_stride,
    num_blocks,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    if row < num_logits:
        mass = tl.sum(_law(probs, row, probs_stride, ids, vocab), axis=0)
        tl.store(masses + row * num_blocks + block, mass)
    else:
        place = row - num_logits
        limit = tl.where(tl.load(drafts + place) >= 0, draft_vocab, 0)
        mass = tl.sum(_law(draft_probs, place, draft_stride, ids, limit), axis=0)
        tl.store(masses + row * num_blocks + block, mass)


@triton.jit(do_not_specialize=["num_logits_rows", "width"])
def _weigh_kernel(
    probs,
    draft_probs,
    drafts,  # [num_rows, width]
    logits_start,
    accept_uniforms,  # [num_rows, width]
    masses,
    num_drafts,  # [num_rows] int32
    num_accepted,  # [num_rows] int32: written by rejection
    weights,  # [num_rows, width] float64: written by the block's rule
    kept_weight,  # [num_rows] float64: written by rejection
    num_logits_rows,
    width,
    vocab,
    draft_vocab,
    probs_stride,
    draft_stride,
    num_blocks,
    ONE_HOT: tl.constexpr,
    BY_BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(logits_start + row).to(tl.int64)
    num_logits = tl.load(logits_start + row + 1).to(tl.int64) - start
    count = tl.zeros((), tl.int32)
    accepted = tl.zeros((), tl.int32)
    one = tl.full((), 1.0, tl.float64)
    weight = one
    for i in range(width):
        place = row * width + i
        draft = tl.load(drafts + place).to(tl.int64)
        present = (count == i) & (draft >= 0) & (i < num_logits - 1)
        known = present & (draft < vocab)
        column = tl.maximum(draft, 0)
        limit = tl.where(present, num_blocks, 0)
        p = _law(probs, start + i, probs_stride, column, tl.where(known, vocab, 0))
        p = p / _total(masses, start + i, num_blocks, limit, BLOCKS)
        if ONE_HOT:
            q = tl.where(known, one, 0.0)
        else:
            q = _law(draft_probs, place, draft_stride, column, tl.where(known, draft_vocab, 0))
            q = q / _total(masses, num_logits_rows + place, num_blocks, limit, BLOCKS)
        if BY_BLOCK:
            ratio = weight * p / tl.where(q > 0.0, q, 1.0)
            weight = tl.where(q > 0.0, tl.minimum(ratio, one), 0.0)
            tl.store(weights + place, weight)
        else:
            drawn = tl.load(accept_uniforms + place).to(tl.float64)
            # the largest float64 below 1: a float32 may have been rounded up to 1
            drawn = tl.minimum(tl.maximum(drawn, 0.0), 0.99999999999999988898)
            stands = present & (q > 0.0) & (drawn * q < p)
            accepted += (stands & (accepted == i)).to(tl.int32)
        count += present.to(tl.int32)
    tl.store(num_drafts + row, count)
    if not BY_BLOCK:
        tl.store(num_accepted + row, accepted)
        tl.store(kept_weight + row, one)


@triton.jit
def _rest(
    probs,
    draft_probs,
    masses,
    logits_row,
    place,
    draft,
    weight,
    p_total,
    q_total,
    ids,
    vocab,
    draft_vocab,
    probs_stride,
    draft_stride,
    ONE_HOT: tl.constexpr,
):
    """max(weight · p - q, 0) at some ids."""
    p = _law(probs, logits_row, probs_stride, ids, vocab) / p_total
    if ONE_HOT:
        q = tl.where(ids == draft, 1.0, 0.0).to(tl.float64)
    else:
        q = _law(draft_probs, place, draft_stride, ids, draft_vocab) / q_total
    return tl.where(ids < vocab, tl.maximum(weight * p - q, 0.0), 0.0)


@triton.jit(do_not_specialize=["num_logits_rows", "width"])
def _excess_kernel(
    probs,
    draft_probs,
    drafts,
    logits_start,
    masses,
    num_drafts,
    weights,
    excess,  # [num_rows, width, blocks] float64
    num_logits_rows,
    width,
    vocab,
    draft_vocab,
    probs_stride,
    draft_stride,
    num_blocks,
    ONE_HOT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """At (row, i): what the first i + 1 drafts leave at the position of draft i + 1."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1)
    block = tl.program_id(2)
    if i + 1 < tl.load(num_drafts + row):
        start = tl.load(logits_start + row).to(tl.int64)
        place = row * width + i + 1
        ids = block * BLOCK + tl.arange(0, BLOCK)
        p_total = _total(masses, start + i + 1, num_blocks, num_blocks, BLOCKS)
        q_total = p_total if ONE_HOT else _total(masses, num_logits_rows + place, num_blocks, num_blocks, BLOCKS)
        rest = _rest(
            probs, draft_probs, masses, start + i + 1, place, tl.load(drafts + place).to(tl.int64),
            tl.load(weights + row * width + i), p_total, q_total, ids, vocab, draft_vocab, probs_stride, draft_stride,
            ONE_HOT,
        )  # fmt: skip
        tl.store(excess + (row * width + i) * num_blocks + block, tl.sum(rest, axis=0))


@triton.jit(do_not_specialize=["width"])
def _decide_kernel(
    accept_uniforms,
    num_drafts,
    weights,
    excess,
    num_accepted,
    kept_weight,
    width,
    num_blocks,
    BLOCKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(num_drafts + row)
    blocks = tl.arange(0, BLOCKS)
    accepted = tl.zeros((), tl.int32)
    kept = tl.full((), 1.0, tl.float64)
    for i in range(width):
        place = row * width + i
        weight = tl.load(weights + place)
        limit = tl.where(i + 1 < count, num_blocks, 0)
        rest = tl.sum(tl.load(excess + place * num_blocks + blocks, mask=blocks < limit, other=0.0), axis=0)
        whole = rest + 1.0 - weight
        # 0 / 0: w p and q are equal, so whatever is decided here, the next position keeps more
        threshold = tl.where(whole > 0.0, rest / tl.where(whole > 0.0, whole, 1.0), 1.0)
        threshold = tl.where(i + 1 < count, threshold, weight)
        drawn = tl.load(accept_uniforms + place).to(tl.float64)
        drawn = tl.minimum(tl.maximum(drawn, 0.0), 0.99999999999999988898)
        keeps = (i < count) & (drawn < threshold)
        accepted = tl.where(keeps, i + 1, accepted)
        kept = tl.where(keeps, weight, kept)
    tl.store(num_accepted + row, accepted)
    tl.store(kept_weight + row, kept)


@triton.jit(do_not_specialize=["num_logits_rows", "width"])
def _residual_kernel(
    probs,
    draft_probs,
    drafts,
    logits_start,
    masses,
    num_drafts,
    num_accepted,
    kept_weight,
    residual,  # [num_rows, blocks] float64
    num_logits_rows,
    width,
    vocab,
    draft_vocab,
    probs_stride,
    draft_stride,
    num_blocks,
    ONE_HOT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Written where a draft was refused; elsewhere the next id comes from the target's law, whose masses are known."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    accepted = tl.load(num_accepted + row)
    if accepted < tl.load(num_drafts + row):
        logits_row = tl.load(logits_start + row).to(tl.int64) + accepted
        place = row * width + accepted
        ids = block * BLOCK + tl.arange(0, BLOCK)
        p_total = _total(masses, logits_row, num_blocks, num_blocks, BLOCKS)
        q_total = p_total if ONE_HOT else _total(masses, num_logits_rows + place, num_blocks, num_blocks, BLOCKS)
        rest = _rest(
            probs, draft_probs, masses, logits_row, place, tl.load(drafts + place).to(tl.int64),
            tl.load(kept_weight + row), p_total, q_total, ids, vocab, draft_vocab, probs_stride, draft_stride, ONE_HOT,
        )  # fmt: skip
        tl.store(residual + row * num_blocks + block, tl.sum(rest, axis=0))


@triton.jit(do_not_specialize=["num_logits_rows", "width"])
def _pick_kernel(
    probs,
    draft_probs,
    drafts,
    logits_start,
    next_uniforms,  # [num_rows, width + 1]
    masses,
    num_drafts,
    num_accepted,
    kept_weight,
    residual,
    next_ids,  # [num_rows] int32
    num_logits_rows,
    width,
    vocab,
    draft_vocab,
    probs_stride,
    draft_stride,
    num_blocks,
    ONE_HOT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(logits_start + row).to(tl.int64)
    if tl.load(logits_start + row + 1).to(tl.int64) > start:
        accepted = tl.load(num_accepted + row)
        logits_row = start + accepted
        place = row * width + accepted
        blocks = tl.arange(0, BLOCKS)
        limit = tl.where(accepted < tl.load(num_drafts + row), num_blocks, 0)  # where a draft was refused
        left = tl.load(residual + row * num_blocks + blocks, mask=blocks < limit, other=0.0)
        # nothing left of a refused draft's law: both laws are equal up to rounding, and the target's is what it hid
        remains = tl.sum(left, axis=0) > 0.0
        p_total = _total(masses, logits_row, num_blocks, num_blocks, BLOCKS)
        whole = tl.load(masses + logits_row * num_blocks + blocks, mask=blocks < num_blocks, other=0.0) / p_total
        parts = tl.where(remains, left, whole)
        running = tl.cumsum(parts, axis=0)
        drawn = tl.load(next_uniforms + row * (width + 1) + accepted).to(tl.float64)
        bound = tl.minimum(tl.maximum(drawn, 0.0), 0.99999999999999988898) * tl.sum(parts, axis=0)
        beyond = (parts > 0.0) & (running > bound)
        last = tl.max(tl.where(parts > 0.0, blocks, 0), axis=0)
        block = tl.minimum(tl.min(tl.where(beyond, blocks, BLOCKS), axis=0), last)
        before = tl.sum(tl.where(blocks < block, parts, 0.0), axis=0)

        ids = block * BLOCK + tl.arange(0, BLOCK)
        if remains:
            q_total = p_total if ONE_HOT else _total(masses, num_logits_rows + place, num_blocks, num_blocks, BLOCKS)
            weights = _rest(
                probs, draft_probs, masses, logits_row, place, tl.load(drafts + place).to(tl.int64),
                tl.load(kept_weight + row), p_total, q_total, ids, vocab, draft_vocab, probs_stride, draft_stride,
                ONE_HOT,
            )  # fmt: skip
        else:
            weights = _law(probs, logits_row, probs_stride, ids, vocab) / p_total
        passed = (weights > 0.0) & (before + tl.cumsum(weights, axis=0) > bound)
        # never an id of weight 0, and the last one where rounding let the sum fall short
        first = tl.min(tl.where(passed, ids, vocab), axis=0)
        final = tl.max(tl.where(weights > 0.0, ids, 0), axis=0)
        tl.store(next_ids + row, tl.minimum(first, final).to(tl.int32))
    else:
        tl.store(next_ids + row, -1)


def verify_rejection(
    probs: torch.Tensor,  # [num_logits, vocab]
    drafts: torch.Tensor,  # [num_rows, width]
    logits_start: torch.Tensor,  # [num_rows + 1]
    draft_probs: torch.Tensor | None,  # [num_rows, width, draft_vocab]
    accept_uniforms: torch.Tensor,  # [num_rows, width] in [0, 1)
    next_uniforms: torch.Tensor,  # [num_rows, width + 1] in [0, 1)
) -> Verdict[torch.Tensor]:  # [num_rows] int32 each
    """`verify.rejection.verify_rejection` in four launches."""
    return _verify(probs, drafts, logits_start, draft_probs, accept_uniforms, next_uniforms, by_block=False)


def verify_block(
    probs: torch.Tensor,  # [num_logits, vocab]
    drafts: torch.Tensor,  # [num_rows, width]
    logits_start: torch.Tensor,  # [num_rows + 1]
    draft_probs: torch.Tensor | None,  # [num_rows, width, draft_vocab]
    accept_uniforms: torch.Tensor,  # [num_rows, width] in [0, 1)
    next_uniforms: torch.Tensor,  # [num_rows, width + 1] in [0, 1)
) -> Verdict[torch.Tensor]:  # [num_rows] int32 each
    """`verify.block.verify_block` in six launches."""
    return _verify(probs, drafts, logits_start, draft_probs, accept_uniforms, next_uniforms, by_block=True)


class _Workspace(NamedTuple):
    """Scratch of a call."""

    masses: torch.Tensor  # [num_logits + num_rows * width, blocks]
    excess: torch.Tensor  # [num_rows, width, blocks]
    residual: torch.Tensor  # [num_rows, blocks]
    weights: torch.Tensor  # [num_rows, width]
    kept_weight: torch.Tensor  # [num_rows]


def _workspace(num_logits: int, num_rows: int, width: int, blocks: int, device: torch.device) -> _Workspace:
    shapes = ((num_logits + num_rows * width, blocks), (num_rows, width, blocks), (num_rows, blocks),
              (num_rows, width), (num_rows,))  # fmt: skip
    counts = [torch.Size(shape).numel() for shape in shapes]
    sizes = [count + count % 2 for count in counts]  # each begins at 16 bytes: for others kernels are compiled again
    parts = torch.empty(sum(sizes), dtype=torch.float64, device=device).split(sizes)
    return _Workspace(*(part[:n].view(shape) for part, n, shape in zip(parts, counts, shapes, strict=True)))


def _verify(
    probs: torch.Tensor,
    drafts: torch.Tensor,
    logits_start: torch.Tensor,
    draft_probs: torch.Tensor | None,
    accept_uniforms: torch.Tensor,
    next_uniforms: torch.Tensor,
    *,
    by_block: bool,
) -> Verdict[torch.Tensor]:
    check_chain(probs, drafts, logits_start, draft_probs)
    num_rows, width = drafts.shape
    check_uniforms("accept_uniforms", accept_uniforms, (num_rows, width))
    check_uniforms("next_uniforms", next_uniforms, (num_rows, width + 1))
    num_logits, vocab = probs.shape
    padded = torch.empty(3, -(-num_rows // 4) * 4, dtype=torch.int32, device=drafts.device)
    num_drafts, num_accepted, next_ids = padded[:, :num_rows]
    if not num_rows:
        return Verdict(num_accepted, next_ids)
    one_hot = draft_probs is None
    probs = probs if probs.stride(1) == 1 else probs.contiguous()
    q = probs if draft_probs is None else draft_probs.reshape(num_rows * width, draft_probs.shape[2]).contiguous()
    draft_vocab = q.shape[1]
    drafts, logits_start = drafts.contiguous(), logits_start.contiguous()
    accept_uniforms, next_uniforms = accept_uniforms.contiguous(), next_uniforms.contiguous()
    blocks = triton.cdiv(vocab if one_hot else max(vocab, draft_vocab), BLOCK)
    work = _workspace(num_logits, num_rows, width, blocks, drafts.device)
    sizes = (num_logits, width, vocab, draft_vocab, probs.stride(0), q.stride(0), blocks)
    form: dict[str, Any] = {**UNFUSED, "ONE_HOT": one_hot, "BLOCKS": triton.next_power_of_2(blocks)}
    wide: dict[str, Any] = {**form, "BLOCK": BLOCK, "num_warps": 8}
    mass: Any = _mass_kernel
    num_laws = num_logits if one_hot else num_logits + num_rows * width
    if num_laws:
        mass[(num_laws, blocks)](
            probs, q, drafts, work.masses, num_logits, vocab, draft_vocab, probs.stride(0), q.stride(0), blocks,
            BLOCK=BLOCK, num_warps=8, **UNFUSED,
        )  # fmt: skip
    weigh: Any = _weigh_kernel
    weigh[(num_rows,)](
        probs, q, drafts, logits_start, accept_uniforms, work.masses, num_drafts, num_accepted, work.weights,
        work.kept_weight, *sizes, **form, BY_BLOCK=by_block, num_warps=1,
    )  # fmt: skip
    if by_block:
        if width > 1:
            excess: Any = _excess_kernel
            excess[(num_rows, width - 1, blocks)](
                probs, q, drafts, logits_start, work.masses, num_drafts, work.weights, work.excess, *sizes, **wide
            )
        decide: Any = _decide_kernel
        decide[(num_rows,)](
            accept_uniforms, num_drafts, work.weights, work.excess, num_accepted, work.kept_weight, width, blocks,
            BLOCKS=form["BLOCKS"], num_warps=1, **UNFUSED,
        )  # fmt: skip
    if width:
        residual: Any = _residual_kernel
        residual[(num_rows, blocks)](
            probs, q, drafts, logits_start, work.masses, num_drafts, num_accepted, work.kept_weight, work.residual,
            *sizes, **wide,
        )  # fmt: skip
    pick: Any = _pick_kernel
    pick[(num_rows,)](
        probs, q, drafts, logits_start, next_uniforms, work.masses, num_drafts, num_accepted, work.kept_weight,
        work.residual, next_ids, *sizes, **wide,
    )  # fmt: skip
    return Verdict(num_accepted, next_ids)
