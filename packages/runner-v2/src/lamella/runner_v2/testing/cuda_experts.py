"""Mixtures of experts of the stand-in for the CUDA kernels (testing/cuda_kernels.py)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from lamella.runner_v2.testing.cuda_checks import HALF, REAL, check, check_dense, require
from lamella.runner_v2.testing.cuda_dense import FLAGS, check_workspace, normed_rows


def moe_route(
    logits: torch.Tensor,  # [num_tokens, num_experts]
    top_k: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = True,
    ids: torch.Tensor | None = None,  # [num_tokens, top_k] int32
    weights: torch.Tensor | None = None,  # [num_tokens, top_k] float32
) -> tuple[torch.Tensor, torch.Tensor]:
    check(logits, "logits", REAL, (-1, -1))
    num_experts = logits.shape[1]
    require(scoring == "softmax", "scoring", "of the stand-in is softmax")
    require(1 <= num_experts <= 1024, "logits", f"has {num_experts} experts, needed 1 to 1024")
    require(1 <= top_k <= min(32, num_experts), "top_k", "needed 1 to 32 and no more than there are")
    order = logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    chosen = logits.float().softmax(-1).gather(1, order)
    if renormalize:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
    narrow = order.to(torch.int32)
    return (
        narrow if ids is None else ids.copy_(narrow),
        chosen if weights is None else weights.copy_(chosen),
    )


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
    needs = (_moe_need(n, top_k, num_experts, hidden, inner) for n in range(num_tokens + 1))
    return max(needs)


def _moe_need(num_tokens: int, top_k: int, num_experts: int, hidden: int, inner: int) -> int:
    """Like the kernels', not monotonic: steps of some sizes take one small tile per expert more."""
    pairs = num_tokens * top_k
    return FLAGS + 2 * pairs * (hidden + inner) + (8192 * num_experts if 10 < num_tokens <= 32 else 0)


def moe_workspace(num_bytes: int, device: torch.device | str = "cpu") -> torch.Tensor:
    workspace = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    workspace[:FLAGS].zero_()
    return workspace


def fused_moe(
    x: torch.Tensor,  # [num_tokens, hidden]
    w13: torch.Tensor,  # [num_experts, 2 * inner, hidden], gate rows first
    w2: torch.Tensor,  # [num_experts, hidden, inner]
    ids: torch.Tensor,  # [num_tokens, top_k] int32
    weights: torch.Tensor,  # [num_tokens, top_k] float32
    *,
    activation: str = "silu",
    workspace: torch.Tensor | None = None,  # uint8
    out: torch.Tensor | None = None,  # [num_tokens, hidden]
    residual: torch.Tensor | None = None,  # [num_tokens, hidden]
    next_norm: torch.Tensor | None = None,  # [hidden]
    eps: float = 1e-6,
    normed: torch.Tensor | None = None,  # [num_tokens, hidden]
    logits: torch.Tensor | None = None,  # [num_tokens, num_experts]
    renormalize: bool = True,
    portable: bool = False,
) -> torch.Tensor:
    require(activation == "silu", "activation", f"is {activation!r}, needed silu")
    check(x, "x", HALF, (-1, -1), aligned=True)
    (num_tokens, hidden), (num_experts, double, _) = x.shape, w13.shape
    inner, top_k = double // 2, ids.shape[1]
    check_dense(w13, "w13", (x.dtype,), (num_experts, 2 * inner, hidden))
    check_dense(w2, "w2", (x.dtype,), (num_experts, hidden, inner))
    require(hidden % 8 == 0 and inner % 8 == 0, "x", "widths are no multiples of 8")
    check_dense(ids, "ids", (torch.int32,), (num_tokens, top_k))
    check_dense(weights, "weights", (torch.float32,), (num_tokens, top_k))
    if logits is not None:
        require(logits.shape == (num_tokens, num_experts), "logits", f"has shape {list(logits.shape)}")
        moe_route(logits, top_k, renormalize=renormalize, ids=ids, weights=weights)
    if workspace is not None:
        check_workspace(workspace, _moe_need(num_tokens, top_k, num_experts, hidden, inner))
    total = torch.zeros(num_tokens, hidden, device=x.device)
    for token in range(num_tokens):
        for choice in range(top_k):
            expert = int(ids[token, choice])
            if 0 <= expert < num_experts:
                gate, up = (w13[expert].float() @ x[token].float()).chunk(2)
                inside = (F.silu(gate) * up).to(x.dtype).float()
                total[token] += weights[token, choice] * (w2[expert].float() @ inside).to(x.dtype).float()
    result = total.to(x.dtype)
    if residual is None:
        require(next_norm is None, "next_norm", "needs a residual")
        return result if out is None else out.copy_(result)
    require(out is None, "out", "is not written with a residual")
    require(hidden <= 8192, "residual", f"is {hidden} wide, 8192 at most")
    check(residual, "residual", (x.dtype,), (num_tokens, hidden), aligned=True)
    residual.add_(result)
    if next_norm is None:
        return residual
    check_dense(next_norm, "next_norm", (x.dtype,), (hidden,))
    found = normed_rows(residual, next_norm, eps, False)
    return found if normed is None else normed.copy_(found)
