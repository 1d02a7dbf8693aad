"""Products of a layer in float64, from the formulas alone."""

import torch


def act(x, name):
    if name == "silu":
        return x * torch.sigmoid(x)
    if name == "gelu_tanh":
        return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + torch.erf(x / 2**0.5))


def linear(x, weight, bias=None, factor=None):
    """x [m, k], weight [n, k] -> [m, n]; factor [m] times each row's sum."""
    y = x.double() @ weight.double().T
    if factor is not None:
        y = y * factor.double()[:, None]
    return y if bias is None else y + bias.double()


def dequantised(x, scale):
    """Rows with a scale each ([m]), or blocks of 128 ([m, k / 128])."""
    if scale.ndim == 1:
        return x.double() * scale.double()[:, None]
    return x.double() * scale.double().repeat_interleave(128, 1)[:, : x.shape[1]]


def dequantised_blocks(w, scale):
    """Weights with a scale for every 128 x 128."""
    full = scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return w.double() * full[: w.shape[0], : w.shape[1]]
