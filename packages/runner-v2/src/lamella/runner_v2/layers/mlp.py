"""The gated MLP."""

from __future__ import annotations

import torch

from lamella.runner_v2.layers.linear import Linear
from lamella.runner_v2.layers.materials import Materials
from lamella.runner_v2.weights.slots import Slot


class Mlp:
    """down(act(gate x) * up x), a partial sum."""

    def __init__(self, materials: Materials, layer_idx: int) -> None:
        prefix = f"layers.{layer_idx}"
        self._gate_up = Linear(materials, f"{prefix}.gate_up", [f"{prefix}.gate", f"{prefix}.up"])
        self._down = Linear(materials, f"{prefix}.down", [f"{prefix}.down"])
        params = {"kind": materials.config.activation, "width": self._gate_up.outs[0]}
        self._act = materials.table.pick(materials.site("gated_activation", params)).run

    def slots(self) -> list[Slot]:
        return [*self._gate_up.slots(), *self._down.slots()]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:  # [T, hidden] -> [T, hidden]
        return self._down(self._act(self._gate_up(x)))
