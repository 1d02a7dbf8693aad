"""The references against plain float64 formulas."""

import math

import pytest
import torch

from lamella.runner_v2.ops.activation import gated_activation
from lamella.runner_v2.ops.embedding import DenseTable, embed
from lamella.runner_v2.ops.linear import DenseLinear, linear
from lamella.runner_v2.ops.logits import DenseHead, logits
from lamella.runner_v2.ops.moe import DenseExperts, moe_experts, moe_route
from lamella.runner_v2.ops.norm import add_rms_norm, rms_norm
from lamella.runner_v2.ops.rotary import RopeTable, rope
from lamella.runner_v2.testing.op_cases import CHECKED_OPS, op_cases


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("plus_one", [False, True])
def test_norms(plus_one: bool) -> None:
    x, residual, weight = randn(3, 40), randn(3, 40, seed=1), randn(40, seed=2)
    factor = weight.double() + plus_one

    def expected(y: torch.Tensor) -> torch.Tensor:
        return y.double() / (y.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * factor

    close(rms_norm(x, weight, 1e-5, plus_one), expected(x))
    normed, added = add_rms_norm(x, residual, weight, 1e-5, plus_one)
    close(added, x.double() + residual.double())
    close(normed, expected(x.double() + residual.double()))


def test_norm_casts_before_or_after_the_factor() -> None:
    """In 16 bits the order of cast and factor shows; it is that of the models' own code."""
    x, weight = randn(1, 64).bfloat16(), randn(64, seed=1)
    scaled = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    assert torch.equal(rms_norm(x, weight, 1e-6, False), scaled.bfloat16() * weight.bfloat16())
    assert torch.equal(rms_norm(x, weight, 1e-6, True), (scaled * (1 + weight)).bfloat16())


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_rotates_pairs(interleaved: bool) -> None:
    """Pair i of a head at position p turns by the angle p * 0.1 * (i + 1); the dimensions behind stay."""
    angles = torch.outer(torch.arange(20).double(), 0.1 * torch.arange(1, 5).double())
    table = RopeTable(angles.cos().float(), angles.sin().float())
    qk = randn(2, 3, 12)
    positions = torch.tensor([0, 13], dtype=torch.int32)
    rotated = qk.clone()
    rope(rotated[:, :2], rotated[:, 2:], positions, table, interleaved)
    for token, position in enumerate(positions.tolist()):
        for i in range(4):
            first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + 4)
            turn = torch.tensor(position * 0.1 * (i + 1), dtype=torch.float64)
            a, b = qk[token, :, first].double(), qk[token, :, second].double()
            close(rotated[token, :, first], a * turn.cos() - b * turn.sin())
            close(rotated[token, :, second], b * turn.cos() + a * turn.sin())
    assert torch.equal(rotated[:, :, 8:], qk[:, :, 8:])


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "gelu"])
def test_gated_activation(kind: str) -> None:
    gate_up = randn(3, 10)
    gate, up = gate_up.double().chunk(2, -1)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    expected = {
        "silu": gate / (1 + (-gate).exp()),
        "gelu": 0.5 * gate * (1 + torch.erf(gate / math.sqrt(2))),
        "gelu_tanh": 0.5 * gate * (1 + torch.tanh(inner)),
    }[kind]
    close(gated_activation(gate_up, kind), expected * up)  # type: ignore[arg-type]


def test_linear_embed_and_logits() -> None:
    x, weight, bias = randn(3, 16), randn(5, 16, seed=1), randn(5, seed=2)
    product = x.double() @ weight.double().T
    close(linear(x, DenseLinear(weight, bias)), product + bias.double())
    close(linear(x, DenseLinear(weight, None)), product)
    ids = torch.tensor([4, 0, 4], dtype=torch.int32)
    close(embed(ids, DenseTable(weight, 4.0, torch.float32)), weight[ids.long()].double() * 4)
    norm = randn(16, seed=3)
    normed = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * norm.double()
    head = normed @ weight.double().T
    close(logits(x, DenseHead(norm, weight, 1e-6, False, None)), head)
    close(logits(x, DenseHead(norm, weight, 1e-6, False, 2.0)), 2 * torch.tanh(head / 2))


@pytest.mark.parametrize("norm_topk", [False, True])
def test_experts(norm_topk: bool) -> None:
    x, router = randn(6, 8), randn(6, 5, seed=1)
    gate_up, down = randn(5, 6, 8, seed=2), randn(5, 8, 3, seed=3)
    ids, weights = moe_route(router, 2, norm_topk)
    out = moe_experts(x, ids, weights, DenseExperts(gate_up, down, "silu"))
    for token in range(6):
        probs = router[token].double().softmax(-1)
        best = probs.argsort(descending=True)[:2]
        assert sorted(ids[token].tolist()) == sorted(best.tolist())
        total = probs[best].sum() if norm_topk else 1.0
        expected = torch.zeros(8, dtype=torch.float64)
        for expert in best.tolist():
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            expected += probs[expert] / total * (down[expert].double() @ (gate / (1 + (-gate).exp()) * up))
        close(out[token], expected)


def test_every_op_has_cases() -> None:
    """The conformance tests leave no op out."""
    assert {case.site.op for case in op_cases()} == {op.name for op in CHECKED_OPS}
