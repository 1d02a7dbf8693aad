"""A dense layer behind attention, by its definition in float64, rounded where a tensor is written."""

import torch


def tail(attended, w_o, residual, mlp_norm, w_gate_up, w_down, eps, next_norm=None, w_qkv=None):
    """Returns (residual, qkv) in float64."""
    dtype = residual.dtype

    def rounded(x):
        return x.to(dtype).double()

    def product(x, w):
        return rounded(x @ w.double().T)

    def norm(x, weight):
        return rounded(rounded(x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()) * weight.double())

    stream = rounded(residual.double() + product(attended.double(), w_o))
    gate, up = product(norm(stream, mlp_norm), w_gate_up).chunk(2, -1)
    stream = rounded(stream + product(rounded(rounded(torch.nn.functional.silu(gate)) * up), w_down))
    return stream, None if w_qkv is None else product(norm(stream, next_norm), w_qkv)
