"""A stand-in for the namespace of lamella.kernels_cuda in plain torch, on any device.

    from lamella.runner_v2.testing import cuda_kernels
    with cuda_kernels.using(cuda_kernels):
        ModelRunner.load(path, providers=("cuda", "torch"), dtype="bfloat16")        # on a CPU

This module is itself the namespace. Names, keywords and meanings are those of the kernels' documentation, refusals too:
a wrong type, stride or workspace is a ValueError that names the argument. What needs fp8 weights is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lamella.runner_v2.ops.providers import cuda_kernels as loader
from lamella.runner_v2.testing.cuda_attention import (
    decode_parts,
    decode_schedule,
    decode_schedule_size,
    paged_decode,
    paged_decode_workspace_size,
    paged_prefill,
)
from lamella.runner_v2.testing.cuda_checks import REAL, check, check_dense, require
from lamella.runner_v2.testing.cuda_dense import (
    gated_activation,
    linear,
    linear_workspace,
    normed_rows,
    pack_gate_up,
    rms_norm,
    silu_mul,
)
from lamella.runner_v2.testing.cuda_experts import fused_moe, moe_route, moe_workspace, moe_workspace_bytes
from lamella.runner_v2.testing.cuda_layers import (
    experts_tail,
    experts_tail_rows,
    experts_tail_workspace,
    layer_tail,
    layer_tail_rows,
    layer_tail_workspace,
)
from lamella.runner_v2.testing.cuda_sampling import (
    apply_bitmask,
    apply_penalties,
    logsumexp,
    sample,
    sampling_workspace_bytes,
    top_logprobs,
)

__all__ = [
    "apply_bitmask",
    "apply_penalties",
    "available",
    "capability",
    "copy_block_pairs",
    "decode_parts",
    "decode_schedule",
    "decode_schedule_size",
    "experts_tail",
    "experts_tail_rows",
    "experts_tail_workspace",
    "fused_moe",
    "gated_activation",
    "kv_write",
    "layer_tail",
    "layer_tail_rows",
    "layer_tail_workspace",
    "linear",
    "linear_workspace",
    "logsumexp",
    "merge_many_states",
    "moe_route",
    "moe_workspace",
    "moe_workspace_bytes",
    "pack_gate_up",
    "paged_decode",
    "paged_decode_workspace_size",
    "paged_prefill",
    "rms_norm",
    "rope",
    "rope_write",
    "sample",
    "sampling_workspace_bytes",
    "silu_mul",
    "top_logprobs",
    "using",
    "why_not",
]

_FP8_MAX = 448.0


@contextmanager
def using(kernels: Any, device_type: str = "cpu") -> Iterator[None]:
    """Inside, these kernels are what load_kernels() finds for devices of this type. Not for several threads at once."""
    assert device_type not in loader.substitutes, f"{device_type} has a stand-in already"
    loader.substitutes[device_type] = kernels
    try:
        yield
    finally:
        del loader.substitutes[device_type]


def available(device: int = 0) -> bool:
    return True


def why_not(device: int = 0) -> str | None:
    return None


def capability(device: int = 0) -> tuple[int, int]:
    return (9, 0)


def rope(
    q: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    k: torch.Tensor | None,  # [num_tokens, num_kv_heads, head_dim]
    positions: torch.Tensor,  # [num_tokens] int32 or int64
    cos: torch.Tensor,  # [num_positions, rotary_dim / 2] float32
    sin: torch.Tensor,
    *,
    q_norm: torch.Tensor | None = None,  # [head_dim]
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    plus_one: bool = False,
    interleaved: bool = False,
) -> None:
    check_dense(positions, "positions", (torch.int32, torch.int64), (q.shape[0],))
    for name, x, weight in (("q", q, q_norm), ("k", k, k_norm)):
        if x is not None:
            check(x, name, (q.dtype,), (q.shape[0], -1, q.shape[2]))
            x.copy_(_rotated(x, weight, positions, cos, sin, eps, plus_one, interleaved))


def rope_write(
    q: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    k: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    v: torch.Tensor,
    positions: torch.Tensor,  # [num_tokens] int32 or int64
    cos: torch.Tensor,  # [num_positions, rotary_dim / 2] float32
    sin: torch.Tensor,
    k_cache: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim]
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,  # [num_tokens] int64
    *,
    q_norm: torch.Tensor | None = None,  # [head_dim]
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    plus_one: bool = False,
    interleaved: bool = False,
    keep_k: bool = False,
    k_scale: torch.Tensor | None = None,  # [1] or [num_kv_heads] float32
    v_scale: torch.Tensor | None = None,
) -> None:
    rotated = k if keep_k else k.clone()
    rope(
        q,
        rotated,
        positions,
        cos,
        sin,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=eps,
        plus_one=plus_one,
        interleaved=interleaved,
    )
    kv_write(rotated, v, k_cache, v_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale)


def kv_write(
    k: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    v: torch.Tensor,
    k_cache: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim]
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,  # [num_tokens] int64
    *,
    k_scale: torch.Tensor | None = None,  # [1] or [num_kv_heads] float32
    v_scale: torch.Tensor | None = None,
) -> None:
    num_tokens, num_kv_heads, head_dim = k.shape
    check_dense(slot_mapping, "slot_mapping", (torch.int64,), (num_tokens,))
    written = torch.nonzero(slot_mapping >= 0).squeeze(1)
    block_size = k_cache.shape[2]
    blocks, places = slot_mapping[written] // block_size, slot_mapping[written] % block_size
    for name, x, cache, scale in (("k_cache", k, k_cache, k_scale), ("v_cache", v, v_cache, v_scale)):
        check(x, name[0], REAL, (num_tokens, num_kv_heads, head_dim))
        is_fp8 = cache.dtype in (torch.float8_e4m3fn, torch.uint8)
        check(cache, name, (x.dtype, torch.float8_e4m3fn, torch.uint8), (-1, num_kv_heads, block_size, head_dim))
        require(scale is None or is_fp8, name.replace("cache", "scale"), "is for fp8 caches")
        values = x[written]
        if is_fp8:
            factor = 1.0 if scale is None else scale.view(1, -1, 1)
            clamped = (values.float() / factor).clamp(-_FP8_MAX, _FP8_MAX)
            values, cache = clamped.to(torch.float8_e4m3fn).view(torch.uint8), cache.view(torch.uint8)
        cache[blocks, :, places] = values


def merge_many_states(
    o: torch.Tensor,  # [num_states, ..., head_dim]
    lse: torch.Tensor,  # [num_states, ...] float32
    *,
    out: torch.Tensor | None = None,  # [..., head_dim]
    out_lse: torch.Tensor | None = None,  # [...] float32
) -> tuple[torch.Tensor, torch.Tensor]:
    require(o.shape[0] > 0, "o", "has no state")
    require(lse.shape == o.shape[:-1] and lse.dtype == torch.float32, "lse", f"is {lse.dtype} {list(lse.shape)}")
    sums = torch.where(lse.isinf(), -torch.inf, lse)
    total = sums.logsumexp(0)
    weights = torch.where(sums.isneginf(), 0.0, (sums - total).exp())
    states = torch.where(sums.isneginf().unsqueeze(-1), 0.0, o.float())  # what they hold counts nothing
    merged = (states * weights.unsqueeze(-1)).sum(0).to(o.dtype)
    out = merged if out is None else out.copy_(merged)
    return out, total if out_lse is None else out_lse.copy_(total)


def copy_block_pairs(
    src: torch.Tensor,  # [num_src_blocks, ..]
    dst: torch.Tensor,  # [num_dst_blocks, ..]
    pairs: torch.Tensor,  # [num_copies, 2] int64; negative skips a copy
    *,
    max_blocks: int | None = None,
) -> None:
    check_dense(pairs, "pairs", (torch.int64,), (-1, 2))
    for a, b in pairs.tolist():
        if a >= 0 and b >= 0:
            dst[b] = src[a]


def _rotated(
    x: torch.Tensor,  # [num_tokens, heads, head_dim]
    weight: torch.Tensor | None,  # [head_dim]
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
    plus_one: bool,
    interleaved: bool,
) -> torch.Tensor:
    if weight is not None:
        check_dense(weight, "q_norm", (x.dtype,), (x.shape[2],))
        x = normed_rows(x, weight, eps, plus_one)
    check_dense(cos, "cos", (torch.float32,), (-1, -1))
    check_dense(sin, "sin", (torch.float32,), cos.shape)
    half = cos.shape[1]
    require(2 * half <= x.shape[2], "cos", "has too many pairs")
    at = positions.long().clamp(0, cos.shape[0] - 1)
    c, s = cos[at].unsqueeze(1), sin[at].unsqueeze(1)
    result = x.float().clone()
    step: tuple[slice, slice] = (slice(0, half), slice(half, 2 * half))
    if interleaved:
        step = (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    a, b = result[..., step[0]].clone(), result[..., step[1]].clone()
    result[..., step[0]], result[..., step[1]] = a * c - b * s, b * c + a * s
    return result.to(x.dtype)
