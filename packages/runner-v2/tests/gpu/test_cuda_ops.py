"""The CUDA provider, its attention backend and whole tiny models with the kernels themselves, on a GPU."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

from lamella.runner_v2.attention.cuda import CudaAttention
from lamella.runner_v2.ops.providers.cuda import CudaProvider
from lamella.runner_v2.ops.providers.torch import TorchProvider
from lamella.runner_v2.testing.assembled import (
    KERNEL_SIZES,
    MAX_LEN,
    MAX_TOKENS,
    Assembled,
    mixed_steps,
    padded,
    step_of,
)
from lamella.runner_v2.testing.attention_cases import KERNEL_CASES, make_data, run_case
from lamella.runner_v2.testing.op_cases import op_cases, placed, relative_error, rounded, run_op
from lamella.runner_v2.testing.poison import poisoned_memory
from lamella.runner_v2.testing.tiny_models import TINY_CONFIGS, write_folder

pytestmark = pytest.mark.gpu
CASES = {case.name: case for case in op_cases() if case.site.op != "decoder_layer"}
ATTENTION = {case.name: case for case in KERNEL_CASES}
REFUSED = {f"gated_activation {kind} 40x33" for kind in ("silu", "gelu_tanh", "gelu")}
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for family in TINY_CONFIGS:
        write_folder(folder / family, family, seed=3, dtype="bfloat16", tokenizer=False, **KERNEL_SIZES)
    return folder


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_ops(kernels: ModuleType, name: str, dtype: torch.dtype) -> None:
    case, provider = CASES[name], CudaProvider(kernels, 64)
    ours = placed(case, dtype, "cuda")
    if name in REFUSED:
        assert provider.supports(ours.site) is not None
        return
    assert provider.supports(ours.site) is None
    expected = run_op(TorchProvider().pick(case.site), rounded(case, dtype))
    with poisoned_memory():
        actual = run_op(provider.pick(ours.site), ours)
    for one, reference in zip(actual, expected, strict=True):
        assert one.is_cuda
        assert one.shape == reference.shape
        assert relative_error(one, reference) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ATTENTION)
def test_attention(kernels: ModuleType, name: str, dtype: torch.dtype) -> None:
    case, backend = ATTENTION[name], CudaAttention(kernels)
    for kv_dtype in (dtype, torch.float8_e4m3fn):
        limits = case.limits(kv_dtype, dtype, "cuda")
        assert backend.supports(limits) is None
        with poisoned_memory():
            backend.bind(limits)
            data = make_data(case, kv_dtype, dtype=dtype, device="cuda")
            out, lse = run_case(backend, data, fused=False)
        assert relative_error(out, data.out) < TOLERANCE[dtype]
        assert relative_error(lse, data.lse) < 2e-3


def assembled(kernels: ModuleType, path: Path, dtype: torch.dtype, kv_dtype: str = "auto") -> Assembled:
    providers = (CudaProvider(kernels, MAX_TOKENS), TorchProvider(dtype))
    return Assembled(path, providers, dtype, kv_dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_families(kernels: ModuleType, folder: Path, family: str, dtype: torch.dtype) -> None:
    """As far from the reference in float32 as that reference is in 16 bits.

    But for the rows for which an expert was chosen by less than a rounding: any arithmetic in 16 bits has some, the
    reference others than we. They are few, and no further off than a reference's own.
    """
    path = folder / family
    exact, in_16_bits = (Assembled(path, (TorchProvider(t),), t) for t in (torch.float32, dtype))
    ours = assembled(kernels, path, dtype)
    results: list[tuple[torch.Tensor, ...]] = []
    for i, batch in enumerate(mixed_steps(ours.config.vocab_size)):
        expected = exact.step(batch)
        logits = ours.step(padded(batch, 3) if i == 4 else batch)[: len(expected)].cpu()
        assert relative_error(logits, expected) < 0.1
        results.append((logits, in_16_bits.step(batch), expected))
    logits, limit, expected = (torch.cat(column).float() for column in zip(*results, strict=True))
    errors, limits = ((x - expected).norm(dim=-1) / expected.norm(dim=-1) for x in (logits, limit))
    assert errors.median() < 1.25 * limits.median()
    if ours.config.layers[-1].moe is None:
        assert relative_error(logits, expected) < 1.25 * relative_error(limit, expected)
    else:
        chosen_otherwise = errors > 5 * limits.median()
        assert chosen_otherwise.sum() <= 0.04 * len(errors)
        assert errors[~chosen_otherwise].square().mean().sqrt() < 1.25 * limits.square().mean().sqrt()


@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_a_decoding_step_is_recorded(kernels: ModuleType, folder: Path, family: str) -> None:
    """Plan, layers and logits in one graph give the same bits as without it, for later steps too."""
    ours = assembled(kernels, folder / family, torch.bfloat16)
    ids = torch.arange(MAX_LEN)[None].repeat(3, 1) % ours.config.vocab_size
    ours.step(step_of(ids, [(0, 0, 30), (1, 0, 20), (2, 0, 9)]))
    batches = [
        step_of(ids, [(0, 30 + n, 1), (1, 20 + n, 1), (2, 9 + n, 1)], num_single=3)._replace(max_seq_len=64)
        for n in range(3)
    ]
    expected = [ours.step(batch) for batch in batches]
    held = ours.prepared(batches[0])
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        ours.forward(held)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = ours.forward(held)
    for batch, logits in zip(batches, expected, strict=True):
        for into, tensor in zip(_tensors(held), _tensors(ours.prepared(batch)), strict=True):
            into.copy_(tensor)
        graph.replay()
        assert torch.equal(result, logits)


def _tensors(batch: tuple[object, ...]) -> list[torch.Tensor]:
    flat = [x for field in batch for x in (field if isinstance(field, tuple) else (field,))]
    return [x for x in flat if isinstance(x, torch.Tensor)]
