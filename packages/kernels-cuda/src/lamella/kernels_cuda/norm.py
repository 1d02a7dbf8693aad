"""RMSNorm over rows, with the residual sum before it or fp8 quantisation behind it in the same pass."""

from __future__ import annotations

import torch

from lamella.kernels_cuda.device import native


def rms_norm(
    x: torch.Tensor,  # [num_rows, width]
    weight: torch.Tensor,  # [width]
    eps: float,
    *,
    residual: torch.Tensor | None = None,  # [num_rows, width]
    plus_one: bool = False,
    out: torch.Tensor | None = None,  # [num_rows, width]
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, row by row; bfloat16, float16 or float32, sums in float32.

    With residual: residual += x first, in place and rounded to its type, and that sum is normalised. plus_one: times
    (1 + weight) in float32 and rounded once (Gemma), else rounded before the weight, too (Llama). Rows may be strided;
    they start at multiples of 16 bytes. ValueError names the argument that does not fit.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    native().rms_norm(out, x, weight, eps, residual, plus_one)
    return out


def rms_norm_fp8(
    x: torch.Tensor,  # [num_rows, width]
    weight: torch.Tensor,  # [width]
    eps: float,
    *,
    residual: torch.Tensor | None = None,  # [num_rows, width]
    plus_one: bool = False,
    out: torch.Tensor | None = None,  # [num_rows, width] float8_e4m3fn
    scale: torch.Tensor | None = None,  # [num_rows] float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """rms_norm(), then e4m3 with one scale per row: out * scale is the norm; scale = max|norm| / 448, saturating."""
    if out is None:
        out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    if scale is None:
        scale = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    native().rms_norm_fp8(out.view(torch.uint8), scale, x, weight, eps, residual, plus_one)
    return out, scale
