"""A layer behind attention, by its definition in float64, rounded where a tensor is written."""

import torch


class Tail:
    def __init__(self, dtype, eps):
        self.dtype, self.eps = dtype, eps

    def rounded(self, x):
        return x.to(self.dtype).double()

    def product(self, x, w):
        return self.rounded(x @ w.double().T)

    def norm(self, x, weight):
        scaled = self.rounded(x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt())
        return self.rounded(scaled * weight.double())

    def inner(self, x, w_gate_up):
        gate, up = self.product(x, w_gate_up).chunk(2, -1)
        return self.rounded(self.rounded(torch.nn.functional.silu(gate)) * up)


def tail(attended, w_o, residual, mlp_norm, w_gate_up, w_down, eps, next_norm=None, w_qkv=None):
    """Returns (residual, qkv) in float64."""
    t = Tail(residual.dtype, eps)
    stream = t.rounded(residual.double() + t.product(attended.double(), w_o))
    x = t.norm(stream, mlp_norm)
    stream = t.rounded(stream + t.product(t.inner(x, w_gate_up), w_down))
    return stream, None if w_qkv is None else t.product(t.norm(stream, next_norm), w_qkv)


def experts_tail(attended, w_o, residual, mlp_norm, choose, w13, w2, eps, next_norm=None, w_qkv=None):
    """Returns (residual, qkv) in float64. choose: from the normed stream to ids [T, k] and weights [T, k]."""
    t = Tail(residual.dtype, eps)
    stream = t.rounded(residual.double() + t.product(attended.double(), w_o))
    x = t.norm(stream, mlp_norm)
    ids, weights = choose(x)
    total = torch.zeros_like(stream)
    for token, (chosen, shares) in enumerate(zip(ids.tolist(), weights.tolist(), strict=True)):
        for expert, share in zip(chosen, shares, strict=True):
            total[token] += share * (w2[expert].double() @ t.inner(x[token : token + 1], w13[expert])[0])
    stream = t.rounded(stream + t.rounded(total))
    return stream, None if w_qkv is None else t.product(t.norm(stream, next_norm), w_qkv)
