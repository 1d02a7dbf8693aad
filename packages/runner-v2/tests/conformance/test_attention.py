"""Every attention backend of this build against dense attention in float64."""

import pytest
import torch

from lamella.runner_v2.attention import registry
from lamella.runner_v2.attention.backend import AttentionBackend
from lamella.runner_v2.attention.paged import PagedAttention
from lamella.runner_v2.config import RunnerConfig
from lamella.runner_v2.ops.providers.registry import create_providers
from lamella.runner_v2.testing.attention_cases import ATTENTION_CASES, AttentionCase, make_data, run_case
from lamella.runner_v2.testing.poison import poisoned_memory

BACKENDS = {
    **{p.name: registry.create_backend(p.name, False) for p in create_providers(RunnerConfig(model_path=""))},
    "torch by query": PagedAttention(batch_invariant=True),
}
CASES = {case.name: case for case in ATTENTION_CASES}


def bound(name: str, case: AttentionCase, kv_dtype: torch.dtype) -> AttentionBackend:
    backend = BACKENDS[name]
    reason = backend.supports(case.limits(kv_dtype))
    if reason is not None:
        assert not name.startswith("torch")
        pytest.skip(f"{name} refuses: {reason}")
    backend.bind(case.limits(kv_dtype))
    return backend


@pytest.mark.parametrize("fused", [False, True], ids=["write, then run", "fused"])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_equals_dense(case: str, backend: str, kv_dtype: torch.dtype, fused: bool) -> None:
    one = bound(backend, CASES[case], kv_dtype)
    data = make_data(CASES[case], kv_dtype)
    with poisoned_memory():
        out, lse = run_case(one, data, fused)
    torch.testing.assert_close(out, data.out, rtol=1e-4, atol=2e-5 if one.name == "torch" else 2e-3)
    torch.testing.assert_close(lse, data.lse, rtol=1e-5, atol=2e-5 if one.name == "torch" else 2e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_without_slot_are_not_written(backend: str) -> None:
    case = AttentionCase("plain", ((5, 5), (3, 3)))
    one = bound(backend, case, torch.float16)
    data = make_data(case, torch.float16)
    slots = data.batch.slot_mapping[0].clone()
    slots[2] = -1
    plan = one.plan(data.batch._replace(slot_mapping=(slots,)), 0)
    one.write(data.k, data.v, data.cache, plan)
    written = ~torch.isnan(data.cache.k[:, 0, :, 0])
    assert int(written.sum()) == 7
    assert not written[0].any()


@pytest.mark.parametrize("backend", [name for name, backend in BACKENDS.items() if backend.batch_invariant])
@pytest.mark.parametrize("window", [None, 16])
def test_bits_depend_on_the_row_alone(backend: str, window: int | None) -> None:
    """Chunks of any length, and any company, give a query the same bits."""
    rows = ((70, 70), (33, 33), (64, 64))
    whole = AttentionCase("whole", rows, window=window)
    one = bound(backend, whole, torch.float16)
    data = make_data(whole, torch.float16)
    expected, _ = run_case(one, data, fused=False)
    start = 0
    for (seq_len, _), table in zip(rows, data.batch.block_tables[0], strict=True):
        q, k, v = (x[start : start + seq_len] for x in (data.q, data.k, data.v))
        position = 0
        for chunk in (1, 16, 7, 24, seq_len):
            end = min(position + chunk, seq_len)
            batch = single_row(data.batch, position, end, table, whole.block_size)
            plan = one.plan(batch, 0)
            out = torch.empty_like(q[position:end])
            one.run(q[position:end], k[position:end], v[position:end], data.cache, plan, out)
            assert torch.equal(out, expected[start + position : start + end])
            position = end
        start += seq_len


def single_row(batch, start: int, end: int, table: torch.Tensor, block_size: int):
    positions = torch.arange(start, end, dtype=torch.int32)
    slots = table[positions.long() // block_size].long() * block_size + positions.long() % block_size
    return batch._replace(
        num_tokens=end - start,
        num_rows=1,
        max_query_len=end - start,
        max_seq_len=end,
        positions=positions,
        query_start=torch.tensor([0, end - start], dtype=torch.int32),
        seq_lens=torch.tensor([end], dtype=torch.int32),
        block_tables=(table.unsqueeze(0),),
        slot_mapping=(slots,),
    )
