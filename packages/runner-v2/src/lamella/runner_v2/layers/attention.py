"""Grouped-query attention of one layer over the paged cache."""

from __future__ import annotations

from typing import Any

import torch

from lamella.runner_v2.inputs import LayerCache
from lamella.runner_v2.layers.linear import Linear
from lamella.runner_v2.layers.materials import Materials
from lamella.runner_v2.layers.norm import Norm
from lamella.runner_v2.weights.slots import Slot


class Attention:
    """qkv projection, norm of the heads where the model has one, rotation, attention, output projection."""

    def __init__(self, materials: Materials, layer_idx: int) -> None:
        config, limits = materials.config, materials.limits
        rope_idx = config.layers[layer_idx].rope_idx
        rope = config.ropes[rope_idx]
        prefix = f"layers.{layer_idx}"
        self._head_dim = config.head_dim
        self._heads = [limits.num_heads, limits.num_kv_heads, limits.num_kv_heads]
        self._qkv = Linear(materials, f"{prefix}.qkv", [f"{prefix}.{name}" for name in ("q", "k", "v")])
        self._o = Linear(materials, f"{prefix}.o", [f"{prefix}.o"])
        self._q_norm = Norm(materials, f"{prefix}.q_norm") if config.qk_norm else None
        self._k_norm = Norm(materials, f"{prefix}.k_norm") if config.qk_norm else None
        self._rope_table = materials.ropes[rope_idx]
        params = {
            "head_dim": config.head_dim,
            "rotary_dim": 2 * self._rope_table.cos.shape[1],
            "interleaved": rope.interleaved,
        }
        self._rope = materials.table.pick(materials.site("rope", params)).run
        self._backend = materials.attention

    def slots(self) -> list[Slot]:
        norms = [slot for norm in (self._q_norm, self._k_norm) if norm is not None for slot in norm.slots()]
        return [*self._qkv.slots(), *norms, *self._o.slots()]

    def __call__(self, x: torch.Tensor, plan: Any, cache: LayerCache) -> torch.Tensor:
        """x [T, hidden] -> partial sum [T, hidden]. Writes this step's keys and values into the cache."""
        qkv = self._qkv(x).view(x.shape[0], -1, self._head_dim)
        q, k, v = torch.split(qkv, self._heads, dim=1)  # [T, heads, head_dim] each, views
        if self._q_norm is not None and self._k_norm is not None:
            q, k = self._q_norm(q), self._k_norm(k)
        self._rope(q, k, plan.positions, self._rope_table)
        self._backend.write(k, v, cache, plan)
        attended = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._backend.run(q, None, None, cache, plan, attended)
        return self._o(attended.view(x.shape[0], -1))
