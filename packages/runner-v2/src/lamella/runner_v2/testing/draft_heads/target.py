"""What draft heads use of their target: its embedding, its last norm and its output matrix, in a folder that looks like
a Llama's of eight layers without the layers. For targets that compute, see `testing/tiny_models.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

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
