"""Contract of `decoder_layer`: one whole decoder layer, the widest op. Asked for at tp_size 1 only.

Site: weights = the format of every weight part, in the order of the parts; params:
    config          ModelConfig            layer       LayerConfig
    attention       name of the attention backend that makes the plans
    kv_dtype        of the cache

    pack(parts) -> named tensors          parts: all raw parts of the layer; see group_parts
    bind(packed, rope, attention) -> handle    rope: RopeTable of the layer; attention: the bound AttentionBackend
    run(hidden [T, H], plan, cache: LayerCache, handle) -> hidden    may work in place; the caller drops its own

    x = attn_norm(hidden)
    q, k, v = qkv(x); q, k = rope(q_norm(q), k_norm(k)); write k, v; a = o(attention(q))
    hidden += attn_post_norm(a)                 the post norms only with ModelConfig.sandwich_norms
    hidden += mlp_post_norm(mlp(mlp_norm(hidden)))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from lamella.runner_v2.attention.backend import AttentionBackend
from lamella.runner_v2.config import LayerConfig, ModelConfig
from lamella.runner_v2.inputs import LayerCache
from lamella.runner_v2.ops.activation import gated_activation
from lamella.runner_v2.ops.linear import DenseLinear, linear
from lamella.runner_v2.ops.moe import DenseExperts, moe_experts, moe_route
from lamella.runner_v2.ops.norm import rms_norm
from lamella.runner_v2.ops.rotary import RopeTable, rope
from lamella.runner_v2.ops.spec import Op
from lamella.runner_v2.weights.slots import RawPart

GROUPS = {
    "q": "qkv",
    "k": "qkv",
    "v": "qkv",
    "q_bias": "qkv",
    "k_bias": "qkv",
    "v_bias": "qkv",
    "o": "o",
    "o_bias": "o",
    "gate": "gate_up",
    "up": "gate_up",
    "gate_bias": "gate_up",
    "up_bias": "gate_up",
    "down": "down",
    "down_bias": "down",
}


class DenseLayer(NamedTuple):
    """Handle of the reference."""

    config: ModelConfig
    layer: LayerConfig
    norms: dict[str, torch.Tensor]  # name -> float32
    linears: dict[str, DenseLinear]  # qkv, o, gate_up, down, router
    experts: DenseExperts | None
    rope: RopeTable
    attention: AttentionBackend


def group_parts(parts: Sequence[RawPart]) -> dict[str, list[RawPart]]:
    """The parts of a layer by what they belong to, in their order.

    Names: attn_norm, qkv, q_norm, k_norm, o, attn_post_norm, mlp_norm, gate_up, down, mlp_post_norm; in MoE layers
    router and experts (gate_0, up_0, down_0, gate_1, ...) in place of gate_up and down. Biases go with their matrix.
    """
    groups: dict[str, list[RawPart]] = {}
    for part in parts:
        name = part.key.split(".", 2)[2]  # layers.{i}.name
        group = "experts" if name.startswith("experts.") else GROUPS.get(name, name)
        groups.setdefault(group, []).append(part)
    return groups


def decoder_layer(hidden: torch.Tensor, plan: Any, cache: LayerCache, handle: DenseLayer) -> torch.Tensor:
    """The smaller ops, one after another."""
    config = handle.config

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, handle.norms[name], config.norm_eps, config.norm_plus_one)

    num_tokens, head_dim = hidden.shape[0], config.head_dim
    qkv = linear(norm("attn_norm", hidden), handle.linears["qkv"]).view(num_tokens, -1, head_dim)
    q, k, v = torch.split(qkv, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
    if config.qk_norm:
        q, k = norm("q_norm", q), norm("k_norm", k)
    rope(q, k, plan.positions, handle.rope, config.ropes[handle.layer.rope_idx].interleaved)
    attended = torch.empty(num_tokens, config.num_heads, head_dim, dtype=hidden.dtype, device=hidden.device)
    handle.attention.write(k, v, cache, plan)
    handle.attention.run(q, None, None, cache, plan, attended)
    delta = linear(attended.view(num_tokens, -1), handle.linears["o"])
    hidden = hidden + (norm("attn_post_norm", delta) if config.sandwich_norms else delta)
    x = norm("mlp_norm", hidden)
    if handle.experts is not None:
        moe = handle.layer.moe
        assert moe is not None
        ids, weights = moe_route(linear(x, handle.linears["router"]), moe.num_experts_per_token, moe.norm_topk)
        delta = moe_experts(x, ids, weights, handle.experts)
    else:
        inner = gated_activation(linear(x, handle.linears["gate_up"]), config.activation)
        delta = linear(inner, handle.linears["down"])
    return hidden + (norm("mlp_post_norm", delta) if config.sandwich_norms else delta)


DECODER_LAYER = Op("decoder_layer", decoder_layer, "a whole decoder layer of one rank")
