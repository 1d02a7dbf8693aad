"""Norm per head, rotation and cache insertion in float64, token by token."""

import torch


def head_norm(x, weight, eps, plus_one):
    y = x.double()
    return y / torch.sqrt(y.square().mean(-1, keepdim=True) + eps) * (weight.double() + (1.0 if plus_one else 0.0))


def rotate(x, positions, cos, sin, interleaved):
    """x float64 [T, H, D]."""
    out = x.clone()
    half = cos.shape[1]
    c, s = cos.double()[positions.long()][:, None], sin.double()[positions.long()][:, None]
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    a, b = x[..., first], x[..., second]
    out[..., first], out[..., second] = a * c - b * s, b * c + a * s
    return out


def insert(cache, x, slots):
    """cache [blocks, heads, size, D] changed in place; x [T, heads, D]."""
    size = cache.shape[2]
    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            cache[slot // size, :, slot % size] = x[i].to(cache.dtype)
