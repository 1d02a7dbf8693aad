"""One decoder layer. It owns the neighbours, so it asks the op table for the widest op first.

hidden ─ norm ─ attention ─┐                 at the layer's border `hidden` is the whole residual stream,
   └──────────────────── add ─ norm ─ mlp ─┐                    reduced over the ranks
                          └─────────────── add ─ hidden
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch

from lamella.runner_v2.inputs import ModelInput
from lamella.runner_v2.layers.attention import Attention
from lamella.runner_v2.layers.materials import Materials
from lamella.runner_v2.layers.mlp import Mlp
from lamella.runner_v2.layers.moe import Moe
from lamella.runner_v2.layers.norm import Norm, ReduceAdd, ReduceAddNorm
from lamella.runner_v2.ops.spec import Picked
from lamella.runner_v2.weights.slots import Slot


class Carried(NamedTuple):
    """What goes from layer to layer, and from one pipeline stage to the next."""

    hidden: torch.Tensor  # [T, hidden]
    ahead: Any = None
    """What a chained layer prepared for the next one: its normed input, in a form that only the op knows. Whoever drops
    it loses nothing but time."""


class Layer(Protocol):
    """carried -> carried."""

    def slots(self) -> list[Slot]: ...
    def __call__(self, carried: Carried, inputs: ModelInput) -> Carried: ...


def make_decoder_layer(materials: Materials, layer_idx: int, group_idx: int) -> Layer:
    """The layer in the widest form that a provider offers. group_idx: its KV group."""
    config = materials.config
    norm_params = {"width": config.hidden_size, "eps": config.norm_eps, "plus_one": config.norm_plus_one}
    norm_site = materials.site("add_rms_norm", norm_params)
    keys = _keys(materials, layer_idx)
    wide_params = {
        "config": config,
        "layer": config.layers[layer_idx],
        "attention": materials.attention.name,
        "kv_dtype": materials.limits.kv_dtype,
    }
    matrices = [key for key in keys if len(materials.parts[key].shape) > 1]
    wide_site = materials.site("decoder_layer", wide_params, matrices)
    sites = [norm_site]
    if materials.group.size == 1:
        chained_site = materials.site("chained_layer", wide_params, matrices)
        # a norm behind the block stands between its product and the residual stream
        sites = [wide_site, norm_site] if config.sandwich_norms else [chained_site, wide_site, norm_site]
    picked = materials.table.pick_widest(sites)
    if picked.op == "chained_layer":
        return ChainedLayer(materials, layer_idx, group_idx, keys, picked)
    if picked.op == "decoder_layer":
        return FusedLayer(materials, layer_idx, group_idx, keys, picked)
    return DecoderLayer(materials, layer_idx, group_idx, picked)


class ChainedLayer:
    """The whole layer is one op, which norms for the next layer too."""

    def __init__(self, materials: Materials, layer_idx: int, group_idx: int, keys: list[str], picked: Picked) -> None:
        assert picked.pack is not None
        self._layer_idx = layer_idx
        self._group_idx = group_idx
        self._run = picked.run
        self._bind = picked.bind
        self._rope_table = materials.ropes[materials.config.layers[layer_idx].rope_idx]
        self._attention = materials.attention
        self._handle: Any = None
        if layer_idx + 1 < materials.config.num_layers:
            keys = [*keys, f"layers.{layer_idx + 1}.attn_norm"]
        parts = tuple(materials.parts[key] for key in keys)
        self._slot = Slot(f"layers.{layer_idx}", parts, picked.pack, self._take)

    def slots(self) -> list[Slot]:
        return [self._slot]

    def __call__(self, carried: Carried, inputs: ModelInput) -> Carried:
        plan, cache = inputs.plans[self._group_idx], inputs.caches[self._layer_idx]
        hidden, ahead = self._run(carried.hidden, carried.ahead, plan, cache, self._handle)
        return Carried(hidden, ahead)

    def _take(self, packed: Mapping[str, torch.Tensor]) -> None:
        assert self._bind is not None
        self._handle = self._bind(packed, self._rope_table, self._attention)


class FusedLayer:
    """The whole layer is one op."""

    def __init__(self, materials: Materials, layer_idx: int, group_idx: int, keys: list[str], picked: Picked) -> None:
        assert picked.pack is not None
        self._layer_idx = layer_idx
        self._group_idx = group_idx
        self._run = picked.run
        self._bind = picked.bind
        self._rope_table = materials.ropes[materials.config.layers[layer_idx].rope_idx]
        self._attention = materials.attention
        self._handle: Any = None
        parts = tuple(materials.parts[key] for key in keys)
        self._slot = Slot(f"layers.{layer_idx}", parts, picked.pack, self._take)

    def slots(self) -> list[Slot]:
        return [self._slot]

    def __call__(self, carried: Carried, inputs: ModelInput) -> Carried:
        plan, cache = inputs.plans[self._group_idx], inputs.caches[self._layer_idx]
        return Carried(self._run(carried.hidden, plan, cache, self._handle))

    def _take(self, packed: Mapping[str, torch.Tensor]) -> None:
        assert self._bind is not None
        self._handle = self._bind(packed, self._rope_table, self._attention)


class DecoderLayer:
    """The layer as a sequence of smaller ops, on one rank or several."""

    def __init__(self, materials: Materials, layer_idx: int, group_idx: int, add_norm: Picked) -> None:
        config, prefix = materials.config, f"layers.{layer_idx}"
        self._layer_idx = layer_idx
        self._group_idx = group_idx
        is_sandwich = config.sandwich_norms
        self._norm = Norm(materials, f"{prefix}.attn_norm")
        self._attention = Attention(materials, layer_idx)
        attn_post_norm = Norm(materials, f"{prefix}.attn_post_norm") if is_sandwich else None
        self._reduce_add_norm = ReduceAddNorm(materials, f"{prefix}.mlp_norm", attn_post_norm, add_norm)
        has_experts = config.layers[layer_idx].moe is not None
        self._mlp = Moe(materials, layer_idx) if has_experts else Mlp(materials, layer_idx)
        mlp_post_norm = Norm(materials, f"{prefix}.mlp_post_norm") if is_sandwich else None
        self._reduce_add = ReduceAdd(materials, mlp_post_norm)

    def slots(self) -> list[Slot]:
        layers = (self._norm, self._attention, self._reduce_add_norm, self._mlp, self._reduce_add)
        return [slot for layer in layers for slot in layer.slots()]

    def __call__(self, carried: Carried, inputs: ModelInput) -> Carried:
        cache = inputs.caches[self._layer_idx]
        assert cache is not None, f"layer {self._layer_idx} has no cache"
        partial = self._attention(self._norm(carried.hidden), inputs.plans[self._group_idx], cache)
        normed, hidden = self._reduce_add_norm(partial, carried.hidden)
        return Carried(self._reduce_add(self._mlp(normed), hidden))


def _keys(materials: Materials, layer_idx: int) -> list[str]:
    """The layer's weights in the order in which the decoder_layer op gets them."""
    prefix = f"layers.{layer_idx}."
    return [key for key in materials.parts if key.startswith(prefix)]
