"""RMSNorm in float64, from the formula alone."""

import torch


def rms_norm(x, weight, eps, residual=None, plus_one=False):
    """(norm float64, the new residual in its own type)."""
    summed = None
    if residual is not None:
        summed = (x.double() + residual.double()).to(residual.dtype)
    y = (x if summed is None else summed).double()
    gain = weight.double() + (1.0 if plus_one else 0.0)
    return y / torch.sqrt(y.square().mean(-1, keepdim=True) + eps) * gain, summed
