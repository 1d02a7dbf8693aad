"""Rotary embedding and the way of keys and values into the paged cache, in one pass or each alone.

A cache is [num_blocks, num_kv_heads, block_size, head_dim] with any strides but that a head is contiguous: a cache that
stores tokens before heads is passed as cache.transpose(1, 2). Token i goes to block slot // block_size, place
slot % block_size; a negative slot writes nothing.
"""

from __future__ import annotations

import torch

from lamella.kernels_cuda.device import native


def rope_write(
    q: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    k: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    v: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    positions: torch.Tensor,  # [num_tokens] int32 or int64
    cos: torch.Tensor,  # [num_positions, rotary_dim / 2] float32
    sin: torch.Tensor,  # [num_positions, rotary_dim / 2] float32
    k_cache: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim]
    v_cache: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim]
    slot_mapping: torch.Tensor,  # [num_tokens] int64
    *,
    q_norm: torch.Tensor | None = None,  # [head_dim]
    k_norm: torch.Tensor | None = None,  # [head_dim]
    eps: float = 1e-6,
    plus_one: bool = False,
    interleaved: bool = False,
    keep_k: bool = False,
    k_scale: torch.Tensor | None = None,  # [1] or [num_kv_heads] float32
    v_scale: torch.Tensor | None = None,  # [1] or [num_kv_heads] float32
) -> None:
    """Norm and rotate q in place; norm, rotate and cache k; cache v. k itself changes only with keep_k.

    q, k, v: bfloat16, float16 or float32, parts of wider rows as they come. The first rotary_dim elements of a head
    turn: pairs (i, i + rotary_dim / 2), or (2i, 2i + 1) if interleaved; (a, b) -> (a cos - b sin, b cos + a sin) in
    float32. q_norm, k_norm: weights of an RMSNorm over each head before that (plus_one: times 1 + weight). The cache
    has the type of k, or is float8_e4m3fn (or its uint8 view) and holds x / scale, saturated. Positions outside of the
    table (padding) count as its nearest row. ValueError names the argument that does not fit.
    """
    native().rope_write(
        q,
        k,
        v,
        positions,
        cos,
        sin,
        _raw(k_cache),
        _raw(v_cache),
        slot_mapping,
        q_norm,
        k_norm,
        eps,
        plus_one,
        interleaved,
        keep_k,
        k_scale,
        v_scale,
        "rope_write",
    )


def rope(
    q: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    k: torch.Tensor | None,  # [num_tokens, num_kv_heads, head_dim]
    positions: torch.Tensor,  # [num_tokens] int32 or int64
    cos: torch.Tensor,  # [num_positions, rotary_dim / 2] float32
    sin: torch.Tensor,  # [num_positions, rotary_dim / 2] float32
    *,
    q_norm: torch.Tensor | None = None,  # [head_dim]
    k_norm: torch.Tensor | None = None,  # [head_dim]
    eps: float = 1e-6,
    plus_one: bool = False,
    interleaved: bool = False,
) -> None:
    """Norm and rotate q and k in place, as rope_write() does."""
    native().rope_write(
        q,
        k,
        None,
        positions,
        cos,
        sin,
        None,
        None,
        None,
        q_norm,
        k_norm,
        eps,
        plus_one,
        interleaved,
        True,
        None,
        None,
        "rope",
    )


def kv_write(
    k: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    v: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    k_cache: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim]
    v_cache: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim]
    slot_mapping: torch.Tensor,  # [num_tokens] int64
    *,
    k_scale: torch.Tensor | None = None,  # [1] or [num_kv_heads] float32
    v_scale: torch.Tensor | None = None,  # [1] or [num_kv_heads] float32
) -> None:
    """Put k and v as they are into the cache, as rope_write() does."""
    native().rope_write(
        None,
        k,
        v,
        None,
        None,
        None,
        _raw(k_cache),
        _raw(v_cache),
        slot_mapping,
        None,
        None,
        0.0,
        False,
        False,
        False,
        k_scale,
        v_scale,
        "kv_write",
    )


def _raw(cache: torch.Tensor) -> torch.Tensor:
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache
