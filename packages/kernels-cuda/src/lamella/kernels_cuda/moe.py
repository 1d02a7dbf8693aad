"""Mixtures of experts: routing, sorting by expert, and the experts themselves as grouped products."""

from __future__ import annotations

from typing import Literal

import torch

from lamella.kernels_cuda.device import native

Scoring = Literal["softmax", "sigmoid", "sqrtsoftplus"]
_SCORING = {"softmax": 0, "sigmoid": 1, "sqrtsoftplus": 2}


def moe_route(
    logits: torch.Tensor,  # [num_tokens, num_experts]
    top_k: int,
    *,
    scoring: Scoring = "softmax",
    renormalize: bool = True,
    bias: torch.Tensor | None = None,  # [num_experts] float32
    num_groups: int = 1,
    topk_groups: int = 1,
    scale: float = 1.0,
    ids: torch.Tensor | None = None,  # [num_tokens, top_k] int32
    weights: torch.Tensor | None = None,  # [num_tokens, top_k] float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """The top_k experts of each token, best first, and their weights; float32 inside.

    Experts are ranked by score + bias (without bias: by their logits), equal ones by the lower id; weights come from
    the scores alone, divided by (their sum + 1e-20) if renormalize, times scale. With groups, only experts of the
    topk_groups best groups of neighbours are taken: a group counts the sum of its two best with bias, its best without.
    A logit that is not finite scores 0 and comes last; the ids of a row differ from each other in any case. Up to 1,024
    experts, top_k up to 32. Rows of logits may be strided. ValueError names the argument that does not fit.
    """
    if scoring not in _SCORING:
        raise ValueError(f"scoring: is {scoring!r}, needed one of {', '.join(_SCORING)}")
    shape = (logits.shape[0], top_k)
    ids = torch.empty(shape, dtype=torch.int32, device=logits.device) if ids is None else ids
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device) if weights is None else weights
    native().moe_route(ids, weights, logits, bias, _SCORING[scoring], renormalize, num_groups, topk_groups, scale)
    return ids, weights


def moe_align(
    ids: torch.Tensor,  # [num_tokens, top_k] int32
    num_experts: int,
    block_rows: int,
    *,
    expert_map: torch.Tensor | None = None,  # [num_ids_of_experts] int32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Flat pairs token * top_k + choice, grouped by expert in their order, each expert's padded to block_rows.

    Returns (sorted_ids int32 [max_blocks * block_rows], block_experts int32 [max_blocks], num_rows int32 [1]): padding
    is num_tokens * top_k, blocks behind num_rows / block_rows have expert -1. Pairs whose id (after expert_map, if
    given) is outside [0, num_experts) are left out. No value is read by the host.
    """
    blocks: int = native().moe_max_blocks(ids.numel(), num_experts, block_rows)
    sorted_ids = torch.empty(blocks * block_rows, dtype=torch.int32, device=ids.device)
    block_experts = torch.empty(blocks, dtype=torch.int32, device=ids.device)
    num_rows = torch.empty(1, dtype=torch.int32, device=ids.device)
    native().moe_align(sorted_ids, block_experts, num_rows, ids, num_experts, block_rows, expert_map)
    return sorted_ids, block_experts, num_rows


def moe_workspace_bytes(
    num_tokens: int,
    top_k: int,
    num_experts: int,
    hidden: int,
    inner: int,
    *,
    fp8: bool = False,
    map_size: int = 0,
    portable: bool = False,
) -> int:
    """Bytes that fused_moe() needs as workspace on the current device, for up to num_tokens tokens of this shape."""
    size: int = native().moe_workspace(num_tokens, top_k, num_experts, map_size, hidden, inner, fp8, portable)
    return size


def moe_workspace(num_bytes: int, device: torch.device | str = "cuda") -> torch.Tensor:
    """A workspace for fused_moe(), its head set to zero as it must be before the first use."""
    workspace = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    workspace[: native().moe_zeroed()].zero_()
    return workspace


def fused_moe(
    x: torch.Tensor,  # [num_tokens, hidden]
    w13: torch.Tensor,  # [num_experts, 2 * inner, hidden], gate rows first
    w2: torch.Tensor,  # [num_experts, hidden, inner]
    ids: torch.Tensor,  # [num_tokens, top_k] int32
    weights: torch.Tensor,  # [num_tokens, top_k] float32
    *,
    w13_scale: torch.Tensor | None = None,  # [num_experts, 2 * inner / 128, hidden / 128] float32
    w2_scale: torch.Tensor | None = None,  # [num_experts, hidden / 128, inner / 128] float32
    expert_map: torch.Tensor | None = None,  # [num_ids_of_experts] int32
    activation: str = "silu",
    workspace: torch.Tensor | None = None,  # uint8
    out: torch.Tensor | None = None,  # [num_tokens, hidden]
    residual: torch.Tensor | None = None,  # [num_tokens, hidden]
    next_norm: torch.Tensor | None = None,  # [hidden]
    eps: float = 1e-6,
    normed: torch.Tensor | None = None,  # [num_tokens, hidden]
    logits: torch.Tensor | None = None,  # [num_tokens, num_experts, or num_ids_of_experts with expert_map]
    renormalize: bool = True,
    portable: bool = False,
) -> torch.Tensor:
    """out[t] = sum over j of weights[t, j] * w2[e] @ (silu(gate) * up), gate and up = w13[e] @ x[t], e = ids[t, j].

    bfloat16 or float16, sums in float32; products are rounded between the two matrices and before the sum over j. Or
    weights in float8_e4m3fn with one scale per 128 x 128 block: x (bfloat16) and the products are then quantised by
    token and 128 columns. Ids outside of the experts (-1), or that expert_map sends there, are left out; a token with
    none gets 0. hidden and inner are multiples of 8, with fp8 of 128. Rows of x and out may be strided.

    With residual (hidden up to 8,192) there is no out: residual becomes out + residual, both rounded, and is returned;
    with next_norm also rms_norm(residual, next_norm, eps) is computed, into normed, and that is returned: what
    rms_norm(out, next_norm, eps, residual=residual) gives, by one kernel less.

    With logits, ids and weights are written, as moe_route(logits, top_k, renormalize=renormalize) would: for one or two
    tokens and up to 256 experts, all of them here, by one kernel less.

    The result does not depend on timing. workspace: moe_workspace() of at least moe_workspace_bytes(); one stream at a
    time, and it may be used again at once. portable: not the Hopper kernels, for comparison.
    """
    if activation != "silu":
        raise ValueError(f"activation: is {activation!r}, needed silu")
    fp8 = w13.dtype == torch.float8_e4m3fn
    if residual is not None:
        if out is not None:
            raise ValueError("out: is not written with a residual")
        out = residual
    if next_norm is not None and normed is None:
        normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    if workspace is None:
        map_size = 0 if expert_map is None else expert_map.numel()
        workspace = moe_workspace(
            moe_workspace_bytes(
                x.shape[0], ids.shape[1], w13.shape[0], x.shape[1], w13.shape[1] // 2,
                fp8=fp8, map_size=map_size, portable=portable,
            ),
            x.device,
        )  # fmt: skip
    if fp8:
        w13, w2 = w13.view(torch.uint8), w2.view(torch.uint8)
    native().fused_moe(
        out, x, w13, w2, ids, weights, w13_scale, w2_scale, expert_map, workspace, portable,
        residual, next_norm, normed, eps, logits, renormalize,
    )  # fmt: skip
    return out if normed is None else normed
