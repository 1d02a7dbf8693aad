"""The stand-in of the CUDA kernels: it speaks their language, complains as they do, and does what they say."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
import torch

from lamella.runner_v2.sampling.choice import Choice
from lamella.runner_v2.sampling.kernels import TorchKernels
from lamella.runner_v2.testing import cuda_kernels as kernels

SOURCES = Path(__file__).parents[3] / "kernels-cuda" / "src" / "lamella" / "kernels_cuda"
STAND_IN = Path(kernels.__file__).parent
OWN = {"using"}


def functions(files: list[Path]) -> dict[str, tuple[list[str], set[str]]]:
    """Public functions -> arguments in order, keywords."""
    found = {}
    for file in files:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                names = [arg.arg for arg in node.args.args]
                found[node.name] = (names, {arg.arg for arg in node.args.kwonlyargs})
    return found


def test_signatures_are_those_of_the_kernels() -> None:
    """Arguments in the same order; no keyword that the kernels lack."""
    if not SOURCES.exists():
        pytest.skip("the kernels' package is not beside this one")
    real, ours = functions(sorted(SOURCES.glob("*.py"))), functions(sorted(STAND_IN.glob("cuda_*.py")))
    names = set(kernels.__all__) - OWN
    assert names <= set(real)
    for name in names:
        assert ours[name][0] == real[name][0], name
        assert ours[name][1] <= real[name][1], name


def rows(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_a_norm_between_two_products() -> None:
    """Product, residual, norm and product by fused ends are what they are one after another."""
    workspace = kernels.linear_workspace(5)
    x, w, hidden, gain, after = (
        rows(5, 64),
        rows(200, 64),
        rows(5, 200, seed=1),
        rows(200, seed=2),
        rows(16, 200, seed=3),
    )
    expected = ((x.float() @ w.float().T).bfloat16().float() + hidden.float()).bfloat16()
    scaled, squares = torch.empty_like(hidden), torch.empty(2, 5)
    out = kernels.linear(
        x, w, workspace, residual=hidden, gain=gain, scaled_out=scaled, squares_out=squares, out=hidden
    )
    assert out is hidden
    assert torch.equal(hidden, expected)
    torch.testing.assert_close(squares.sum(0), expected.float().pow(2).sum(1))
    torch.testing.assert_close(squares[1], expected[:, 128:].float().pow(2).sum(1))
    result = kernels.linear(scaled, after, workspace, squares_in=squares, eps=1e-5)
    normed = kernels.rms_norm(expected, gain, 1e-5)
    torch.testing.assert_close(result, kernels.linear(normed, after, workspace), rtol=0.05, atol=0.3)


def test_gate_and_up() -> None:
    x, gate, up = rows(3, 64), rows(128, 64, seed=1), rows(128, 64, seed=2)
    packed, workspace = kernels.pack_gate_up(gate, up), kernels.linear_workspace(3)
    assert torch.equal(packed[64:128], up[:64])
    both = torch.cat([kernels.linear(x, gate, workspace), kernels.linear(x, up, workspace)], dim=1)
    expected = kernels.gated_activation(both, "silu")
    # one rounding less
    torch.testing.assert_close(kernels.linear(x, packed, workspace, activation="silu"), expected, rtol=0.02, atol=0.01)
    assert torch.equal(kernels.silu_mul(kernels.linear(x, packed, workspace), tile=64), expected)


def test_slots_below_zero_write_nothing() -> None:
    cache = torch.zeros(2, 1, 16, 64, dtype=torch.bfloat16)
    kernels.kv_write(rows(3, 1, 64), rows(3, 1, 64), cache, cache.clone(), torch.tensor([17, -1, 3]))
    assert (cache.abs().sum((1, 3)) > 0).nonzero().tolist() == [[0, 3], [1, 1]]


def test_cached_keys_saturate() -> None:
    cache = torch.zeros(1, 1, 16, 64).to(torch.float8_e4m3fn)
    kernels.kv_write(rows(1, 1, 64) * 1000, rows(1, 1, 64), cache, cache.clone(), torch.tensor([0]))
    assert cache.float().abs().max() == 448


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sample(dtype: torch.dtype) -> None:
    """Parameters by row, padding, greedy rows and failures; log-probabilities of what was chosen."""
    logits = rows(5, 100, dtype=dtype)
    logits[3] = torch.nan
    warmth, seeds = torch.tensor([0.8, 0.0]), torch.tensor([7, 9])
    limits = {"top_k": torch.tensor([5, 0], dtype=torch.int32), "top_p": torch.tensor([0.9, 1.0], dtype=torch.float64)}
    positions = torch.arange(5, dtype=torch.int32)
    owner = torch.tensor([0, 0, 1, 0, -1], dtype=torch.int32)
    before = logits.clone()
    sampled = kernels.sample(logits, warmth, **limits, seeds=seeds, positions=positions, rows=owner, logprobs=True)
    torch.testing.assert_close(logits, before, equal_nan=True)
    choice = Choice(
        np.full(2, 0.8, np.float32),
        np.full(2, np.float32(1) / np.float32(0.8)),
        np.full(2, -np.inf),
        np.full(2, 5, np.int32),
        np.full(2, 0.9),
        np.full(2, 7, np.uint64),
        np.arange(2, dtype=np.int32),
    )
    expected = TorchKernels().choose(logits[:2].float(), choice)[0]
    assert sampled.ids.tolist() == [*expected.tolist(), int(logits[2].float().argmax()), 0, 0]
    assert sampled.status.tolist() == [0, 0, 0, 1, 0]
    assert sampled.logprobs is not None
    chosen = logits[:3].float().log_softmax(-1).gather(1, sampled.ids[:3].long()[:, None])[:, 0]
    torch.testing.assert_close(sampled.logprobs[:3], chosen)
    assert sampled.logprobs[3].isnan()


def test_edits_of_logits() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    counts = torch.tensor([[2, 0, 0, 0]], dtype=torch.int32)
    prompt = torch.tensor([[0b10]], dtype=torch.int32)
    one = torch.ones(1)
    kernels.apply_penalties(
        logits, counts, prompt=prompt, repetition=2 * one, frequency=0.5 * one, presence=one / 4,
        rows=torch.tensor([0, -1], dtype=torch.int32),
    )  # fmt: skip
    assert logits.tolist() == [[-0.25, -4.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]]
    kernels.apply_bitmask(
        logits, torch.tensor([[0b1010]], dtype=torch.int32), rows=torch.tensor([1], dtype=torch.int32)
    )
    assert logits[1].tolist() == [-torch.inf, 1.0, -torch.inf, 1.0]


def test_best_logprobs() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [torch.nan, 0.0, 0.0]])
    top = kernels.top_logprobs(logits, 2, torch.tensor([2, 1], dtype=torch.int32))
    assert top.ids.tolist() == [[1, 2], [0, 0]]
    torch.testing.assert_close(top.logprobs[0], logits[0].log_softmax(-1)[[1, 2]])
    assert top.ranks is not None
    assert top.ranks.tolist() == [2, 0]
    assert top.logprobs[1].isnan().all()
    torch.testing.assert_close(kernels.logsumexp(logits[:1]), logits[:1].logsumexp(-1))


def decode_arguments() -> dict[str, torch.Tensor]:
    return {
        "q": rows(2, 1, 4, 64),
        "k_cache": rows(3, 2, 16, 64),
        "v_cache": rows(3, 2, 16, 64, seed=1),
        "block_table": torch.tensor([[1], [2]], dtype=torch.int32),
        "seq_lens": torch.tensor([5, 16], dtype=torch.int32),
    }


def test_a_schedule_is_for_one_step() -> None:
    given = decode_arguments()
    schedule = kernels.decode_schedule(given["seq_lens"], 4, 2)
    kernels.paged_decode(**given, scale=0.1, schedule=schedule)
    given["seq_lens"] = torch.tensor([6, 16], dtype=torch.int32)
    with pytest.raises(ValueError, match="schedule: was made for another step"):
        kernels.paged_decode(**given, scale=0.1, schedule=schedule)
    given = decode_arguments()
    with pytest.raises(ValueError, match="schedule: was made for another step"):
        kernels.paged_decode(**given, scale=0.1, window=4, schedule=schedule)


def test_wrong_arguments_are_named() -> None:
    x, w, workspace = rows(4, 64), rows(32, 64), kernels.linear_workspace(4)
    complaints = {
        "w: is torch.float32": lambda: kernels.linear(x, w.float(), workspace),
        "bias: is torch.float32": lambda: kernels.linear(x, w, workspace, bias=torch.zeros(32)),
        "workspace: has": lambda: kernels.linear(rows(64, 64), w, workspace),
        "x: rows do not start": lambda: kernels.linear(rows(4, 80)[:, 4:68], w, workspace),
        "residual: has shape": lambda: kernels.linear(x, w, workspace, residual=rows(3, 32)),
        "scaled_out: is needed": lambda: kernels.linear(x, w, workspace, gain=rows(32)),
        "squares_out: has shape": lambda: kernels.linear(x, w, workspace, squares_out=torch.zeros(2, 4)),
        "weight: is torch.float32": lambda: kernels.rms_norm(x, torch.ones(64), 1e-5),
        "slot_mapping: is torch.int32": lambda: kernels.kv_write(
            rows(1, 1, 64), rows(1, 1, 64), rows(1, 1, 16, 64), rows(1, 1, 16, 64), torch.zeros(1, dtype=torch.int32)
        ),
        "block_table: is torch.int64": lambda: kernels.paged_decode(
            **{**decode_arguments(), "block_table": torch.zeros(2, 1, dtype=torch.int64)}, scale=1.0
        ),
        "seeds: missing": lambda: kernels.sample(torch.zeros(1, 4), torch.ones(1)),
    }
    for complaint, call in complaints.items():
        with pytest.raises(ValueError, match=complaint):
            call()
