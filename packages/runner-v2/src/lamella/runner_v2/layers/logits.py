"""Final norm and language model head, with the vocabulary cut over the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lamella.runner_v2.layers.embedding import Embedding
from lamella.runner_v2.layers.materials import Materials
from lamella.runner_v2.weights.slots import RawPart, Slot


class Logits:
    """A tied head multiplies by the embedding's own packed tensors where one provider serves both."""

    def __init__(self, materials: Materials, embedding: Embedding) -> None:
        config = materials.config
        self._group = materials.group
        self._vocab_size = config.vocab_size
        self._embedding = embedding
        self._tied = config.tie_embeddings
        key = "embed" if self._tied else "lm_head"
        params = {
            "hidden": config.hidden_size,
            "vocab": materials.shape(key)[0],
            "eps": config.norm_eps,
            "plus_one": config.norm_plus_one,
            "softcap": config.logits_softcap,
            "tied": self._tied,
        }
        picked = materials.table.pick(materials.site("logits", params, [key]))
        assert picked.pack is not None
        self._run = picked.run
        self._pack = picked.pack
        self._bind = picked.bind
        self._shared = self._tied and picked.provider == embedding.picked.provider
        self._handle: Any = None
        self._norm_part = materials.parts["final_norm"]
        self._head_part = materials.parts[key]

    def slots(self) -> list[Slot]:
        """Of the embedding too: a shared table is read, packed and bound once, for both."""
        if self._shared:
            return [Slot("embed", (self._embedding.part, self._norm_part), self._pack_shared, self._take_shared)]
        return [*self._embedding.slots(), Slot("lm_head", (self._norm_part, self._head_part), self._pack, self._take)]

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:  # [L, hidden] -> [L, vocab_size] float32
        out: torch.Tensor = self._run(hidden, self._handle)
        if self._group.size == 1:
            return out
        # the last ranks' rows may be padded
        return self._group.all_gather(out, dim=1)[:, : self._vocab_size].contiguous()

    def _pack_shared(self, parts: Sequence[RawPart]) -> Mapping[str, torch.Tensor]:
        table, norm = parts
        return {**self._embedding.pack([table]), **self._pack([norm])}

    def _take_shared(self, packed: Mapping[str, torch.Tensor]) -> None:
        self._embedding.take(packed)
        self._take(packed)

    def _take(self, packed: Mapping[str, torch.Tensor]) -> None:
        assert self._bind is not None
        self._handle = self._bind(packed)
