"""A draft model: a small language model with the target's vocabulary that continues the sequence by itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lamella.runner_v2.testing.draft_heads import checkpoint
from lamella.runner_v2.testing.draft_heads.checkpoint import Array
from lamella.runner_v2.testing.draft_heads.layer_format import OTHER_BASE, layer_config, layer_shapes
from lamella.runner_v2.testing.draft_heads.plain_layers import LayerShape, Weights, decoder_layer, rms_norm


def write_checkpoint(
    folder: str | Path,
    seed: int = 0,
    *,
    layer: str = "llama",
    num_layers: int = 2,
    hidden_size: int = 32,
    vocab_size: int = 320,
    attention_bias: bool = False,
    tied: bool = True,
    dtype: str = "float32",
) -> Path:
    """Write a random Llama or Qwen3 (`layer`) as transformers lays it out; tied: the output matrix is the embedding."""
    config = layer_config(
        layer,
        num_layers=num_layers,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        attention_bias=attention_bias,
    )
    config |= {"tie_word_embeddings": tied, "rope_parameters": OTHER_BASE}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab_size, hidden_size),
        "model.norm.weight": (hidden_size,),
    }
    for index in range(num_layers):
        shapes |= layer_shapes(f"model.layers.{index}.", config)
    if not tied:
        shapes["lm_head.weight"] = (vocab_size, hidden_size)
    return checkpoint.write(folder, config, checkpoint.random_tensors(seed, shapes), dtype=dtype)


def reference_logits(
    folder: str | Path,
    token_ids: Sequence[int],  # [num_rows]
    positions: Sequence[int] | None = None,  # [num_rows]
) -> Array:  # [num_rows, vocab_size]
    """Logits behind each token of one sequence, from its first token on; row i is of the token that follows
    token_ids[i]. Drafts are the sequence's next tokens and nothing else: append them to token_ids."""
    config, tensors = checkpoint.read(folder)
    shape, weights = LayerShape.of(config), Weights(tensors, "model.")
    positions = list(positions) if positions is not None else list(range(len(token_ids)))
    rows = [weights["embed_tokens.weight"][token] for token in token_ids]
    for index in range(config["num_hidden_layers"]):
        rows = decoder_layer(weights.below(f"layers.{index}."), shape, rows, positions)
    matrix = weights["embed_tokens.weight"] if config["tie_word_embeddings"] else tensors["lm_head.weight"]
    return np.stack([matrix @ rms_norm(x, weights["norm.weight"], shape.eps) for x in rows])


def reference_drafts(folder: str | Path, token_ids: Sequence[int], num_drafts: int) -> list[int]:
    """The greedy drafts behind token_ids, whose last is the target's newest; the lowest id wins a tie."""
    drafts: list[int] = []
    while len(drafts) < num_drafts:
        drafts.append(int(np.argmax(reference_logits(folder, [*token_ids, *drafts])[-1])))
    return drafts
