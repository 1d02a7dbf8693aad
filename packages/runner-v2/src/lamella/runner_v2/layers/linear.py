"""A matrix of one or several parts (q|k|v, gate|up), each with a format of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lamella.runner_v2.layers.materials import Materials
from lamella.runner_v2.weights.slots import Slot


class Linear:
    """x @ concat(parts)^T plus the parts' biases: under tensor parallelism this rank's partial sum or its share of the
    rows. Never all-reduces and never adds a residual."""

    def __init__(self, materials: Materials, name: str, keys: Sequence[str]) -> None:
        """name: of the slot; keys: canonical keys of the parts, in the order of the result's columns."""
        biases = materials.biases(keys)
        shapes = [materials.shape(key) for key in keys]
        self.outs = tuple(shape[0] for shape in shapes)
        """Width of each part on this rank."""
        params: dict[str, Any] = {"in": shapes[0][1], "outs": self.outs, "bias": bool(biases)}
        picked = materials.table.pick(materials.site("linear", params, keys))
        assert picked.pack is not None
        self._run = picked.run
        self._bind = picked.bind
        self._handle: Any = None
        self._slot = Slot(name, tuple(materials.parts[key] for key in (*keys, *biases)), picked.pack, self._take)

    def slots(self) -> list[Slot]:
        return [self._slot]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:  # [T, in] -> [T, sum(outs)]
        out: torch.Tensor = self._run(x, self._handle)
        return out

    def _take(self, packed: Mapping[str, torch.Tensor]) -> None:
        assert self._bind is not None
        self._handle = self._bind(packed)
