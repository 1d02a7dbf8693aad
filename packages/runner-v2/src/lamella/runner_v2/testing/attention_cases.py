"""Batches for attention backends, and the oracle: dense softmax attention in float64.

A case is a list of rows (length after the step, tokens of the step). Keys and values of all positions are random; those
before the step lie in the cache already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from lamella.runner_v2.attention.backend import AttentionBackend
from lamella.runner_v2.attention.metadata import AttentionLimits
from lamella.runner_v2.inputs import InputBatch, LayerCache
from lamella.runner_v2.testing.poison import poison


class AttentionCase(NamedTuple):
    """One step of one layer."""

    name: str
    rows: tuple[tuple[int, int], ...]
    """(seq_len after the step, query_len) of each row."""
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 32
    window: int | None = None
    softcap: float | None = None
    block_size: int = 16
    num_single: int = 0

    def limits(self, kv_dtype: torch.dtype, dtype: torch.dtype = torch.float32, device: str = "cpu") -> AttentionLimits:
        return AttentionLimits(
            device=device,
            dtype=dtype,
            kv_dtype=kv_dtype,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            softcap=self.softcap,
            block_size=self.block_size,
            windows=(self.window,),
            max_num_rows=max(8, len(self.rows)),
            max_num_tokens=max(64, sum(query_len for _, query_len in self.rows)),
            max_model_len=2048,
        )


class AttentionData(NamedTuple):
    """Tensors of a case: everything a backend gets, and what must come out."""

    batch: InputBatch
    cache: LayerCache
    q: torch.Tensor  # [T, num_heads, head_dim]
    k: torch.Tensor  # [T, num_kv_heads, head_dim] of the step's tokens
    v: torch.Tensor
    out: torch.Tensor  # [T, num_heads, head_dim] expected
    lse: torch.Tensor  # [T, num_heads] expected


ATTENTION_CASES = (
    AttentionCase("decode", ((1, 1), (15, 1), (16, 1), (17, 1), (300, 1))),
    AttentionCase("prompt", ((75, 75),)),
    AttentionCase("chunk", ((75, 20), (40, 40), (33, 1))),
    AttentionCase("drafts", ((40, 4), (19, 3), (64, 1), (8, 8))),
    AttentionCase("window", ((75, 20), (60, 1), (9, 9), (17, 2)), window=16),
    AttentionCase("short window", ((75, 75), (40, 1)), window=3),
    AttentionCase("softcap", ((50, 50), (20, 1)), softcap=5.0),
    AttentionCase("every head its own", ((40, 13), (22, 1)), num_heads=4, num_kv_heads=4),
    AttentionCase("one kv head", ((40, 13), (22, 1)), num_heads=9, num_kv_heads=1),
    AttentionCase("wide heads", ((70, 5), (22, 1)), head_dim=128),
    AttentionCase("odd heads", ((40, 7), (22, 1)), head_dim=80, num_heads=3, num_kv_heads=3),
    AttentionCase("blocks of 32", ((75, 20), (60, 1)), block_size=32),
    AttentionCase("long", ((1500, 3), (700, 130))),
)

KERNEL_CASES = (
    *(case if case.head_dim >= 64 else case._replace(head_dim=64) for case in ATTENTION_CASES),
    *(AttentionCase(f"heads of {dim}", ((70, 30), (22, 1)), head_dim=dim) for dim in (96, 192, 256)),
    AttentionCase("blocks of 64", ((200, 20), (130, 1)), head_dim=64, block_size=64),
    AttentionCase("single rows first", ((33, 1), (80, 1), (75, 20), (16, 16), (200, 3)), head_dim=64, num_single=2),
    AttentionCase("windowed singles", ((33, 1), (80, 1), (75, 20)), head_dim=64, num_single=2, window=16),
    AttentionCase("all single", ((33, 1), (80, 1)), head_dim=128, num_single=2),
)
"""The cases with head dimensions that kernels of devices serve, and some of their own."""


def make_data(
    case: AttentionCase, kv_dtype: torch.dtype, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> AttentionData:
    """Random tensors. Blocks are scattered; the cache is NaN wherever no row has a token, in block 0 too.

    dtype: of q, k and v; out and lse are float32 on the CPU, whatever it is.
    """
    generator = torch.Generator().manual_seed(seed)
    num_blocks = sum(-(-seq_len // case.block_size) for seq_len, _ in case.rows) + 3
    shape = (num_blocks, case.num_kv_heads, case.block_size, case.head_dim)
    cache = LayerCache(*(torch.full(shape, torch.nan).to(kv_dtype) for _ in range(2)))
    order = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    queries, new_keys, new_values, outs, sums, tables = [], [], [], [], [], []
    for seq_len, query_len in case.rows:
        q = torch.randn(query_len, case.num_heads, case.head_dim, generator=generator).to(dtype).float()
        k, v = (
            # what the cache can hold, so that the oracle works on the same numbers
            torch.randn(seq_len, case.num_kv_heads, case.head_dim, generator=generator).to(kv_dtype).float()
            for _ in range(2)
        )
        table = [order.pop() for _ in range(-(-seq_len // case.block_size))]
        for position in range(seq_len - query_len):
            block, offset = table[position // case.block_size], position % case.block_size
            cache.k[block, :, offset], cache.v[block, :, offset] = k[position].to(kv_dtype), v[position].to(kv_dtype)
        out, lse = dense_attention(q, k, v, case)
        queries.append(q)
        new_keys.append(k[seq_len - query_len :])
        new_values.append(v[seq_len - query_len :])
        outs.append(out)
        sums.append(lse)
        tables.append(table)
    batch = make_batch(case.rows, tables, case.block_size, case.window)._replace(num_single=case.num_single)
    q, k, v = (torch.cat(t).to(device, dtype) for t in (queries, new_keys, new_values))
    cache = LayerCache(*(pool.to(device) for pool in cache))
    return AttentionData(on_device(batch, device), cache, q, k, v, torch.cat(outs), torch.cat(sums))


def make_batch(
    rows: Sequence[tuple[int, int]], tables: Sequence[Sequence[int]], block_size: int, window: int | None = None
) -> InputBatch:
    """The InputBatch of such a step, in one group. Blocks left of the window are replaced by the null block."""
    query_lens = [query_len for _, query_len in rows]
    query_start = torch.tensor([0, *query_lens]).cumsum(0)
    positions = [torch.arange(seq_len - query_len, seq_len) for seq_len, query_len in rows]
    slots = [torch.tensor(table)[p // block_size] * block_size + p % block_size for table, p in zip(tables, positions)]
    padded = torch.zeros(len(rows), max(len(table) for table in tables), dtype=torch.int32)
    for i, ((seq_len, query_len), table) in enumerate(zip(rows, tables, strict=True)):
        first = 0 if window is None else max(0, seq_len - query_len - window + 1) // block_size
        padded[i, first : len(table)] = torch.tensor(table[first:], dtype=torch.int32)
    num_tokens = int(query_start[-1])
    return InputBatch(
        num_tokens=num_tokens,
        num_rows=len(rows),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_len for seq_len, _ in rows),
        rows=torch.arange(len(rows), dtype=torch.int32),
        token_ids=torch.arange(num_tokens, dtype=torch.int32) % 7,
        positions=torch.cat(positions).int(),
        query_start=query_start.int(),
        seq_lens=torch.tensor([seq_len for seq_len, _ in rows], dtype=torch.int32),
        block_tables=(padded,),
        slot_mapping=(torch.cat(slots),),
        logits_idx=(query_start[1:] - 1).int(),
        logits_start=torch.arange(len(rows) + 1, dtype=torch.int32),
    )


def on_device(batch: InputBatch, device: str) -> InputBatch:
    """The batch with all its tensors there."""

    def moved(field: Any) -> Any:
        if isinstance(field, tuple):
            return tuple(tensor.to(device) for tensor in field)
        return field.to(device) if isinstance(field, torch.Tensor) else field

    return InputBatch(*map(moved, batch))


def dense_attention(
    q: torch.Tensor,  # [query_len, num_heads, head_dim] the last query_len positions
    k: torch.Tensor,  # [seq_len, num_kv_heads, head_dim]
    v: torch.Tensor,
    case: AttentionCase,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, in float64 -> float32 output [query_len, num_heads, head_dim] and log-sum-exp."""
    share = case.num_heads // case.num_kv_heads
    k64, v64 = (x.double().repeat_interleave(share, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k64) * case.head_dim**-0.5
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    key = torch.arange(k.shape[0])
    query = key[k.shape[0] - q.shape[0] :, None]
    seen = key <= query
    if case.window is not None:
        seen &= key > query - case.window
    scores = scores.masked_fill(~seen, -torch.inf)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v64)
    return out.float(), scores.logsumexp(-1).T.float()


def run_case(backend: AttentionBackend, data: AttentionData, fused: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Plan, write and run with a bound backend -> output and log-sum-exp. fused: keys and values go to run()."""
    plan = backend.plan(data.batch, 0)
    out, lse = poison(torch.zeros_like(data.q)), poison(torch.zeros_like(data.lse, device=data.q.device))
    if fused:
        backend.run(data.q, data.k, data.v, data.cache, plan, out, lse)
    else:
        backend.write(data.k, data.v, data.cache, plan)
        backend.run(data.q, None, None, data.cache, plan, out, lse)
    return out, lse
