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
import torch.nn.functional as F

from lamella.runner_v2.ops.providers import cuda_kernels as loader
from lamella.runner_v2.testing.cuda_attention import (
    decode_parts,
    decode_schedule,
    decode_schedule_size,
    paged_decode,
    paged_decode_workspace_size,
    paged_prefill,
)
from lamella.runner_v2.testing.cuda_checks import HALF, REAL, check, check_aligned, check_dense, require
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

_TILE = 64
_FLAGS = 1024
"""Bytes of a workspace that are zeros between calls."""
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


def rms_norm(
    x: torch.Tensor,  # [num_rows, width]
    weight: torch.Tensor,  # [width]
    eps: float,
    *,
    residual: torch.Tensor | None = None,  # [num_rows, width]
    plus_one: bool = False,
    out: torch.Tensor | None = None,  # [num_rows, width]
) -> torch.Tensor:
    check(x, "x", REAL, (-1, -1), aligned=True)
    require(x.shape[1] * x.element_size() % 16 == 0, "x", "rows are no multiple of 16 bytes")
    check_dense(weight, "weight", (x.dtype,), (x.shape[1],))
    if residual is not None:
        check(residual, "residual", (x.dtype,), x.shape, aligned=True)
        residual.copy_(residual.float() + x.float())
        x = residual
    normed = _normed(x, weight, eps, plus_one)
    if out is None:
        return normed
    check(out, "out", (x.dtype,), x.shape, aligned=True)
    return out.copy_(normed)


def gated_activation(
    x: torch.Tensor,  # [.., 2 * width]
    kind: str,
    *,
    tile: int = 0,
    out: torch.Tensor | None = None,  # [.., width]
) -> torch.Tensor:
    rows = x if x.dim() == 2 else x.view(-1, x.shape[-1])
    check(rows, "x", REAL, (-1, -1), aligned=True)
    require(rows.shape[1] % 2 == 0, "x", "has an odd width")
    require(rows.shape[1] // 2 * x.element_size() % 16 == 0, "x", "halves are no multiple of 16 bytes")
    require(tile in (0, _TILE), "tile", f"is {tile}, needed 0 or {_TILE}")
    gate, up = x.float().chunk(2, dim=-1)
    if tile:
        require(rows.shape[1] % (2 * tile) == 0, "x", "rows are no whole tiles")
        gate, up = (part.flatten(-2) for part in x.float().view(*x.shape[:-1], -1, 2, tile).unbind(-2))
    result = (_activate(gate, kind).to(x.dtype).float() * up).to(x.dtype)
    return result if out is None else out.copy_(result)


def silu_mul(x: torch.Tensor, *, tile: int = 0, out: torch.Tensor | None = None) -> torch.Tensor:
    return gated_activation(x, "silu", tile=tile, out=out)


def layer_tail_rows(attended: int, hidden: int, inner: int, qkv: int = 0) -> int:
    """Unlike the kernel also of the tiny models' widths."""
    return 16 if all(width % 16 == 0 for width in (attended, hidden, inner, qkv)) else 0


def layer_tail_workspace(inner: int, device: torch.device | str = "cpu") -> torch.Tensor:
    workspace = torch.empty(_FLAGS + 32 * inner, dtype=torch.uint8, device=device)
    workspace[:_FLAGS].zero_()
    return workspace


def layer_tail(
    attended: torch.Tensor,  # [num_tokens, attended]
    w_o: torch.Tensor,  # [hidden, attended]
    residual: torch.Tensor,  # [num_tokens, hidden]
    mlp_norm: torch.Tensor,  # [hidden]
    w_gate_up: torch.Tensor,  # [2 * inner, hidden]
    w_down: torch.Tensor,  # [hidden, inner]
    workspace: torch.Tensor,
    *,
    next_norm: torch.Tensor | None = None,  # [hidden]
    w_qkv: torch.Tensor | None = None,  # [qkv, hidden]
    qkv: torch.Tensor | None = None,  # [num_tokens, qkv]
    eps: float = 1e-6,
    prefetch: torch.Tensor | None = None,
) -> torch.Tensor | None:
    check(attended, "attended", HALF, (-1, -1), aligned=True)
    (num_tokens, width), dtype = attended.shape, attended.dtype
    check_dense(w_o, "w_o", (dtype,), (-1, width))
    hidden = w_o.shape[0]
    check(residual, "residual", (dtype,), (num_tokens, hidden), aligned=True)
    check_dense(w_gate_up, "w_gate_up", (dtype,), (-1, hidden))
    inner = w_gate_up.shape[0] // 2
    check_dense(w_down, "w_down", (dtype,), (hidden, inner))
    require((w_qkv is None) == (next_norm is None), "next_norm", "is needed with w_qkv, and only with it")
    require(num_tokens <= layer_tail_rows(width, hidden, inner), "attended", f"has {num_tokens} rows")
    _check_workspace(workspace, _FLAGS + 32 * inner)
    if prefetch is not None:
        require(prefetch.is_contiguous(), "prefetch", "is not contiguous")
    normed = rms_norm(F.linear(attended, w_o), mlp_norm, eps, residual=residual)
    delta = F.linear(silu_mul(F.linear(normed, w_gate_up)), w_down)
    if w_qkv is None or next_norm is None:
        residual.copy_(residual.float() + delta.float())
        return None
    check_dense(w_qkv, "w_qkv", (dtype,), (-1, hidden))
    result = F.linear(rms_norm(delta, next_norm, eps, residual=residual), w_qkv)
    return result if qkv is None else qkv.copy_(result)


def linear(
    x: torch.Tensor,  # [num_tokens, in]
    weight: torch.Tensor,  # [out, in]; packed by pack_gate_up with activation
    workspace: torch.Tensor,
    *,
    activation: str | None = None,
    bias: torch.Tensor | None = None,  # [out]
    residual: torch.Tensor | None = None,  # [num_tokens, out]
    squares_in: torch.Tensor | None = None,  # [parts, num_tokens] float32
    eps: float = 0.0,
    gain: torch.Tensor | None = None,  # [out]
    scaled_out: torch.Tensor | None = None,  # [num_tokens, out]
    squares_out: torch.Tensor | None = None,  # [ceil(out / 128), num_tokens] float32
    prefetch: torch.Tensor | None = None,
    out: torch.Tensor | None = None,  # [num_tokens, out]
    portable: bool = False,
) -> torch.Tensor:
    check(x, "x", HALF, (-1, -1), aligned=True)
    num_tokens, width = x.shape
    check(weight, "w", (x.dtype,), (-1, width), aligned=True)
    require(width % 8 == 0, "x", "its width is no multiple of 16 bytes")
    require(weight.shape[0] % (8 if activation is None else 128) == 0, "w", "rows are no multiple")
    num_out = weight.shape[0] // (1 if activation is None else 2)
    _check_workspace(workspace, _FLAGS + _gemm_bytes(num_tokens))
    for name, vector in (("bias", bias), ("gain", gain)):
        if vector is not None:
            check_dense(vector, name, (x.dtype,), (num_out,))
            check_aligned(vector, name)
    for name, matrix in (("residual", residual), ("scaled_out", scaled_out), ("out", out)):
        if matrix is not None:
            check(matrix, name, (x.dtype,), (num_tokens, num_out), aligned=True)
    require(gain is None or scaled_out is not None, "scaled_out", "is needed with gain")
    if prefetch is not None:
        require(prefetch.is_contiguous(), "prefetch", "is not contiguous")
    sums = x.float() @ weight.float().T
    if squares_in is not None:
        check_dense(squares_in, "squares_in", (torch.float32,), (-1, num_tokens))
        sums *= torch.rsqrt(squares_in.sum(0) / width + eps).unsqueeze(1)
    if activation is not None:
        gate, up = sums.view(num_tokens, -1, 2, _TILE).unbind(2)
        sums, up = gate.reshape(num_tokens, -1), up.reshape(num_tokens, -1)
    if bias is not None:
        sums = sums + bias.float()
    if activation is not None:
        sums = _activate(sums.to(x.dtype).float(), activation) * up.to(x.dtype).float()
    result = sums.to(x.dtype)
    if residual is not None:
        result = (result.float() + residual.float()).to(x.dtype)
    if gain is not None and scaled_out is not None:
        scaled_out.copy_(result.float() * gain.float())
    if squares_out is not None:
        require(activation is None, "squares_out", "is not for products with an activation")
        check_dense(squares_out, "squares_out", (torch.float32,), (-(-num_out // 128), num_tokens))
        padded = F.pad(result.float() ** 2, (0, -num_out % 128))
        squares_out.copy_(padded.view(num_tokens, -1, 128).sum(2).T)
    return result if out is None else out.copy_(result)


def linear_workspace(num_tokens: int, device: torch.device | str | int = "cpu") -> torch.Tensor:
    return torch.zeros(_FLAGS + _gemm_bytes(num_tokens), dtype=torch.uint8, device=device)


def pack_gate_up(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    require(gate.shape == up.shape and gate.shape[0] % _TILE == 0, "gate", "and up: equal rows by 64 are needed")
    pairs = zip(torch.split(gate, _TILE), torch.split(up, _TILE), strict=True)
    return torch.cat([tile for pair in pairs for tile in pair])


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


def moe_route(
    logits: torch.Tensor,  # [num_tokens, num_experts]
    top_k: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = True,
    ids: torch.Tensor | None = None,  # [num_tokens, top_k] int32
    weights: torch.Tensor | None = None,  # [num_tokens, top_k] float32
) -> tuple[torch.Tensor, torch.Tensor]:
    check(logits, "logits", REAL, (-1, -1))
    num_experts = logits.shape[1]
    require(scoring == "softmax", "scoring", "of the stand-in is softmax")
    require(1 <= num_experts <= 1024, "logits", f"has {num_experts} experts, needed 1 to 1024")
    require(1 <= top_k <= min(32, num_experts), "top_k", "needed 1 to 32 and no more than there are")
    order = logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    chosen = logits.float().softmax(-1).gather(1, order)
    if renormalize:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
    narrow = order.to(torch.int32)
    return (
        narrow if ids is None else ids.copy_(narrow),
        chosen if weights is None else weights.copy_(chosen),
    )


def moe_workspace_bytes(
    num_tokens: int,
    top_k: int,
    num_experts: int,
    hidden: int,
    inner: int,
    *,
    fp8: bool = False,
    map_size: int = 0,
    portable: bool = False,
) -> int:
    needs = (_moe_need(n, top_k, num_experts, hidden, inner) for n in range(num_tokens + 1))
    return max(needs)


def _moe_need(num_tokens: int, top_k: int, num_experts: int, hidden: int, inner: int) -> int:
    """Like the kernels', not monotonic: steps of some sizes take one small tile per expert more."""
    pairs = num_tokens * top_k
    return _FLAGS + 2 * pairs * (hidden + inner) + (8192 * num_experts if 10 < num_tokens <= 32 else 0)


def moe_workspace(num_bytes: int, device: torch.device | str = "cpu") -> torch.Tensor:
    workspace = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    workspace[:_FLAGS].zero_()
    return workspace


def fused_moe(
    x: torch.Tensor,  # [num_tokens, hidden]
    w13: torch.Tensor,  # [num_experts, 2 * inner, hidden], gate rows first
    w2: torch.Tensor,  # [num_experts, hidden, inner]
    ids: torch.Tensor,  # [num_tokens, top_k] int32
    weights: torch.Tensor,  # [num_tokens, top_k] float32
    *,
    activation: str = "silu",
    workspace: torch.Tensor | None = None,  # uint8
    out: torch.Tensor | None = None,  # [num_tokens, hidden]
    residual: torch.Tensor | None = None,  # [num_tokens, hidden]
    next_norm: torch.Tensor | None = None,  # [hidden]
    eps: float = 1e-6,
    normed: torch.Tensor | None = None,  # [num_tokens, hidden]
    logits: torch.Tensor | None = None,  # [num_tokens, num_experts]
    renormalize: bool = True,
    portable: bool = False,
) -> torch.Tensor:
    require(activation == "silu", "activation", f"is {activation!r}, needed silu")
    check(x, "x", HALF, (-1, -1), aligned=True)
    (num_tokens, hidden), (num_experts, double, _) = x.shape, w13.shape
    inner, top_k = double // 2, ids.shape[1]
    check_dense(w13, "w13", (x.dtype,), (num_experts, 2 * inner, hidden))
    check_dense(w2, "w2", (x.dtype,), (num_experts, hidden, inner))
    require(hidden % 8 == 0 and inner % 8 == 0, "x", "widths are no multiples of 8")
    check_dense(ids, "ids", (torch.int32,), (num_tokens, top_k))
    check_dense(weights, "weights", (torch.float32,), (num_tokens, top_k))
    if logits is not None:
        require(logits.shape == (num_tokens, num_experts), "logits", f"has shape {list(logits.shape)}")
        moe_route(logits, top_k, renormalize=renormalize, ids=ids, weights=weights)
    if workspace is not None:
        _check_workspace(workspace, _moe_need(num_tokens, top_k, num_experts, hidden, inner))
    total = torch.zeros(num_tokens, hidden, device=x.device)
    for token in range(num_tokens):
        for choice in range(top_k):
            expert = int(ids[token, choice])
            if 0 <= expert < num_experts:
                gate, up = (w13[expert].float() @ x[token].float()).chunk(2)
                inside = (F.silu(gate) * up).to(x.dtype).float()
                total[token] += weights[token, choice] * (w2[expert].float() @ inside).to(x.dtype).float()
    result = total.to(x.dtype)
    if residual is None:
        require(next_norm is None, "next_norm", "needs a residual")
        return result if out is None else out.copy_(result)
    require(out is None, "out", "is not written with a residual")
    require(hidden <= 8192, "residual", f"is {hidden} wide, 8192 at most")
    check(residual, "residual", (x.dtype,), (num_tokens, hidden), aligned=True)
    residual.add_(result)
    if next_norm is None:
        return residual
    check_dense(next_norm, "next_norm", (x.dtype,), (hidden,))
    found = _normed(residual, next_norm, eps, False)
    return found if normed is None else normed.copy_(found)


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


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float, plus_one: bool) -> torch.Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if plus_one:
        return (normed * (1.0 + weight.float())).to(x.dtype)
    return (normed.to(x.dtype).float() * weight.float()).to(x.dtype)


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
        x = _normed(x, weight, eps, plus_one)
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


def _activate(x: torch.Tensor, kind: str) -> torch.Tensor:
    require(kind in ("silu", "gelu", "gelu_tanh"), "kind", f"is {kind!r}, needed silu, gelu, gelu_tanh")
    if kind == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def _gemm_bytes(num_tokens: int) -> int:
    """Steps of powers of two from 8 to 256 rows, as the kernels' tiles."""
    return 64 * min(256, max(8, 1 << (num_tokens - 1).bit_length()))


def _check_workspace(workspace: torch.Tensor, needed: int) -> None:
    check_dense(workspace, "workspace", (torch.uint8,), (-1,))
    require(workspace.numel() >= needed, "workspace", f"has {workspace.numel()} bytes, needed {needed}")
    require(not bool(workspace[:_FLAGS].any()), "workspace", "its head is not zero")
