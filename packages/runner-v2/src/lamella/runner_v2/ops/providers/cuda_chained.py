"""`chained_layer` of the CUDA provider.

Few tokens, bfloat16, dense: seven kernels. Behind the MLP the norm has none of its own: who writes the residual stream
also writes it times the next norm's weight ("scaled") and leaves sums of squares, by which the next product divides its
result.

    qkv (squares) ─ rope, write ─ attention ─ o ─ + residual, norm ─ gate_up, activation ─ down + residual ─┐
                                                                  next layer's qkv └ scaled, squares ───────┘

Otherwise norms are kernels, which add the residual too, and long products are cuBLAS's. In float16 the norms are never
fused: the residual stream times a norm's weight, before it is divided, need not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from lamella.runner_v2.attention.backend import AttentionBackend
from lamella.runner_v2.attention.cuda import HEAD_DIMS, CudaPlan
from lamella.runner_v2.config import LayerConfig, ModelConfig
from lamella.runner_v2.inputs import LayerCache
from lamella.runner_v2.ops.chained import split_parts
from lamella.runner_v2.ops.decoder import group_parts
from lamella.runner_v2.ops.linear import split_bias
from lamella.runner_v2.ops.providers.cuda_linear import (
    FEW_TOKENS,
    MULTIPLE,
    Matrix,
    Packed,
    Workspaces,
    bind_matrix,
    dense,
    pack_experts,
    pack_matrix,
    product,
)
from lamella.runner_v2.ops.rotary import RopeTable
from lamella.runner_v2.ops.spec import Picked, Site
from lamella.runner_v2.weights.slots import RawPart

_TILE = 64
"""Rows of gate, then rows of up, in a packed matrix."""
_SQUARES_WIDTH = 128
"""Columns of the residual stream whose squares are summed up into one number."""


class Ahead(NamedTuple):
    """What a layer prepares for the next one: the input of its first product."""

    x: torch.Tensor  # [T, hidden] normed; or times the norm's weight only, with squares
    squares: torch.Tensor | None  # [ceil(hidden / 128), T] float32


class _Layer(NamedTuple):
    """Handle of a layer."""

    kernels: Any
    attention: AttentionBackend
    rope: RopeTable
    interleaved: bool
    heads: tuple[int, int]  # of queries, of keys
    head_dim: int
    eps: float
    plus_one: bool
    """Of the norms of heads; into the others' weights the one is added."""
    fuses_norms: bool
    activation: str
    attn_norm: torch.Tensor  # [hidden]
    mlp_norm: torch.Tensor
    next_norm: torch.Tensor | None
    q_norm: torch.Tensor | None  # [head_dim]
    k_norm: torch.Tensor | None
    qkv: Matrix
    o: Matrix
    mlp: _Mlp | _Moe


class _Mlp(NamedTuple):
    gate_up: Matrix  # packed in tiles
    down: Matrix


class _Moe(NamedTuple):
    router: Matrix
    gate_up: torch.Tensor  # [num_experts, 2 * width, hidden]
    down: torch.Tensor  # [num_experts, hidden, width]
    workspace: torch.Tensor
    top_k: int
    norm_topk: bool


def chained_picked(site: Site, kernels: Any, workspaces: Workspaces, provider: str) -> Picked:
    """The implementation for a site that refuse_chained() accepts."""
    config: ModelConfig = site.params["config"]
    layer: LayerConfig = site.params["layer"]
    dtype = site.dtype

    def pack(parts: Sequence[RawPart]) -> Packed:
        own, next_norm = split_parts(parts)
        packed: dict[str, torch.Tensor] = {}
        for name, group in group_parts(own).items():
            if name in ("attn_norm", "mlp_norm"):
                packed[name] = _factor(group[0], config, dtype)
            elif name.endswith("_norm"):
                packed[name] = group[0].data.to(dtype)
            elif name == "gate_up":
                gate, up = split_bias(group)[0]
                packed["gate_up.weight"] = kernels.pack_gate_up(dense(gate, dtype), dense(up, dtype))
            else:
                one = pack_experts(group, dtype) if name == "experts" else pack_matrix(group, dtype)
                packed.update({f"{name}.{key}": tensor for key, tensor in one.items()})
        if next_norm is not None:
            packed["next_norm"] = _factor(next_norm, config, dtype)
        return packed

    def bind(packed: Packed, rope: RopeTable, attention: AttentionBackend) -> _Layer:
        def matrix(name: str) -> Matrix:
            return bind_matrix(packed, workspaces, f"{name}.")

        mlp: _Mlp | _Moe
        if layer.moe is None:
            mlp = _Mlp(matrix("gate_up"), matrix("down"))
        else:
            gate_up, moe = packed["experts.gate_up"], layer.moe
            sizes = (moe.num_experts_per_token, moe.num_experts, config.hidden_size, moe.intermediate_size)
            workspace = workspaces.moe(gate_up.device, *sizes)
            mlp = _Moe(
                matrix("router"),
                gate_up,
                packed["experts.down"],
                workspace,
                moe.num_experts_per_token,
                moe.norm_topk,
            )
        return _Layer(
            kernels=kernels,
            attention=attention,
            rope=rope,
            interleaved=config.ropes[layer.rope_idx].interleaved,
            heads=(config.num_heads, config.num_kv_heads),
            head_dim=config.head_dim,
            eps=config.norm_eps,
            plus_one=config.norm_plus_one,
            fuses_norms=dtype == torch.bfloat16,
            activation=config.activation,
            attn_norm=packed["attn_norm"],
            mlp_norm=packed["mlp_norm"],
            next_norm=packed.get("next_norm"),
            q_norm=packed.get("q_norm"),
            k_norm=packed.get("k_norm"),
            qkv=matrix("qkv"),
            o=matrix("o"),
            mlp=mlp,
        )

    return Picked(site.op, provider, run_chained, pack, bind)


def run_chained(
    hidden: torch.Tensor,  # [T, hidden]
    ahead: Ahead | None,
    plan: CudaPlan,
    cache: LayerCache,
    handle: _Layer,
) -> tuple[torch.Tensor, Ahead | None]:
    """One layer over a step, in place of hidden."""
    if ahead is None:
        ahead = Ahead(handle.kernels.rms_norm(hidden, handle.attn_norm, handle.eps), None)
    attended = _attend(ahead, plan, cache, handle)
    if isinstance(handle.mlp, _Moe):
        return hidden, _finish_moe(hidden, attended, handle, handle.mlp)
    if handle.fuses_norms and hidden.shape[0] <= FEW_TOKENS:
        return hidden, _finish_fused(hidden, attended, handle, handle.mlp)
    return hidden, _finish(hidden, attended, handle, handle.mlp)


def _attend(x: Ahead, plan: CudaPlan, cache: LayerCache, handle: _Layer) -> torch.Tensor:
    """Up to attention's result [T, num_heads * head_dim]; keys and values are in the cache then."""
    kernels, num_tokens = handle.kernels, x.x.shape[0]
    num_heads, num_kv_heads = handle.heads
    if x.squares is None:
        qkv = product(kernels, x.x, handle.qkv)
    else:
        qkv = kernels.linear(
            x.x,
            handle.qkv.weight,
            handle.qkv.workspace,
            bias=handle.qkv.bias,
            squares_in=x.squares,
            eps=handle.eps,
            prefetch=handle.o.weight,  # attention leaves time for it
        )
    heads = qkv.view(num_tokens, -1, handle.head_dim)
    q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    kernels.rope_write(
        q,
        k,
        v,
        plan.positions,
        handle.rope.cos,
        handle.rope.sin,
        cache.k,
        cache.v,
        plan.slots,
        q_norm=handle.q_norm,
        k_norm=handle.k_norm,
        eps=handle.eps,
        plus_one=handle.plus_one,
        interleaved=handle.interleaved,
    )
    attended = torch.empty(num_tokens, num_heads, handle.head_dim, dtype=qkv.dtype, device=qkv.device)
    handle.attention.run(q, None, None, cache, plan, attended)
    return attended.view(num_tokens, -1)


def _finish_fused(hidden: torch.Tensor, attended: torch.Tensor, handle: _Layer, mlp: _Mlp) -> Ahead | None:
    """gate_up and down with what surrounds them. o is cuBLAS's: behind attention no weights can be loaded ahead, and
    there the own kernel, which sums its parts through memory, is the slower one."""
    kernels = handle.kernels
    x = kernels.rms_norm(
        F.linear(attended, handle.o.weight, handle.o.bias), handle.mlp_norm, handle.eps, residual=hidden
    )
    inner = kernels.linear(x, mlp.gate_up.weight, mlp.gate_up.workspace, activation=handle.activation)
    ahead = None if handle.next_norm is None else Ahead(*_room(hidden))
    kernels.linear(
        inner,
        mlp.down.weight,
        mlp.down.workspace,
        residual=hidden,
        gain=handle.next_norm,
        scaled_out=None if ahead is None else ahead.x,
        squares_out=None if ahead is None else ahead.squares,
        out=hidden,
    )
    return ahead


def _finish(hidden: torch.Tensor, attended: torch.Tensor, handle: _Layer, mlp: _Mlp) -> Ahead | None:
    """The same with norms of their own, for many tokens."""
    kernels = handle.kernels
    delta = product(kernels, attended, handle.o)
    x = kernels.rms_norm(delta, handle.mlp_norm, handle.eps, residual=hidden)
    gate_up = F.linear(x, mlp.gate_up.weight)
    inner = kernels.gated_activation(gate_up, handle.activation, tile=_TILE)
    return _close(hidden, product(kernels, inner, mlp.down), handle)


def _finish_moe(hidden: torch.Tensor, attended: torch.Tensor, handle: _Layer, moe: _Moe) -> Ahead | None:
    """Experts and router need the norm itself, so it is a kernel for few tokens too."""
    kernels = handle.kernels
    x = kernels.rms_norm(product(kernels, attended, handle.o), handle.mlp_norm, handle.eps, residual=hidden)
    ids, weights = kernels.moe_route(product(kernels, x, moe.router), moe.top_k, renormalize=moe.norm_topk)
    delta = kernels.fused_moe(x, moe.gate_up, moe.down, ids, weights, workspace=moe.workspace)
    return _close(hidden, delta, handle)


def _close(hidden: torch.Tensor, delta: torch.Tensor, handle: _Layer) -> Ahead | None:
    """hidden += delta, and the next layer's norm where there is one."""
    if handle.next_norm is None:
        hidden.add_(delta)
        return None
    return Ahead(handle.kernels.rms_norm(delta, handle.next_norm, handle.eps, residual=hidden), None)


def _room(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the residual stream times a norm's weight goes, and its sums of squares."""
    num_tokens, width = hidden.shape
    num_sums = -(-width // _SQUARES_WIDTH)
    squares = torch.empty(num_sums, num_tokens, dtype=torch.float32, device=hidden.device)
    return torch.empty_like(hidden), squares


def _factor(part: RawPart, config: ModelConfig, dtype: torch.dtype) -> torch.Tensor:
    """What a norm multiplies by."""
    weight = part.data.float()
    return (weight + 1.0 if config.norm_plus_one else weight).to(dtype)


def refuse_chained(site: Site) -> str | None:
    """None if the provider can serve the site, else the reason."""
    config: ModelConfig = site.params["config"]
    layer: LayerConfig = site.params["layer"]
    if site.tp_size != 1:
        return f"tp_size {site.tp_size}: the whole layer is one op on one rank only"
    if site.params["attention"] != "cuda":
        return f"attention backend {site.params['attention']}"
    if site.params["kv_dtype"] not in (site.dtype, torch.float8_e4m3fn):
        return f"cache of {site.params['kv_dtype']}"
    if config.sandwich_norms:
        return "norms behind attention and MLP"
    if config.head_dim not in HEAD_DIMS:
        return f"head_dim {config.head_dim}, not one of {', '.join(map(str, HEAD_DIMS))}"
    if config.hidden_size % MULTIPLE:
        return f"hidden size {config.hidden_size} is no multiple of {MULTIPLE}"
    return _refuse_mlp(config) if layer.moe is None else _refuse_moe(config, layer)


def _refuse_mlp(config: ModelConfig) -> str | None:
    if config.mlp_bias:
        return "biases of gate and up"
    if config.intermediate_size % _TILE:
        return f"intermediate size {config.intermediate_size} is no multiple of {_TILE}"
    return None


def _refuse_moe(config: ModelConfig, layer: LayerConfig) -> str | None:
    assert layer.moe is not None
    if config.activation != "silu":
        return f"experts with activation {config.activation}, not silu"
    if layer.moe.intermediate_size % MULTIPLE:
        return f"width of experts {layer.moe.intermediate_size} is no multiple of {MULTIPLE}"
    if layer.moe.num_experts > 1024 or layer.moe.num_experts_per_token > 32:
        return f"{layer.moe.num_experts_per_token} of {layer.moe.num_experts} experts, 32 of 1024 at most"
    return None
