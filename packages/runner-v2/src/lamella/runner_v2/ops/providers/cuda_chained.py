"""`chained_layer` of the CUDA provider.

    qkv ─ rope, write ─ attention ─ o ─ + residual, norm ─ gate_up ─ activation ─ down ─ + residual, next layer's norm

Nine kernels of a dense layer. The products are cuBLAS's: own ones with norms, activation and residual fused to their
ends (six kernels) are as fast one behind the other, but not behind attention, where no weights can be loaded ahead.

For few tokens three kernels: all from o to the next layer's qkv is one (layer_tail, experts_tail), which streams
weights without a pause. A layer learns who follows when that one first runs behind it; until then, and for whoever does
not follow, it leaves a norm as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from lamella.runner_v2.attention.backend import AttentionBackend
from lamella.runner_v2.attention.cuda import HEAD_DIMS, CudaPlan
from lamella.runner_v2.config import LayerConfig, ModelConfig
from lamella.runner_v2.inputs import LayerCache
from lamella.runner_v2.ops.chained import split_parts
from lamella.runner_v2.ops.decoder import group_parts
from lamella.runner_v2.ops.providers.cuda_linear import (
    MULTIPLE,
    Matrix,
    Packed,
    Workspaces,
    bind_matrix,
    pack_experts,
    pack_matrix,
    product,
)
from lamella.runner_v2.ops.rotary import RopeTable
from lamella.runner_v2.ops.spec import Picked, Site
from lamella.runner_v2.weights.slots import RawPart

MAX_TAIL_TOKENS = 0
"""Most tokens whose layers' tails are one kernel: none, because they are not faster than separate kernels beyond
one token (H200, llama-8b: batch 1 4.56 against 4.74 ms a step, 4 4.94 against 4.88; qwen3-30b: 4.15 against 3.99)."""
_MAX_CLOSED = 8192
"""Widest residual stream that the experts' kernel adds to and norms."""


class _Link:
    """Who runs behind a layer. It is told at the first step, in which all the model's layers run."""

    def __init__(self) -> None:
        self.next_qkv: Matrix | None = None
        self.next_o: torch.Tensor | None = None

    def tell(self, qkv: Matrix, o: torch.Tensor) -> None:
        self.next_qkv, self.next_o = qkv, o


class Ahead(NamedTuple):
    """What a layer prepares for the next one."""

    link: _Link
    normed: torch.Tensor | None  # [T, hidden]
    """Its normed input, or"""
    qkv: torch.Tensor | None  # [T, qkv]
    """the product of that with"""
    matrix: Matrix | None
    """its matrix."""


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
    activation: str
    attn_norm: torch.Tensor  # [hidden]
    mlp_norm: torch.Tensor
    next_norm: torch.Tensor | None
    q_norm: torch.Tensor | None  # [head_dim]
    k_norm: torch.Tensor | None
    qkv: Matrix
    o: Matrix
    mlp: _Mlp | _Moe
    tail: _Tail | None
    link: _Link


class _Mlp(NamedTuple):
    gate_up: Matrix
    down: Matrix


class _Tail(NamedTuple):
    """Of layers that the kernel for few tokens serves."""

    workspace: torch.Tensor
    max_tokens: int


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
        qkv, o = matrix("qkv"), matrix("o")
        tail = _bind_tail(kernels, workspaces, qkv, o, mlp, config.activation)
        return _Layer(
            kernels=kernels,
            attention=attention,
            rope=rope,
            interleaved=config.ropes[layer.rope_idx].interleaved,
            heads=(config.num_heads, config.num_kv_heads),
            head_dim=config.head_dim,
            eps=config.norm_eps,
            plus_one=config.norm_plus_one,
            activation=config.activation,
            attn_norm=packed["attn_norm"],
            mlp_norm=packed["mlp_norm"],
            next_norm=packed.get("next_norm"),
            q_norm=packed.get("q_norm"),
            k_norm=packed.get("k_norm"),
            qkv=qkv,
            o=o,
            mlp=mlp,
            tail=tail,
            link=_Link(),
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
    if ahead is not None:
        ahead.link.tell(handle.qkv, handle.o.weight)
    attended = _attend(_project(hidden, ahead, handle), plan, cache, handle)
    if handle.tail is not None and 0 < hidden.shape[0] <= handle.tail.max_tokens:
        return hidden, _finish_few(hidden, attended, handle, handle.tail)
    if isinstance(handle.mlp, _Moe):
        normed = _finish_moe(hidden, attended, handle, handle.mlp)
    else:
        normed = _finish(hidden, attended, handle, handle.mlp)
    return hidden, None if normed is None else Ahead(handle.link, normed, None, None)


def _project(hidden: torch.Tensor, ahead: Ahead | None, handle: _Layer) -> torch.Tensor:
    """Queries, keys and values [T, qkv]."""
    if ahead is not None and ahead.matrix is handle.qkv and ahead.qkv is not None:
        return ahead.qkv
    normed = None if ahead is None else ahead.normed
    if normed is None:
        normed = handle.kernels.rms_norm(hidden, handle.attn_norm, handle.eps)
    return product(handle.kernels, normed, handle.qkv)


def _attend(qkv: torch.Tensor, plan: CudaPlan, cache: LayerCache, handle: _Layer) -> torch.Tensor:
    """Up to attention's result [T, num_heads * head_dim]; keys and values are in the cache then."""
    kernels, num_tokens = handle.kernels, qkv.shape[0]
    num_heads, num_kv_heads = handle.heads
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


def _finish(hidden: torch.Tensor, attended: torch.Tensor, handle: _Layer, mlp: _Mlp) -> torch.Tensor | None:
    """The MLP."""
    kernels = handle.kernels
    delta = product(kernels, attended, handle.o)
    x = kernels.rms_norm(delta, handle.mlp_norm, handle.eps, residual=hidden)
    inner = kernels.gated_activation(product(kernels, x, mlp.gate_up), handle.activation)
    return _close(hidden, product(kernels, inner, mlp.down), handle)


def _bind_tail(
    kernels: Any, workspaces: Workspaces, qkv: Matrix, o: Matrix, mlp: _Mlp | _Moe, activation: str
) -> _Tail | None:
    matrices = (qkv, o, mlp.gate_up, mlp.down) if isinstance(mlp, _Mlp) else (qkv, o, mlp.router)
    if activation != "silu" or any(matrix.bias is not None for matrix in matrices):
        return None
    device, attended, num_qkv = o.weight.device, o.weight.shape[1], qkv.weight.shape[0]
    if isinstance(mlp, _Mlp):
        hidden, inner = mlp.down.weight.shape
        most = min(MAX_TAIL_TOKENS, kernels.layer_tail_rows(attended, hidden, inner, num_qkv))
        return _Tail(workspaces.tail(device, inner), most) if most else None
    num_experts, hidden, inner = mlp.down.shape
    rows = kernels.experts_tail_rows(attended, hidden, inner, num_qkv, num_experts, mlp.top_k)
    most = min(MAX_TAIL_TOKENS, rows)
    return _Tail(workspaces.experts_tail(device, inner, num_experts, mlp.top_k), most) if most else None


def _finish_few(hidden: torch.Tensor, attended: torch.Tensor, handle: _Layer, tail: _Tail) -> Ahead | None:
    """From o to the next layer's qkv."""
    mlp, kernels = handle.mlp, handle.kernels
    next_qkv, is_last = handle.link.next_qkv, handle.next_norm is None
    fused = None if is_last or next_qkv is None or next_qkv.bias is not None else next_qkv
    options = {
        "next_norm": None if fused is None else handle.next_norm,
        "w_qkv": None if fused is None else fused.weight,
        "eps": handle.eps,
        "prefetch": None if is_last else handle.link.next_o,
    }
    beginning = (attended, handle.o.weight, hidden, handle.mlp_norm)
    if isinstance(mlp, _Mlp):
        qkv = kernels.layer_tail(*beginning, mlp.gate_up.weight, mlp.down.weight, tail.workspace, **options)
    else:
        qkv = kernels.experts_tail(
            *beginning,
            mlp.router.weight,
            mlp.gate_up,
            mlp.down,
            mlp.top_k,
            tail.workspace,
            renormalize=mlp.norm_topk,
            **options,
        )
    return None if is_last else Ahead(handle.link, None, qkv, fused)


def _finish_moe(hidden: torch.Tensor, attended: torch.Tensor, handle: _Layer, moe: _Moe) -> torch.Tensor | None:
    """Experts and router need the norm itself, so it is a kernel for few tokens too."""
    kernels = handle.kernels
    x = kernels.rms_norm(product(kernels, attended, handle.o), handle.mlp_norm, handle.eps, residual=hidden)
    logits = product(kernels, x, moe.router)
    if hidden.shape[1] > _MAX_CLOSED:
        ids, weights = kernels.moe_route(logits, moe.top_k, renormalize=moe.norm_topk)
        delta = kernels.fused_moe(x, moe.gate_up, moe.down, ids, weights, workspace=moe.workspace)
        return _close(hidden, delta, handle)
    shape = (x.shape[0], moe.top_k)
    # the choice of experts, and what comes behind their sum: residual stream and next norm
    normed = kernels.fused_moe(
        x,
        moe.gate_up,
        moe.down,
        torch.empty(shape, dtype=torch.int32, device=x.device),
        torch.empty(shape, dtype=torch.float32, device=x.device),
        workspace=moe.workspace,
        logits=logits,
        renormalize=moe.norm_topk,
        residual=hidden,
        next_norm=handle.next_norm,
        eps=handle.eps,
    )
    return None if handle.next_norm is None else normed


def _close(hidden: torch.Tensor, delta: torch.Tensor, handle: _Layer) -> torch.Tensor | None:
    """hidden += delta, and the next layer's norm where there is one."""
    if handle.next_norm is None:
        hidden.add_(delta)
        return None
    normed: torch.Tensor = handle.kernels.rms_norm(delta, handle.next_norm, handle.eps, residual=hidden)
    return normed


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
    if config.intermediate_size % MULTIPLE:
        return f"intermediate size {config.intermediate_size} is no multiple of {MULTIPLE}"
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
