"""Gated activations in float64, and what fp8 scales must be."""

import math

import torch


def activate(x, kind):
    x = x.double()
    if kind == "silu":
        return x / (1 + torch.exp(-x))
    if kind == "gelu":
        return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gated(x, kind, tile=0):
    """float64; the activation is rounded to x's type first."""
    if tile:
        gate, up = (part.flatten(-2) for part in x.unflatten(-1, (-1, 2, tile)).unbind(-2))
    else:
        gate, up = x.chunk(2, -1)
    return activate(gate, kind).to(x.dtype).double() * up.double()


def token_scale(y):
    return (y.double().abs().amax(-1) / 448).clamp_min(1 / (448 * 512))


def group_scale(y, pow2):
    scale = y.double().unflatten(-1, (-1, 128)).abs().amax(-1).clamp_min(1e-10) / 448
    return torch.exp2(torch.ceil(torch.log2(scale))) if pow2 else scale
