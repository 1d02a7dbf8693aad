"""Matrix products of few or many tokens with weights, with the neighbours of a transformer layer fused to both ends."""

from __future__ import annotations

import torch

from lamella.kernels_cuda.device import native

ACTIVATIONS = {"silu": 1, "gelu_tanh": 2, "gelu": 3}
_TILE = 64


def linear(
    x: torch.Tensor,  # [num_tokens, in]
    weight: torch.Tensor,  # [out, in]; packed by pack_gate_up with activation
    workspace: torch.Tensor,  # of linear_workspace()
    *,
    activation: str | None = None,
    bias: torch.Tensor | None = None,  # [out]
    residual: torch.Tensor | None = None,  # [num_tokens, out]
    squares_in: torch.Tensor | None = None,  # [parts, num_tokens] float32
    eps: float = 0.0,
    gain: torch.Tensor | None = None,  # [out]
    scaled_out: torch.Tensor | None = None,  # [num_tokens, out]
    squares_out: torch.Tensor | None = None,  # [ceil(out / 128), num_tokens] float32
    prefetch: torch.Tensor | None = None,
    out: torch.Tensor | None = None,  # [num_tokens, out]
    portable: bool = False,
) -> torch.Tensor:
    """x @ weight^T in bfloat16 or float16, sums in float32, rounded once.

    activation ("silu", "gelu_tanh", "gelu"): act(gate) * up of a packed pair. residual: added to the rounded product;
    out may be the same tensor. RMSNorm without a kernel of its own: with gain the result is also written times gain to
    scaled_out and its sums of squares to squares_out; the next product takes those as x and squares_in, and divides by
    sqrt(mean of squares + eps). prefetch: a tensor (the next weights) to bring into the L2 cache meanwhile. portable:
    the kernel for all devices instead of Hopper's. ValueError names the argument that does not fit.
    """
    out = _out(x, weight, activation, x.dtype) if out is None else out
    native().gemm(
        out, x, weight, workspace, _code(activation), bias, residual, squares_in, eps, gain, scaled_out, squares_out,
        None, None, prefetch, portable,
    )  # fmt: skip
    return out


def linear_fp8(
    x: torch.Tensor,  # [num_tokens, in] float8_e4m3fn
    weight: torch.Tensor,  # [out, in] float8_e4m3fn; packed by pack_gate_up with activation
    x_scale: torch.Tensor,  # [num_tokens], or [num_tokens, ceil(in / 128)]
    w_scale: torch.Tensor,  # [out] (packed as weight), or [ceil(out / 128), ceil(in / 128)]
    workspace: torch.Tensor,  # of linear_workspace()
    *,
    activation: str | None = None,
    bias: torch.Tensor | None = None,  # [out]
    residual: torch.Tensor | None = None,  # [num_tokens, out]
    out: torch.Tensor | None = None,  # [num_tokens, out] bfloat16
) -> torch.Tensor:
    """(x * x_scale) @ (weight * w_scale)^T -> bfloat16; Hopper only.

    Scales by row (per token and per output), or by blocks of 128 along the input and 128 x 128 of the weight. Sums are
    promoted to float32 every 128 of the input.
    """
    out = _out(x, weight, activation, torch.bfloat16) if out is None else out
    native().gemm(
        out, x.view(torch.uint8), weight.view(torch.uint8), workspace, _code(activation), bias, residual,
        x_scale=x_scale, w_scale=w_scale,
    )  # fmt: skip
    return out


def linear_workspace(num_tokens: int, device: torch.device | str | int = "cuda") -> torch.Tensor:
    """Workspace for products of up to num_tokens rows on a device; one a stream. Zeros before and after a call."""
    with torch.cuda.device(device):
        return torch.zeros(native().gemm_workspace(num_tokens), dtype=torch.uint8, device=device)


def pack_gate_up(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Gate and up weights (or row scales) [n, ...] -> [2 n, ...]: 64 rows of the one, 64 rows of the other, and so on.

    ValueError if they differ in shape or n is no multiple of 64.
    """
    if gate.shape != up.shape or gate.shape[0] % _TILE:
        raise ValueError(f"gate {list(gate.shape)} and up {list(up.shape)}: equal shapes and rows by 64 are needed")
    tiles = [part.reshape(-1, 1, _TILE, *part.shape[1:]) for part in (gate, up)]
    return torch.cat(tiles, dim=1).reshape(2 * gate.shape[0], *gate.shape[1:])


def _code(activation: str | None) -> int:
    if activation is None:
        return 0
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: no {activation!r}; known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[activation]


def _out(x: torch.Tensor, weight: torch.Tensor, activation: str | None, dtype: torch.dtype) -> torch.Tensor:
    width = weight.shape[0] // (1 if activation is None else 2)
    return torch.empty(x.shape[0], width, dtype=dtype, device=x.device)
