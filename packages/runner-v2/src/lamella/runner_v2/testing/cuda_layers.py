"""Tails of layers of the stand-in for the CUDA kernels (testing/cuda_py), kernel by kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from lamella.runner_v2.testing.cuda_checks import HALF, check, check_dense, require
from lamella.runner_v2.testing.cuda_dense import FLAGS, check_workspace, rms_norm, silu_mul
from lamella.runner_v2.testing.cuda_experts import fused_moe, moe_route


def layer_tail_rows(attended: int, hidden: int, inner: int, qkv: int = 0) -> int:
    """Unlike the kernel also of the tiny models' widths."""
    return 16 if all(width % 16 == 0 for width in (attended, hidden, inner, qkv)) else 0


def layer_tail_workspace(inner: int, device: torch.device | str = "cpu") -> torch.Tensor:
    return _workspace(32 * inner, device)


def experts_tail_rows(attended: int, hidden: int, inner: int, qkv: int, num_experts: int, top_k: int) -> int:
    served = all(width % 8 == 0 for width in (attended, hidden, inner, qkv, num_experts))
    return 8 if served and num_experts <= 256 and top_k <= 8 else 0


def experts_tail_workspace(
    inner: int, num_experts: int, top_k: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    return _workspace(16 * (num_experts + top_k * inner), device)


def layer_tail(
    attended: torch.Tensor,  # [num_tokens, attended]
    w_o: torch.Tensor,  # [hidden, attended]
    residual: torch.Tensor,  # [num_tokens, hidden]
    mlp_norm: torch.Tensor,  # [hidden]
    w_gate_up: torch.Tensor,  # [2 * inner, hidden]
    w_down: torch.Tensor,  # [hidden, inner]
    workspace: torch.Tensor,
    *,
    next_norm: torch.Tensor | None = None,  # [hidden]
    w_qkv: torch.Tensor | None = None,  # [qkv, hidden]
    qkv: torch.Tensor | None = None,  # [num_tokens, qkv]
    eps: float = 1e-6,
    prefetch: torch.Tensor | None = None,
) -> torch.Tensor | None:
    num_tokens, hidden = _check_beginning(attended, w_o, residual, next_norm, w_qkv, prefetch)
    check_dense(w_gate_up, "w_gate_up", (attended.dtype,), (-1, hidden))
    inner = w_gate_up.shape[0] // 2
    check_dense(w_down, "w_down", (attended.dtype,), (hidden, inner))
    most = layer_tail_rows(attended.shape[1], hidden, inner)
    _check_room(num_tokens, most, workspace, layer_tail_workspace(inner).numel())
    normed = rms_norm(F.linear(attended, w_o), mlp_norm, eps, residual=residual)
    delta = F.linear(silu_mul(F.linear(normed, w_gate_up)), w_down)
    return _close(delta, residual, next_norm, w_qkv, qkv, eps)


def experts_tail(
    attended: torch.Tensor,  # [num_tokens, attended]
    w_o: torch.Tensor,  # [hidden, attended]
    residual: torch.Tensor,  # [num_tokens, hidden]
    mlp_norm: torch.Tensor,  # [hidden]
    router: torch.Tensor,  # [num_experts, hidden]
    w13: torch.Tensor,  # [num_experts, 2 * inner, hidden]
    w2: torch.Tensor,  # [num_experts, hidden, inner]
    top_k: int,
    workspace: torch.Tensor,
    *,
    renormalize: bool = True,
    next_norm: torch.Tensor | None = None,  # [hidden]
    w_qkv: torch.Tensor | None = None,  # [qkv, hidden]
    qkv: torch.Tensor | None = None,  # [num_tokens, qkv]
    eps: float = 1e-6,
    prefetch: torch.Tensor | None = None,
) -> torch.Tensor | None:
    num_tokens, hidden = _check_beginning(attended, w_o, residual, next_norm, w_qkv, prefetch)
    num_experts, inner = w2.shape[0], w2.shape[2]
    check_dense(router, "router", (attended.dtype,), (num_experts, hidden))
    check_dense(w13, "w13", (attended.dtype,), (num_experts, 2 * inner, hidden))
    check_dense(w2, "w2", (attended.dtype,), (num_experts, hidden, inner))
    most = experts_tail_rows(attended.shape[1], hidden, inner, 0, num_experts, top_k)
    _check_room(num_tokens, most, workspace, experts_tail_workspace(inner, num_experts, top_k).numel())
    x = rms_norm(F.linear(attended, w_o), mlp_norm, eps, residual=residual)
    ids, weights = moe_route(F.linear(x, router), top_k, renormalize=renormalize)
    return _close(fused_moe(x, w13, w2, ids, weights), residual, next_norm, w_qkv, qkv, eps)


def _workspace(num_bytes: int, device: torch.device | str) -> torch.Tensor:
    workspace = torch.empty(FLAGS + num_bytes, dtype=torch.uint8, device=device)
    workspace[:FLAGS].zero_()
    return workspace


def _check_beginning(
    attended: torch.Tensor,
    w_o: torch.Tensor,
    residual: torch.Tensor,
    next_norm: torch.Tensor | None,
    w_qkv: torch.Tensor | None,
    prefetch: torch.Tensor | None,
) -> tuple[int, int]:
    check(attended, "attended", HALF, (-1, -1), aligned=True)
    (num_tokens, width), dtype = attended.shape, attended.dtype
    check_dense(w_o, "w_o", (dtype,), (-1, width))
    hidden = w_o.shape[0]
    check(residual, "residual", (dtype,), (num_tokens, hidden), aligned=True)
    require((w_qkv is None) == (next_norm is None), "next_norm", "is needed with w_qkv, and only with it")
    if w_qkv is not None:
        check_dense(w_qkv, "w_qkv", (dtype,), (-1, hidden))
    if prefetch is not None:
        require(prefetch.is_contiguous(), "prefetch", "is not contiguous")
    return num_tokens, hidden


def _check_room(num_tokens: int, most: int, workspace: torch.Tensor, needed: int) -> None:
    require(num_tokens <= most, "attended", f"has {num_tokens} rows, this device's kernel takes {most}")
    check_workspace(workspace, needed)


def _close(
    delta: torch.Tensor,
    residual: torch.Tensor,
    next_norm: torch.Tensor | None,
    w_qkv: torch.Tensor | None,
    qkv: torch.Tensor | None,
    eps: float,
) -> torch.Tensor | None:
    if w_qkv is None or next_norm is None:
        residual.copy_(residual.float() + delta.float())
        return None
    result = F.linear(rms_norm(delta, next_norm, eps, residual=residual), w_qkv)
    return result if qkv is None else qkv.copy_(result)
