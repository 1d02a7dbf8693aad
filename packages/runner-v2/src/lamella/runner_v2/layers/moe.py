"""Routed experts, in three parts that can be called apart (so that two half-batches can interleave).

routed = moe.dispatch(x)        which experts serve each token; where experts lie on other ranks, tokens travel here
results = moe.experts(routed)   the experts' weighted sums
partial = moe.combine(results)  results travel home
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from lamella.runner_v2.layers.linear import Linear
from lamella.runner_v2.layers.materials import Materials
from lamella.runner_v2.weights.slots import Slot


class Routed(NamedTuple):
    """Tokens with the experts that serve them."""

    x: torch.Tensor  # [T, hidden]
    ids: torch.Tensor  # [T, k] int32
    weights: torch.Tensor  # [T, k] float32


class Moe:
    """Every rank holds a piece of every expert, cut along the intermediate width, so tokens stay where they are."""

    def __init__(self, materials: Materials, layer_idx: int) -> None:
        config, prefix = materials.config, f"layers.{layer_idx}"
        moe = config.layers[layer_idx].moe
        assert moe is not None, f"layer {layer_idx} has no experts"
        self._router = Linear(materials, f"{prefix}.router", [f"{prefix}.router"])
        routing = {"num_experts": moe.num_experts, "num_experts_per_token": moe.num_experts_per_token}
        site = materials.site("moe_route", {**routing, "norm_topk": moe.norm_topk})
        self._route = materials.table.pick(site).run
        keys = [f"{prefix}.experts.{e}.{name}" for e in range(moe.num_experts) for name in ("gate", "up", "down")]
        width = materials.shape(keys[0])[0]
        params = {**routing, "hidden": config.hidden_size, "width": width, "activation": config.activation}
        picked = materials.table.pick(materials.site("moe_experts", params, keys))
        assert picked.pack is not None
        self._run = picked.run
        self._bind = picked.bind
        self._handle: Any = None
        parts = tuple(materials.parts[key] for key in keys)
        self._slot = Slot(f"{prefix}.experts", parts, picked.pack, self._take)

    def slots(self) -> list[Slot]:
        return [*self._router.slots(), self._slot]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:  # [T, hidden] -> partial sum [T, hidden]
        return self.combine(self.experts(self.dispatch(x)))

    def dispatch(self, x: torch.Tensor) -> Routed:  # [T, hidden]
        ids, weights = self._route(self._router(x))
        return Routed(x, ids, weights)

    def experts(self, routed: Routed) -> torch.Tensor:
        out: torch.Tensor = self._run(routed.x, routed.ids, routed.weights, self._handle)
        return out

    def combine(self, results: torch.Tensor) -> torch.Tensor:
        return results

    def _take(self, packed: Mapping[str, torch.Tensor]) -> None:
        assert self._bind is not None
        self._handle = self._bind(packed)
