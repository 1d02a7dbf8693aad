"""Attention of many new tokens per sequence over a paged KV cache that already holds their keys and a prefix."""

from __future__ import annotations

import torch

from lamella.kernels_cuda.device import native

_KERNELS = {None: 0, "portable": 1, "sm90": 2}  # None: the fastest that serves; others are for tests


def paged_prefill(
    q: torch.Tensor,  # [num_tokens, num_heads, head_dim] bfloat16 or float16
    k_cache: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim], any strides; type of q or e4m3
    v_cache: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim]
    block_table: torch.Tensor,  # [batch, max_blocks] int32
    cu_q: torch.Tensor,  # [batch + 1] int32
    seq_lens: torch.Tensor,  # [batch] int32, the new tokens included
    max_q_len: int,
    scale: float,
    *,
    causal: bool = True,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,  # [num_heads] float32
    k_scale: torch.Tensor | None = None,  # [1] or [num_kv_heads] float32
    v_scale: torch.Tensor | None = None,  # [1] or [num_kv_heads] float32
    out: torch.Tensor | None = None,  # [num_tokens, num_heads, head_dim]
    lse: torch.Tensor | None = None,  # [num_tokens, num_heads] float32, natural logarithm
    _kernel: str | None = None,
) -> torch.Tensor:
    """softmax(scale * q k) v for rows cu_q[b] to cu_q[b + 1] of q over the seq_lens[b] keys of sequence b in the cache.

    Query i of n stands at p = seq_len - n + i and sees keys max(0, p - window + 1) to p, window 0: from 0; without
    causal all keys. max_q_len: no sequence has more rows; it bounds the grid, together with the number of tokens. Rows
    beyond cu_q[-1] are left alone. softcap c: scores become c * tanh(score / c). sinks: e^sink more in each
    denominator, and in lse. What the cache means is k_scale * k, v_scale * v. A query without a visible key gives 0 and
    lse -inf, sink or not. What lies outside the sequences' keys, NaN too, has no effect. A [num_blocks, block_size,
    num_kv_heads, head_dim] cache goes in as its transpose(1, 2). Head dims 64, 80, 96, 128, 192, 256; block sizes are
    multiples of 16, fastest are multiples of 64. On Hopper head dims 64, 128 and 256 with a cache of q's type have a
    kernel of their own. The same input gives the same bits. ValueError names the argument that does not fit.
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    if k_cache.dtype == torch.float8_e4m3fn:
        k_cache = k_cache.view(torch.uint8)
    if v_cache.dtype == torch.float8_e4m3fn:
        v_cache = v_cache.view(torch.uint8)
    native().paged_prefill(
        out, q, k_cache, v_cache, block_table, cu_q, seq_lens, max_q_len,
        scale, causal, window, softcap, sinks, k_scale, v_scale, lse, _KERNELS[_kernel],
    )  # fmt: skip
    return out
