"""The decoder-only language model, assembled from its ModelConfig.

Families: llama, mistral, qwen2, qwen3, qwen3_moe, gemma3_text.
What differs between the families is in the config: biases, norms of heads, sandwich norms, scales, soft caps, windows,
rotations per layer, experts.
"""

from __future__ import annotations

import torch

from lamella.runner_v2.inputs import ModelInput
from lamella.runner_v2.layers.decoder import Carried, Layer, make_decoder_layer
from lamella.runner_v2.layers.embedding import Embedding
from lamella.runner_v2.layers.logits import Logits
from lamella.runner_v2.layers.materials import Materials
from lamella.runner_v2.weights.slots import Slot


class DecoderModel:
    """embed, layers and finish; the loop over the layers belongs to LayerStack."""

    def __init__(self, materials: Materials, group_of_layer: tuple[int, ...]) -> None:
        """group_of_layer: index of the KV group of each layer."""
        self._embedding = Embedding(materials)
        self.layers: list[Layer] = [make_decoder_layer(materials, i, group) for i, group in enumerate(group_of_layer)]
        self._logits = Logits(materials, self._embedding)

    def slots(self) -> list[Slot]:
        """Every weight of this rank."""
        return [*self._logits.slots(), *(slot for layer in self.layers for slot in layer.slots())]

    def embed(self, inputs: ModelInput) -> Carried:
        """The first layer's input: looked up, or given. A layer may change it in place, so what is given is copied."""
        if inputs.embeddings is not None:
            return Carried(inputs.embeddings.clone())
        return Carried(self._embedding(inputs.token_ids))

    def finish(self, carried: Carried, logits_idx: torch.Tensor) -> torch.Tensor:
        """Logits [L, vocab_size] behind the tokens with these indices ([L], strictly increasing).

        float32, or on a device bfloat16.
        """
        hidden = carried.hidden
        # as many as there are tokens: all of them, as in every step that only decodes
        return self._logits(hidden if len(logits_idx) == len(hidden) else hidden[logits_idx])
