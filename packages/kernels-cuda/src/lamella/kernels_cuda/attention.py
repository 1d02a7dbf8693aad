"""Paged decode attention, split over the keys by a schedule made on the device, and the merging of attention states.

schedule = decode_schedule(seq_lens, num_heads, num_kv_heads)     once per step
out = paged_decode(q, k_cache, v_cache, ..., schedule=schedule)   every layer with the same heads and window
"""

from __future__ import annotations

import functools

import torch

from lamella.kernels_cuda.device import native


@functools.cache
def decode_parts(device: int = 0) -> int:
    """Parts into which a schedule cuts a step's work so that the device is full."""
    return int(native().decode_parts(device))


def decode_schedule_size(
    batch: int, num_heads: int, num_kv_heads: int, *, num_queries: int = 1, parts: int | None = None, device: int = 0
) -> int:
    """Elements (int32) of a schedule."""
    parts = decode_parts(device) if parts is None else parts
    return int(native().decode_schedule_size(batch, num_queries, num_heads, num_kv_heads, parts))


def paged_decode_workspace_size(
    num_heads: int, num_kv_heads: int, head_dim: int, *, num_queries: int = 1, parts: int | None = None, device: int = 0
) -> int:
    """Bytes of workspace that paged_decode() needs, whatever the batch; parts as for the schedule."""
    parts = decode_parts(device) if parts is None else parts
    return int(native().paged_decode_workspace(num_queries, num_heads, num_kv_heads, head_dim, parts))


def decode_schedule(
    seq_lens: torch.Tensor,  # [batch] int32, the new tokens included
    num_heads: int,
    num_kv_heads: int,
    *,
    num_queries: int = 1,
    window: int = 0,
    out: torch.Tensor | None = None,  # [decode_schedule_size()] int32
) -> torch.Tensor:
    """The schedule of one step: an even share of the keys for each part. Nothing is read on the host.

    num_queries and window (0: none) as paged_decode() will get them; with another window another schedule. It also
    holds the counters by which blocks find out who is last: no two paged_decode() may use it at the same time.
    """
    if out is None:
        size = decode_schedule_size(
            seq_lens.shape[0], num_heads, num_kv_heads, num_queries=num_queries, device=seq_lens.device.index or 0
        )
        out = torch.empty(size, dtype=torch.int32, device=seq_lens.device)
    native().decode_schedule(out, seq_lens, num_queries, num_heads, num_kv_heads, window)
    return out


def paged_decode(
    q: torch.Tensor,  # [batch, num_queries, num_heads, head_dim] bfloat16 or float16
    k_cache: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim], any strides; type of q or e4m3
    v_cache: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim]
    block_table: torch.Tensor,  # [batch, max_blocks] int32
    seq_lens: torch.Tensor,  # [batch] int32
    scale: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,  # [num_heads] float32
    k_scale: torch.Tensor | None = None,  # [1] or [num_kv_heads] float32
    v_scale: torch.Tensor | None = None,  # [1] or [num_kv_heads] float32
    schedule: torch.Tensor | None = None,  # of decode_schedule()
    workspace: torch.Tensor | None = None,  # [paged_decode_workspace_size()] uint8
    out: torch.Tensor | None = None,  # [batch, num_queries, num_heads, head_dim]
    lse: torch.Tensor | None = None,  # [batch, num_queries, num_heads] float32, natural logarithm
    follows_write: bool = False,
) -> torch.Tensor:
    """softmax(scale * q k) v over the keys in the cache, for 1 to 8 new tokens per sequence, their keys included.

    Query i of n stands at p = seq_len - n + i and sees keys max(0, p - window + 1) to p; window 0: from 0. softcap c:
    scores become c * tanh(score / c). sinks: e^sink more in each denominator, and in lse. What the cache means is
    k_scale * k, v_scale * v. A query without a visible key gives 0 and lse -inf, sink or not. What lies outside the
    sequences' keys, NaN too, has no effect. A [num_blocks, block_size, num_kv_heads, head_dim] cache goes in as its
    transpose(1, 2). Head dims 64, 80, 96, 128, 192, 256; block sizes are multiples of 16. The same input gives the same
    bits. ValueError names the argument that does not fit.

    follows_write: the kernel right before this one on the stream is rope_write() or kv_write() of the new tokens;
    schedule, which is then given, seq_lens, block_table and all older keys were written before that. Loading begins
    while it runs.
    """
    batch, num_queries, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[1]
    if schedule is None:
        follows_write = False  # what comes before is the schedule
        schedule = decode_schedule(seq_lens, num_heads, num_kv_heads, num_queries=num_queries, window=window)
    if workspace is None:
        # a schedule tells how many parts it has by its size
        groups = decode_schedule_size(1, num_heads, num_kv_heads, num_queries=num_queries, parts=0) - 4
        parts = max((schedule.shape[0] - batch * groups) // 4 - 1, 1)
        size = paged_decode_workspace_size(num_heads, num_kv_heads, head_dim, num_queries=num_queries, parts=parts)
        workspace = torch.empty(size, dtype=torch.uint8, device=q.device)
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    if k_cache.dtype == torch.float8_e4m3fn:
        k_cache = k_cache.view(torch.uint8)
    if v_cache.dtype == torch.float8_e4m3fn:
        v_cache = v_cache.view(torch.uint8)
    native().paged_decode(
        out, q, k_cache, v_cache, block_table, seq_lens, schedule, workspace,
        scale, window, softcap, sinks, k_scale, v_scale, lse, follows_write,
    )  # fmt: skip
    return out


def merge_states(
    o1: torch.Tensor,  # [..., head_dim], bfloat16, float16 or float32
    lse1: torch.Tensor,  # [...] float32
    o2: torch.Tensor,  # [..., head_dim]
    lse2: torch.Tensor,  # [...] float32
    *,
    out: torch.Tensor | None = None,  # [..., head_dim]
    lse: torch.Tensor | None = None,  # [...] float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two sets of keys -> over their union, and its lse; out may be o1 or o2.

    A state with lse -inf (or +inf, as some libraries write it) counts nothing whatever its o holds; two of them give 0
    and -inf.
    """
    return _merge(o1, lse1, o2[None], lse2[None], out, lse)


def merge_many_states(
    o: torch.Tensor,  # [num_states, ..., head_dim]
    lse: torch.Tensor,  # [num_states, ...] float32
    *,
    out: torch.Tensor | None = None,  # [..., head_dim]
    out_lse: torch.Tensor | None = None,  # [...] float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """As merge_states() for one state or more; they are summed in their order."""
    if o.shape[0] == 0:
        raise ValueError("o: has no state")
    return _merge(o[0], lse[0], o[1:], lse[1:], out, out_lse)


def _merge(
    first: torch.Tensor,  # [..., head_dim]
    first_lse: torch.Tensor,  # [...]
    rest: torch.Tensor,  # [num_states - 1, ..., head_dim]
    rest_lse: torch.Tensor,  # [num_states - 1, ...]
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty_like(first, memory_format=torch.contiguous_format) if out is None else out
    lse = torch.empty(first.shape[:-1], dtype=torch.float32, device=first.device) if lse is None else lse
    width = first.shape[-1]
    native().merge_states(
        _rows(out, "out"), lse.view(-1), _rows(first, "o1"), first_lse.reshape(-1),
        rest.reshape(rest.shape[0], first.numel() // max(width, 1), width),
        rest_lse.reshape(rest.shape[0], first_lse.numel()),
    )  # fmt: skip
    return out, lse


def _rows(tensor: torch.Tensor, name: str) -> torch.Tensor:
    try:
        return tensor.view(-1, tensor.shape[-1]) if tensor.numel() else tensor.reshape(0, tensor.shape[-1])
    except RuntimeError:
        raise ValueError(f"{name}: its rows do not lie at one distance") from None
