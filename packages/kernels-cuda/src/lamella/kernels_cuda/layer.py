"""What lies between a layer's attention and the next layer's, as one kernel for a few tokens."""

from __future__ import annotations

import torch

from lamella.kernels_cuda.device import native


def layer_tail_rows(attended: int, hidden: int, inner: int, qkv: int = 0) -> int:
    """The most tokens that layer_tail() takes for these widths on the current device; 0: there is no kernel for them.

    The device is a Hopper; attended, hidden and inner are multiples of 512, attended and hidden up to 4,096, qkv is a
    multiple of 16.
    """
    rows: int = native().layer_tail_rows(attended, hidden, inner, qkv)
    return rows


def layer_tail_workspace(inner: int, device: torch.device | str = "cuda") -> torch.Tensor:
    """A workspace for layer_tail() and layers of up to this inner width: uint8, its head set to zero."""
    workspace = torch.empty(native().layer_tail_workspace(inner), dtype=torch.uint8, device=device)
    workspace[: native().layer_tail_zeroed()].zero_()
    return workspace


def layer_tail(
    attended: torch.Tensor,  # [num_tokens, attended]
    w_o: torch.Tensor,  # [hidden, attended]
    residual: torch.Tensor,  # [num_tokens, hidden]
    mlp_norm: torch.Tensor,  # [hidden]
    w_gate_up: torch.Tensor,  # [2 * inner, hidden], gate rows first
    w_down: torch.Tensor,  # [hidden, inner]
    workspace: torch.Tensor,  # uint8
    *,
    next_norm: torch.Tensor | None = None,  # [hidden]
    w_qkv: torch.Tensor | None = None,  # [qkv, hidden]
    qkv: torch.Tensor | None = None,  # [num_tokens, qkv]
    eps: float = 1e-6,
    prefetch: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Adds attended @ w_o.T to residual, then the SwiGLU MLP of its RMSNorm, both rounded as separate kernels would.

    With w_qkv and next_norm also returns rms_norm(residual, next_norm, eps) @ w_qkv.T [num_tokens, qkv]: the next
    layer's queries, keys and values. bfloat16 or float16, all alike, sums in float32; rows of attended, residual and
    qkv may be strided. A token's result does not depend on the others. prefetch: weights that come next, to be brought
    into L2.

    Up to layer_tail_rows() tokens. The blocks of the kernel wait for each other, so a device runs one at a time: a
    workspace (layer_tail_workspace()) belongs to one stream, and no two streams run the kernel side by side. ValueError
    names the argument that does not fit.
    """
    if w_qkv is not None and qkv is None:
        qkv = torch.empty(attended.shape[0], w_qkv.shape[0], dtype=attended.dtype, device=attended.device)
    native().layer_tail(
        attended, w_o, residual, mlp_norm, w_gate_up, w_down, workspace, next_norm, w_qkv, qkv, eps, prefetch
    )
    return qkv


def experts_tail_rows(attended: int, hidden: int, inner: int, qkv: int, num_experts: int, top_k: int) -> int:
    """The most tokens that experts_tail() takes for these sizes on the current device; 0: there is no kernel for them.

    The device is a Hopper; attended, hidden and inner are multiples of 256, attended and hidden up to 4,096, qkv (0
    without) and num_experts multiples of 16, num_experts up to 256, top_k up to 8.
    """
    rows: int = native().experts_tail_rows(attended, hidden, inner, qkv, num_experts, top_k)
    return rows


def experts_tail_workspace(
    inner: int, num_experts: int, top_k: int, device: torch.device | str = "cuda"
) -> torch.Tensor:
    """A workspace for experts_tail() and sizes up to these: uint8, its head set to zero."""
    num_bytes = native().experts_tail_workspace(inner, num_experts, top_k)
    workspace = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    workspace[: native().layer_tail_zeroed()].zero_()
    return workspace


def experts_tail(
    attended: torch.Tensor,  # [num_tokens, attended]
    w_o: torch.Tensor,  # [hidden, attended]
    residual: torch.Tensor,  # [num_tokens, hidden]
    mlp_norm: torch.Tensor,  # [hidden]
    router: torch.Tensor,  # [num_experts, hidden]
    w13: torch.Tensor,  # [num_experts, 2 * inner, hidden], gate rows first
    w2: torch.Tensor,  # [num_experts, hidden, inner]
    top_k: int,
    workspace: torch.Tensor,  # uint8
    *,
    renormalize: bool = True,
    next_norm: torch.Tensor | None = None,  # [hidden]
    w_qkv: torch.Tensor | None = None,  # [qkv, hidden]
    qkv: torch.Tensor | None = None,  # [num_tokens, qkv]
    eps: float = 1e-6,
    prefetch: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """layer_tail() with a mixture of experts in the place of the MLP: the top_k of softmax(norm @ router.T), as
    moe_route(logits, top_k, renormalize=renormalize) takes them, and fused_moe() of them. The experts' sum is rounded
    once, behind the weights. Up to experts_tail_rows() tokens; all else as layer_tail().
    """
    if w_qkv is not None and qkv is None:
        qkv = torch.empty(attended.shape[0], w_qkv.shape[0], dtype=attended.dtype, device=attended.device)
    native().experts_tail(
        attended, w_o, residual, mlp_norm, router, w13, w2, top_k, renormalize, workspace, next_norm, w_qkv, qkv, eps,
        prefetch,
    )  # fmt: skip
    return qkv
