"""Outputs full of NaN, and errors that NaN never passes."""

import torch


def poisoned(*shape, dtype, device="cuda"):
    """A tensor in which nothing was written yet, and it shows."""
    if dtype.is_floating_point and torch.finfo(dtype).bits > 8:
        return torch.full(shape, torch.nan, dtype=dtype, device=device)
    return (
        torch.full(shape, 0x7F, dtype=torch.uint8, device=device).view(dtype)
        if dtype.itemsize == 1
        else torch.full(shape, -(2**30), dtype=dtype, device=device)
    )


def relative_error(out, expected):
    """||out - expected|| / ||expected||; infinite where NaN or anything unwritten is in out."""
    if out.numel() == 0:
        return 0.0
    out, expected = out.double(), expected.double()
    if not torch.isfinite(out).all():
        return float("inf")
    return float((out - expected).norm() / expected.norm().clamp_min(1e-30))
