"""EAGLE (2401.15077), whose head EAGLE-2 (2406.16858) drafts trees with: a layer on the target's last hidden states.

    hidden state h at position p, token at p + 1
        x = fc([embed(token); h])                2 hidden_size -> hidden_size, with a bias in some checkpoints
        x = layers(x)                            Llama's, but the first has no input_layernorm
        logits = lm_head(x), of the token at p + 2, without a norm;  x is fed back in place of h, at position p + 1

Format of the authors (SafeAILab/EAGLE): fc.*, layers.*, embed_tokens if it is its own; lm_head is the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lamella.runner_v2.testing.draft_heads import checkpoint
from lamella.runner_v2.testing.draft_heads.checkpoint import Array
from lamella.runner_v2.testing.draft_heads.layer_format import OTHER_BASE, layer_config, layer_shapes
from lamella.runner_v2.testing.draft_heads.plain_layers import (
    LayerShape,
    Weights,
    decoder_layer,
    finish_layer,
    self_attention,
)
from lamella.runner_v2.testing.draft_heads.target import DraftEnds, Ends


def write_checkpoint(
    folder: str | Path,
    seed: int = 0,
    *,
    num_layers: int = 1,
    hidden_size: int = 64,
    vocab_size: int = 320,
    fc_bias: bool = False,
    own_embedding: bool = True,
    binary: bool = False,
    dtype: str = "float32",
) -> Path:
    """Write a random EAGLE checkpoint; returns the folder. own_embedding False: the target's embedding is meant.
    binary: pytorch_model.bin, not safetensors."""
    config = layer_config("llama", num_layers=num_layers, hidden_size=hidden_size, vocab_size=vocab_size)
    config |= {"architectures": ["EagleLlamaForCausalLM"], "rope_parameters": OTHER_BASE, "eagle_fc_bias": fc_bias}
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden_size, 2 * hidden_size)}
    if fc_bias:
        shapes["fc.bias"] = (hidden_size,)
    for index in range(num_layers):
        shapes |= layer_shapes(f"layers.{index}.", config)
    del shapes["layers.0.input_layernorm.weight"]
    if own_embedding:
        shapes["embed_tokens.weight"] = (vocab_size, hidden_size)
    tensors = checkpoint.random_tensors(seed, shapes)
    file = "pytorch_model.bin" if binary else "model.safetensors"
    return checkpoint.write(folder, config, tensors, dtype=dtype, file=file)


def reference_logits(
    folder: str | Path,
    hidden_states: Array,  # [num_rows, hidden_size]
    token_ids: Sequence[int],  # [num_rows]
    positions: Sequence[int] | None = None,  # [num_rows]
    *,
    draft_ids: Sequence[int] = (),
    target: Ends,
) -> Array:  # [num_rows + len(draft_ids), vocab_size]
    """Logits of one sequence; arguments as in `eagle3.reference_logits`, with the target's last hidden states."""
    config, tensors = checkpoint.read(folder)
    shape, weights = LayerShape.of(config), Weights(tensors)
    ends = DraftEnds(tensors, config["vocab_size"], target)
    places = list(positions) if positions is not None else list(range(len(token_ids)))
    assert len(hidden_states) == len(token_ids) == len(places) > 0, "one token and one position for each hidden state"

    def enter(h: Array, token: int) -> Array:
        return weights.linear("fc", np.concatenate([ends.embedding[token], h]))

    def last(count: int) -> Array:
        first, rows = weights.below("layers.0."), inputs[:count]
        mixed = self_attention(first.below("self_attn."), shape, rows, places[:count])
        rows = [finish_layer(first, shape, x, y) for x, y in zip(rows, mixed)]
        for index in range(1, config["num_hidden_layers"]):
            rows = decoder_layer(weights.below(f"layers.{index}."), shape, rows, places[:count])
        return rows[-1]

    inputs = [enter(np.asarray(h, np.float64), token) for h, token in zip(hidden_states, token_ids)]
    outputs = [last(row + 1) for row in range(len(inputs))]
    for token in draft_ids:
        places.append(places[-1] + 1)
        inputs.append(enter(outputs[-1], token))
        outputs.append(last(len(inputs)))
    return np.stack([ends.spread(ends.output @ x) for x in outputs])


def reference_drafts(
    folder: str | Path,
    hidden_states: Array,  # [num_rows, hidden_size]
    token_ids: Sequence[int],  # [num_rows]
    num_drafts: int,
    positions: Sequence[int] | None = None,  # [num_rows]
    *,
    target: Ends,
) -> list[int]:
    """The greedy drafts behind the last row, in a chain; the lowest id wins a tie."""
    drafts: list[int] = []
    while len(drafts) < num_drafts:
        logits = reference_logits(folder, hidden_states, token_ids, positions, draft_ids=drafts, target=target)
        drafts.append(int(np.argmax(logits[-1])))
    return drafts
