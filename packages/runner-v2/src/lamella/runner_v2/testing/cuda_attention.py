"""Stand-ins of the attention kernels. A schedule holds a digest of the step that it was made for, and paged_decode()
checks it."""

from __future__ import annotations

from itertools import pairwise

import torch

from lamella.runner_v2.testing.cuda_checks import HALF, check, check_dense, require

_PARTS = 8
_HEAD_DIMS = (64, 80, 96, 128, 192, 256)
_ROWS_OF_GROUP = 64


def decode_parts(device: int = 0) -> int:
    return _PARTS


def decode_schedule_size(
    batch: int, num_heads: int, num_kv_heads: int, *, num_queries: int = 1, parts: int | None = None, device: int = 0
) -> int:
    require(1 <= num_queries <= 8, "num_queries", "needed 1 to 8 new tokens per sequence")
    require(num_heads % num_kv_heads == 0, "num_heads", "is no multiple of num_kv_heads")
    groups = num_kv_heads * -(-(num_heads // num_kv_heads) * num_queries // _ROWS_OF_GROUP)
    return 4 * ((_PARTS if parts is None else parts) + 1) + batch * groups


def paged_decode_workspace_size(
    num_heads: int, num_kv_heads: int, head_dim: int, *, num_queries: int = 1, parts: int | None = None, device: int = 0
) -> int:
    return 4 * (_PARTS if parts is None else parts) * num_queries * num_heads * (head_dim + 2)


def decode_schedule(
    seq_lens: torch.Tensor,  # [batch] int32
    num_heads: int,
    num_kv_heads: int,
    *,
    num_queries: int = 1,
    window: int = 0,
    out: torch.Tensor | None = None,  # [decode_schedule_size()] int32
) -> torch.Tensor:
    check_dense(seq_lens, "seq_lens", (torch.int32,), (-1,))
    size = decode_schedule_size(seq_lens.shape[0], num_heads, num_kv_heads, num_queries=num_queries)
    if out is None:
        out = torch.empty(size, dtype=torch.int32, device=seq_lens.device)
    check_dense(out, "schedule", (torch.int32,), (size,))
    out.zero_()
    out[: len(_digest(seq_lens, num_queries, window))] = _digest(seq_lens, num_queries, window)
    return out


def paged_decode(
    q: torch.Tensor,  # [batch, num_queries, num_heads, head_dim]
    k_cache: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim]
    v_cache: torch.Tensor,
    block_table: torch.Tensor,  # [batch, max_blocks] int32
    seq_lens: torch.Tensor,  # [batch] int32
    scale: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
    k_scale: torch.Tensor | None = None,  # [1] or [num_kv_heads] float32
    v_scale: torch.Tensor | None = None,
    schedule: torch.Tensor | None = None,
    follows_write: bool = False,
    workspace: torch.Tensor | None = None,  # uint8
    out: torch.Tensor | None = None,  # [batch, num_queries, num_heads, head_dim]
    lse: torch.Tensor | None = None,  # [batch, num_queries, num_heads] float32
) -> torch.Tensor:
    check(q, "q", HALF, (-1, -1, -1, -1), aligned=True)
    batch, num_queries, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[1]
    if schedule is not None:
        size = decode_schedule_size(batch, num_heads, num_kv_heads, num_queries=num_queries)
        check_dense(schedule, "schedule", (torch.int32,), (size,))
        digest = _digest(seq_lens, num_queries, window)
        require(torch.equal(schedule[: len(digest)], digest), "schedule", "was made for another step or window")
    if workspace is not None:
        needed = paged_decode_workspace_size(num_heads, num_kv_heads, head_dim, num_queries=num_queries)
        check_dense(workspace, "workspace", (torch.uint8,), (-1,))
        require(workspace.numel() >= needed, "workspace", f"has {workspace.numel()} bytes, needed {needed}")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    check(out, "out", (q.dtype,), q.shape, aligned=True)
    if lse is not None:
        check_dense(lse, "lse", (torch.float32,), (batch, num_queries, num_heads))
    starts = torch.arange(batch + 1) * num_queries
    result, sums = _attend(
        q.reshape(-1, num_heads, head_dim), k_cache, v_cache, block_table, starts.tolist(), seq_lens, scale,
        True, window, softcap, k_scale, v_scale,
    )  # fmt: skip
    out.copy_(result.view(q.shape))
    if lse is not None:
        lse.copy_(sums.view(lse.shape))
    return out


def paged_prefill(
    q: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    k_cache: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim]
    v_cache: torch.Tensor,
    block_table: torch.Tensor,  # [batch, max_blocks] int32
    cu_q: torch.Tensor,  # [batch + 1] int32
    seq_lens: torch.Tensor,  # [batch] int32
    max_q_len: int,
    scale: float,
    *,
    causal: bool = True,
    window: int = 0,
    softcap: float = 0.0,
    k_scale: torch.Tensor | None = None,  # [1] or [num_kv_heads] float32
    v_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,  # [num_tokens, num_heads, head_dim]
    lse: torch.Tensor | None = None,  # [num_tokens, num_heads] float32
) -> torch.Tensor:
    check(q, "q", HALF, (-1, -1, -1), aligned=True)
    check_dense(cu_q, "cu_q", (torch.int32,), (seq_lens.shape[0] + 1,))
    starts = cu_q.tolist()
    require(starts[0] == 0 and starts[-1] <= q.shape[0], "cu_q", f"{starts} does not lie within q")
    longest = max((end - start for start, end in pairwise(starts)), default=0)
    require(longest <= max_q_len, "max_q_len", f"is {max_q_len}, a sequence has {longest} rows")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    check(out, "out", (q.dtype,), q.shape, aligned=True)
    if lse is not None:
        check_dense(lse, "lse", (torch.float32,), q.shape[:2])
    result, sums = _attend(
        q, k_cache, v_cache, block_table, starts, seq_lens, scale, causal, window, softcap, k_scale, v_scale
    )
    out[: starts[-1]] = result[: starts[-1]]
    if lse is not None:
        lse[: starts[-1]] = sums[: starts[-1]]
    return out


def _digest(seq_lens: torch.Tensor, num_queries: int, window: int) -> torch.Tensor:
    places = torch.arange(1, seq_lens.shape[0] + 1, device=seq_lens.device)
    total = (seq_lens.long() * places).sum() % 1_000_003
    fixed = torch.tensor([seq_lens.shape[0], num_queries, window], device=seq_lens.device)
    return torch.cat([fixed, total.view(1)]).to(torch.int32)


def _attend(
    q: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    starts: list[int],
    seq_lens: torch.Tensor,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row by row, over exactly the keys that a row's queries can see -> [num_tokens, ...] float32."""
    num_tokens, num_heads, head_dim = q.shape
    num_blocks, num_kv_heads, block_size, _ = k_cache.shape
    require(head_dim in _HEAD_DIMS, "q", f"has head_dim {head_dim}")
    require(block_size % 16 == 0, "k_cache", f"has block size {block_size}")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check(cache, name, (q.dtype, torch.float8_e4m3fn), (num_blocks, num_kv_heads, block_size, head_dim))
    check_dense(seq_lens, "seq_lens", (torch.int32,), (len(starts) - 1,))
    check(block_table, "block_table", (torch.int32,), (len(starts) - 1, -1))
    out = torch.zeros(num_tokens, num_heads, head_dim, device=q.device)
    lse = torch.full((num_tokens, num_heads), -torch.inf, device=q.device)
    share = num_heads // num_kv_heads
    for row, seq_len in enumerate(seq_lens.tolist()):
        start, end = starts[row], starts[row + 1]
        if end == start or seq_len <= 0:
            continue
        query = torch.arange(seq_len - (end - start), seq_len, device=q.device)
        first = max(0, int(query[0]) - window + 1) if window else 0
        key = torch.arange(first, seq_len, device=q.device)
        blocks, places = block_table[row].long()[key // block_size], key % block_size
        keys, values = (
            (_gathered(cache, blocks, places) * (1.0 if factor is None else factor.view(1, -1, 1)))
            .repeat_interleave(share, dim=1)
            .transpose(0, 1)
            for cache, factor in ((k_cache, k_scale), (v_cache, v_scale))
        )  # [num_heads, keys, head_dim]
        scores = torch.matmul(q[start:end].float().transpose(0, 1), keys.transpose(1, 2)) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        seen = torch.ones(len(query), len(key), dtype=torch.bool, device=q.device)
        if causal:
            seen &= key <= query[:, None]
        if window:
            seen &= key > query[:, None] - window
        scores = scores.masked_fill(~seen, -torch.inf)
        out[start:end] = torch.matmul(scores.softmax(-1).nan_to_num(0.0), values).transpose(0, 1)
        lse[start:end] = scores.logsumexp(-1).T
    return out, lse


def _gathered(cache: torch.Tensor, blocks: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """[keys, num_kv_heads, head_dim] float32."""
    if cache.dtype == torch.float8_e4m3fn:
        return cache.view(torch.uint8)[blocks, :, places].view(torch.float8_e4m3fn).float()
    return cache[blocks, :, places].float()
