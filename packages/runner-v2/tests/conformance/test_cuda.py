"""The CUDA provider and its attention backend, over the stand-in of the kernels, against the references in float32."""

import pytest
import torch

from lamella.runner_v2.attention import cuda as cuda_attention
from lamella.runner_v2.attention.cuda import CudaAttention
from lamella.runner_v2.ops.providers.cuda import CudaProvider
from lamella.runner_v2.ops.providers.torch import TorchProvider
from lamella.runner_v2.testing import cuda_kernels
from lamella.runner_v2.testing.attention_cases import KERNEL_CASES, AttentionCase, make_data, run_case
from lamella.runner_v2.testing.op_cases import op_cases, placed, relative_error, rounded, run_op
from lamella.runner_v2.testing.poison import poisoned_memory

CASES = {case.name: case for case in op_cases() if case.site.op != "decoder_layer"}
ATTENTION = {case.name: case for case in KERNEL_CASES}
REFUSED = {f"gated_activation {kind} 40x33": "no multiple of 8" for kind in ("silu", "gelu_tanh", "gelu")}
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
DTYPES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_equals_reference(name: str, dtype: torch.dtype) -> None:
    case, provider = CASES[name], CudaProvider(cuda_kernels, 64, "cpu")
    ours = placed(case, dtype, "cpu")
    reason = provider.supports(ours.site)
    if name in REFUSED:
        assert reason is not None
        assert REFUSED[name] in reason
        return
    assert reason is None
    expected = run_op(TorchProvider().pick(case.site), rounded(case, dtype))
    with poisoned_memory():
        actual = run_op(provider.pick(ours.site), ours)
    assert len(actual) == len(expected)
    for one, reference in zip(actual, expected, strict=True):
        assert one.shape == reference.shape
        assert one.dtype in (dtype, reference.dtype)
        assert relative_error(one, reference) < TOLERANCE[dtype]


@pytest.mark.parametrize("fused", [False, True], ids=["write, then run", "fused"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_equals_dense(name: str, dtype: torch.dtype, fused: bool) -> None:
    case = ATTENTION[name]
    backend = CudaAttention(cuda_kernels, "cpu")
    for kv_dtype in (dtype, torch.float8_e4m3fn):
        limits = case.limits(kv_dtype, dtype)
        assert backend.supports(limits) is None
        with poisoned_memory():
            backend.bind(limits)
            data = make_data(case, kv_dtype, dtype=dtype)
            out, lse = run_case(backend, data, fused)
        assert out.dtype == dtype
        assert relative_error(out, data.out) < TOLERANCE[dtype]
        torch.testing.assert_close(lse, data.lse, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("query_len", "seq_len"), [(3, 131), (20, 200), (1, 300), (64, 640)])
def test_a_chunk_behind_a_long_prefix_is_cut(query_len: int, seq_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys in parts, merged: what the whole gives. One token is a decoding row, and not cut here."""
    monkeypatch.setattr(cuda_attention, "_MIN_PART", 32)
    case = AttentionCase("", ((seq_len, query_len),), 4, 2, 64)
    data = make_data(case, torch.bfloat16, dtype=torch.bfloat16)
    backend = CudaAttention(cuda_kernels, "cpu")
    backend.bind(case.limits(torch.bfloat16, torch.bfloat16))
    plan = backend.plan(data.batch, 0)
    assert (plan.parts is not None) == (query_len > 1)
    if plan.parts is not None:
        assert int(plan.parts.last_len) + int(plan.parts.seq_lens.sum()) == seq_len
        assert int(plan.parts.last_len) >= query_len
    out, lse = run_case(backend, data, False)
    assert relative_error(out, data.out) < TOLERANCE[torch.bfloat16]
    torch.testing.assert_close(lse, data.lse, rtol=1e-3, atol=1e-3)


def test_chunks_among_others_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_attention, "_MIN_PART", 32)
    case = AttentionCase("", ((200, 20), (300, 1)), 4, 2, 64)
    data = make_data(case, torch.bfloat16, dtype=torch.bfloat16)
    backend = CudaAttention(cuda_kernels, "cpu")
    backend.bind(case.limits(torch.bfloat16, torch.bfloat16))
    assert backend.plan(data.batch, 0).parts is None
