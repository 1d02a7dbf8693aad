"""What draft heads use of their target: its embedding, its last norm and its output matrix, in a folder that looks like
a Llama's of eight layers without the layers. For targets that compute, see `testing/tiny_models.py`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lamella.runner_v2.testing.draft_heads import checkpoint
from lamella.runner_v2.testing.draft_heads.checkpoint import Array


def write_ends(folder: str | Path, seed: int = 0, *, hidden_size: int = 64, vocab_size: int = 320) -> Path:
    """Write config.json and the three tensors that lie at a target's ends; returns the folder."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden_size // 4,
        "rms_norm_eps": 1e-5,
        "vocab_size": vocab_size,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab_size, hidden_size),
        "model.norm.weight": (hidden_size,),
        "lm_head.weight": (vocab_size, hidden_size),
    }
    return checkpoint.write(folder, config, checkpoint.random_tensors(seed, shapes))


class Ends(NamedTuple):
    """The ends of a target, as a head shares them."""

    embedding: Array  # [vocab_size, hidden_size]
    norm: Array  # [hidden_size], the factor of the last norm
    output: Array  # [vocab_size, hidden_size], lm_head or the tied embedding


def ends(folder: str | Path) -> Ends:
    """Read them from a target's folder with Llama's names."""
    tensors = checkpoint.read(folder).tensors
    embedding = tensors["model.embed_tokens.weight"]
    return Ends(embedding, tensors["model.norm.weight"], tensors.get("lm_head.weight", embedding))


class DraftEnds:
    """Embedding and output matrix of a head: its own where its checkpoint has them, else the target's; and the ids that
    its rows of logits stand for. Names: embed_tokens.weight, lm_head.weight, d2t."""

    def __init__(self, tensors: Mapping[str, Array], vocab_size: int, target: Ends | None) -> None:
        self.vocab_size = vocab_size
        self.ids = list(range(vocab_size))  # the target's id of each id of the head's vocabulary
        if "d2t" in tensors:
            self.ids = [draft_id + int(shift) for draft_id, shift in enumerate(tensors["d2t"])]
        missing = {"embed_tokens.weight", "lm_head.weight"} - tensors.keys()
        assert target is not None or not missing, (
            f"the checkpoint shares {sorted(missing)} with its target: pass target"
        )
        self.embedding: Array = tensors["embed_tokens.weight"] if target is None else target.embedding
        self.embedding = tensors.get("embed_tokens.weight", self.embedding)
        if "lm_head.weight" in tensors:
            self.output = tensors["lm_head.weight"]
        else:
            assert target is not None
            self.output = target.output[self.ids]

    def spread(self, logits: Array) -> Array:
        """[draft_vocab_size] -> [vocab_size], -inf where an id is not in the head's vocabulary."""
        spread = np.full(self.vocab_size, -np.inf)
        spread[self.ids] = logits
        return spread
