"""How layers of Llama's kind lie on disk: fields of config.json, names and shapes of tensors."""

from __future__ import annotations

from typing import Any

OTHER_BASE = {"rope_type": "default", "rope_theta": 500.0}
"""Rotation by a base other than everybody's default, so that one who overlooks it is seen."""


def layer_config(
    kind: str, *, num_layers: int, hidden_size: int, vocab_size: int, attention_bias: bool = False
) -> dict[str, Any]:
    """The fields of a tiny model of `kind` (llama or qwen3), apart from those of rotation."""
    assert kind in ("llama", "qwen3"), kind
    return {
        "architectures": ["LlamaForCausalLM" if kind == "llama" else "Qwen3ForCausalLM"],
        "model_type": kind,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden_size // 4,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "attention_bias": attention_bias,
        "vocab_size": vocab_size,
        "tie_word_embeddings": False,
    }


def layer_shapes(prefix: str, config: dict[str, Any], input_size: int | None = None) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a decoder layer's tensors; `input_size` is what q, k and v read if not hidden_size."""
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"], "v": config["num_key_value_heads"]}
    for name, count in heads.items():
        shapes[f"self_attn.{name}_proj.weight"] = (count * head_dim, input_size or hidden)
        if config["attention_bias"]:
            shapes[f"self_attn.{name}_proj.bias"] = (count * head_dim,)
    shapes["self_attn.o_proj.weight"] = (hidden, heads["q"] * head_dim)
    if config["attention_bias"]:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if config["model_type"] == "qwen3":
        shapes |= {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}
    shapes["post_attention_layernorm.weight"] = (hidden,)
    return {prefix + name: shape for name, shape in (shapes | mlp_shapes("mlp.", hidden, inner)).items()}


def mlp_shapes(prefix: str, hidden_size: int, intermediate_size: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a gated MLP's matrices."""
    return {
        f"{prefix}gate_proj.weight": (intermediate_size, hidden_size),
        f"{prefix}up_proj.weight": (intermediate_size, hidden_size),
        f"{prefix}down_proj.weight": (hidden_size, intermediate_size),
    }


def speculators_config(algorithm: str, num_drafts: int, target_path: str | None) -> dict[str, Any]:
    """The part of a config.json of speculators 0.9.0 that says how to propose, and for whom."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": num_drafts,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [proposal],
        "verifier": {"name_or_path": target_path, "architectures": []},
    }
