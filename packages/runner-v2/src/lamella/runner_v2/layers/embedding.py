"""Token embeddings, with the vocabulary cut over the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lamella.runner_v2.layers.materials import Materials
from lamella.runner_v2.weights.slots import RawPart, Slot


class Embedding:
    """Rank r holds rows [r * vocab_rows, (r + 1) * vocab_rows); a row that lies elsewhere counts as zero."""

    def __init__(self, materials: Materials) -> None:
        config = materials.config
        self._group = materials.group
        self.vocab_rows = materials.shape("embed")[0]
        self._first_row = materials.group.rank * self.vocab_rows
        params = {
            "vocab": self.vocab_rows,
            "hidden": config.hidden_size,
            "scale": config.embed_scale,
            "tied": config.tie_embeddings,
        }
        picked = materials.table.pick(materials.site("embed", params, ["embed"]))
        assert picked.pack is not None
        self.picked = picked
        self._pack = picked.pack
        self._handle: Any = None
        self.part = materials.parts["embed"]

    def slots(self) -> list[Slot]:
        return [Slot("embed", (self.part,), self.pack, self.take)]

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:  # [T] int32 in [0, vocab_size) -> [T, hidden]
        if self._group.size == 1:
            out: torch.Tensor = self.picked.run(ids, self._handle)
            return out
        local = ids - self._first_row
        is_mine = (local >= 0) & (local < self.vocab_rows)
        rows = self.picked.run(torch.where(is_mine, local, 0), self._handle)
        return self._group.all_reduce(torch.where(is_mine.unsqueeze(1), rows, 0.0))

    def pack(self, parts: Sequence[RawPart]) -> Mapping[str, torch.Tensor]:
        return self._pack(parts)

    def take(self, packed: Mapping[str, torch.Tensor]) -> None:
        assert self.picked.bind is not None
        self._handle = self.picked.bind(packed)
