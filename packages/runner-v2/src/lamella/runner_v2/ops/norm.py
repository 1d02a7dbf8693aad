"""Contracts of `rms_norm` and `add_rms_norm`.

Site params: width, eps, plus_one (the factor is 1 + weight). The weight is a float32 tensor [width].

    rms_norm.run(x [..., width], weight) -> normed, same shape and dtype as x, contiguous
    add_rms_norm.run(x [T, width], residual [T, width], weight) -> (normed, residual + x)
        both fresh or in place of x and residual: the caller drops its own

x of rms_norm may be a view whose last dimension is contiguous (heads inside a qkv row). Statistics are float32.
"""

from __future__ import annotations

import torch

from lamella.runner_v2.ops.spec import Op


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, plus_one: bool) -> torch.Tensor:
    """x / rms(x) * weight. With plus_one the factor 1 + weight is applied before the cast back, else after it."""
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    if plus_one:
        return (normed * (1.0 + weight)).to(x.dtype)
    return normed.to(x.dtype) * weight.to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, plus_one: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The new residual stream and its norm."""
    added = residual + x
    return rms_norm(added, weight, eps, plus_one), added


RMS_NORM = Op("rms_norm", rms_norm, "x / rms(x) * weight over the last dimension")
ADD_RMS_NORM = Op("add_rms_norm", add_rms_norm, "residual + x, and its rms_norm")
