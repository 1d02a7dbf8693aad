"""Networks that draft: what a pass runs, whatever the method.

    ids [n], hidden [n, w] ── begin ── layers ── end ── [n, h] ── logits ── [m, draft vocab] ── target_ids ── [m]

hidden is what the target computed at these positions (or a pass before, for tokens that are drafts), in the width that
the network asks for; a draft model of its own needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch

from lamella.runner_v2.errors import ConfigError
from lamella.runner_v2.inputs import ModelInput
from lamella.runner_v2.layers.decoder import Carried, Layer
from lamella.runner_v2.layers.materials import Materials
from lamella.runner_v2.models.decoder import DecoderModel
from lamella.runner_v2.weights.slots import Checkpoint, Part, Slot

VOCAB_PADDING = 512
"""Embeddings of one tokenizer may be padded to different multiples, up to this one."""


class DraftNetwork(Protocol):
    """A network over tokens of rows, with KV layers of its own."""

    layers: list[Layer]

    def slots(self) -> list[Slot]:
        """Every weight of this rank."""

    def begin(self, inputs: ModelInput, hidden: torch.Tensor | None) -> Carried:
        """The first layer's input."""

    def end(self, carried: Carried) -> torch.Tensor:
        """[n, h] of what the last layer left: logits are made of it, and a pass over drafts takes it as `hidden`."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:  # [m, h] -> [m, draft vocab]
        """Of what end() gave for some of the tokens."""

    def target_ids(self, ids: torch.Tensor) -> torch.Tensor:  # [m] int64 -> [m] int64
        """What ids of the network's own vocabulary are in the target's."""


class DraftSource(NamedTuple):
    """A network that drafts, before its weights are loaded."""

    method: str
    checkpoint: Checkpoint
    """Its config describes the layers that keep KV."""
    parts: Mapping[str, Part]
    """Every weight of it, by canonical key."""
    build: Callable[[Materials, tuple[int, ...]], DraftNetwork]
    """(materials, KV group of each layer) -> the network."""


class DecoderNetwork:
    """A language model that drafts for a larger one. Satisfies DraftNetwork."""

    def __init__(self, materials: Materials, group_of_layer: tuple[int, ...], target_vocab: int) -> None:
        self._model = DecoderModel(materials, group_of_layer)
        self._vocab_size = materials.config.vocab_size
        self._target_vocab = target_vocab
        self.layers = self._model.layers

    def slots(self) -> list[Slot]:
        return self._model.slots()

    def begin(self, inputs: ModelInput, hidden: torch.Tensor | None) -> Carried:
        if self._vocab_size < self._target_vocab:  # ids of padding are never chosen, but they must not lead astray
            inputs = inputs._replace(token_ids=inputs.token_ids.clamp(max=self._vocab_size - 1))
        return self._model.embed(inputs)

    def end(self, carried: Carried) -> torch.Tensor:
        return carried.hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        found = self._model.finish(Carried(hidden), torch.arange(len(hidden), device=hidden.device))
        return found[:, : self._target_vocab]

    def target_ids(self, ids: torch.Tensor) -> torch.Tensor:
        return ids


def decoder_source(checkpoint: Checkpoint, parts: Mapping[str, Part], target_vocab: int) -> DraftSource:
    """A language model as the drafter of a target with so many ids. ConfigError if it has another vocabulary."""
    vocab_size = checkpoint.config.vocab_size
    if _padded(vocab_size) != _padded(target_vocab):
        raise ConfigError(
            f"the draft model has {vocab_size} token ids, the model {target_vocab}: a draft model must have the "
            "tokenizer of the model it drafts for"
        )

    def build(materials: Materials, group_of_layer: tuple[int, ...]) -> DraftNetwork:
        return DecoderNetwork(materials, group_of_layer, target_vocab)

    return DraftSource("draft_model", checkpoint, parts, build)


def _padded(vocab_size: int) -> int:
    return -(-vocab_size // VOCAB_PADDING)
