"""Decoder layers as MTP modules have them, which are those of their target: what they hold on disk and compute.

| kind | attention | MLP | norms |
|---|---|---|---|
| qwen3 | grouped queries, q and k normed per head | gated | w |
| qwen3_5_text | the same, q_proj gives [query, gate] per head, partial rotation | gated | 1 + w |
| qwen3_next | as qwen3_5_text | softmax router, experts, one gated shared expert | 1 + w |
| glm4_moe | grouped queries, partial rotation | sigmoid router with a bias for the choice, shared experts | w |
| deepseek_v3 | MLA: keys and values from one latent vector, interleaved rotation | the same, by groups of experts | w |

One token at a time, in float64. Formulas: the models' reports (2412.19437 for MLA and the router by groups).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lamella.runner_v2.testing.draft_heads.checkpoint import Array
from lamella.runner_v2.testing.draft_heads.layer_format import OTHER_BASE, layer_config, layer_shapes, mlp_shapes
from lamella.runner_v2.testing.draft_heads.plain_layers import (
    LayerShape,
    Weights,
    attend,
    gated_mlp,
    rms_norm,
    rotate,
    sigmoid,
    softmax,
)

KINDS = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
"""model_type -> architecture."""

GATED = ("qwen3_5_text", "qwen3_next")
_SHARES = {"qwen3_5_text": 0.5, "qwen3_next": 0.5, "glm4_moe": 0.5}
_EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "glm4_moe": {
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 0,
        "use_qk_norm": True,
    },
    "deepseek_v3": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 0,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "rope_interleave": True,
    },
}


def kind_config(kind: str, *, num_layers: int, hidden_size: int, vocab_size: int) -> dict[str, Any]:
    """config.json of a tiny target of `kind`, all of whose layers are of one shape."""
    config = layer_config("qwen3", num_layers=num_layers, hidden_size=hidden_size, vocab_size=vocab_size)
    config |= {"model_type": kind, "architectures": [KINDS[kind]], "rms_norm_eps": 1e-6, "rope_parameters": OTHER_BASE}
    if kind in _SHARES:
        config["rope_parameters"] = {**OTHER_BASE, "partial_rotary_factor": _SHARES[kind]}
    if kind in GATED:
        config["layer_types"] = ["full_attention"] * num_layers
    if kind == "qwen3_5_text":
        pairs = int(config["head_dim"] * _SHARES[kind]) // 2
        sections = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
        config["rope_parameters"] |= {"mrope_section": sections, "mrope_interleaved": True}
    config |= _EXPERTS.get(kind, {})
    if kind == "deepseek_v3":
        config["num_key_value_heads"] = config["num_attention_heads"]
        del config["head_dim"]
    return config


def kind_shapes(prefix: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of one layer's tensors."""
    kind, hidden = config["model_type"], config["hidden_size"]
    if kind == "deepseek_v3":
        shapes = _mla_shapes(config)
    else:
        shapes = layer_shapes("", {**config, "model_type": "qwen3"})
        if kind in GATED:
            width, read = shapes["self_attn.q_proj.weight"]
            shapes["self_attn.q_proj.weight"] = (2 * width, read)
    if kind in _EXPERTS:
        shapes = {name: shape for name, shape in shapes.items() if not name.startswith("mlp.")}
        shapes |= _expert_shapes(config, hidden)
    return {prefix + name: shape for name, shape in shapes.items()}


def _mla_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    plain, turned, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    query, latent = config["q_lora_rank"], config["kv_lora_rank"]
    return {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_a_proj.weight": (query, hidden),
        "self_attn.q_a_layernorm.weight": (query,),
        "self_attn.q_b_proj.weight": (heads * (plain + turned), query),
        "self_attn.kv_a_proj_with_mqa.weight": (latent + turned, hidden),
        "self_attn.kv_a_layernorm.weight": (latent,),
        "self_attn.kv_b_proj.weight": (heads * (plain + value), latent),
        "self_attn.o_proj.weight": (hidden, heads * value),
        "post_attention_layernorm.weight": (hidden,),
    }


def _expert_shapes(config: dict[str, Any], hidden: int) -> dict[str, tuple[int, ...]]:
    inner, softmax_router = config["moe_intermediate_size"], config["model_type"] == "qwen3_next"
    count = config["num_experts"] if softmax_router else config["n_routed_experts"]
    shapes: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (count, hidden)}
    for index in range(count):
        shapes |= mlp_shapes(f"mlp.experts.{index}.", hidden, inner)
    if softmax_router:
        shapes |= mlp_shapes("mlp.shared_expert.", hidden, config["shared_expert_intermediate_size"])
        return shapes | {"mlp.shared_expert_gate.weight": (1, hidden)}
    shapes["mlp.gate.e_score_correction_bias"] = (count,)
    return shapes | mlp_shapes("mlp.shared_experts.", hidden, inner * config["n_shared_experts"])


class KindLayer:
    """One layer of a target of `config`'s kind."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config, self.kind = config, config["model_type"]
        self.eps: float = config["rms_norm_eps"]
        self.plus = 1.0 if self.kind in GATED else 0.0

    def norm(self, weights: Weights, name: str, x: Array) -> Array:
        return rms_norm(x, self.plus + weights[f"{name}.weight"], self.eps)

    def run(self, weights: Weights, rows: Sequence[Array], positions: Sequence[int]) -> list[Array]:
        """All rows of one sequence through the layer whose tensors are `weights`."""
        normed = [self.norm(weights, "input_layernorm", x) for x in rows]
        attention = weights.below("self_attn.")
        mixed = (self._mla if self.kind == "deepseek_v3" else self._grouped)(attention, normed, positions)
        after = [x + y for x, y in zip(rows, mixed)]
        return [x + self._mlp(weights.below("mlp."), self.norm(weights, "post_attention_layernorm", x)) for x in after]

    def _grouped(self, weights: Weights, inputs: Sequence[Array], positions: Sequence[int]) -> list[Array]:
        shape = LayerShape.of(self.config)
        outputs, seen = [], []
        for x, position in zip(inputs, positions):
            keys = weights.linear("k_proj", x).reshape(shape.num_kv_heads, shape.head_dim)
            keys = rotate(self.norm(weights, "k_norm", keys), position, shape.theta, shape.rotary_dim)
            seen.append((keys, weights.linear("v_proj", x).reshape(shape.num_kv_heads, shape.head_dim)))
            heads = weights.linear("q_proj", x).reshape(shape.num_heads, -1)
            queries, gates = heads[:, : shape.head_dim], heads[:, shape.head_dim :]
            queries = rotate(self.norm(weights, "q_norm", queries), position, shape.theta, shape.rotary_dim)
            mixed = attend(queries, seen)
            if self.kind in GATED:
                mixed = mixed * sigmoid(gates.reshape(-1))
            outputs.append(weights.linear("o_proj", mixed))
        return outputs

    def _mla(self, weights: Weights, inputs: Sequence[Array], positions: Sequence[int]) -> list[Array]:
        config = self.config
        heads, plain, value = config["num_attention_heads"], config["qk_nope_head_dim"], config["v_head_dim"]
        latent, theta = config["kv_lora_rank"], config["rope_parameters"]["rope_theta"]
        outputs, seen = [], []
        for x, position in zip(inputs, positions):
            compressed = weights.linear("kv_a_proj_with_mqa", x)
            shared_key = _rotate_pairs(compressed[None, latent:], position, theta)
            expanded = weights.linear("kv_b_proj", self.norm(weights, "kv_a_layernorm", compressed[:latent]))
            expanded = expanded.reshape(heads, plain + value)
            keys = np.concatenate([expanded[:, :plain], np.repeat(shared_key, heads, axis=0)], axis=1)
            seen.append((keys, expanded[:, plain:]))
            queries = weights.linear("q_b_proj", self.norm(weights, "q_a_layernorm", weights.linear("q_a_proj", x)))
            queries = queries.reshape(heads, -1)
            turned = _rotate_pairs(queries[:, plain:], position, theta)
            outputs.append(weights.linear("o_proj", attend(np.concatenate([queries[:, :plain], turned], axis=1), seen)))
        return outputs

    def _mlp(self, weights: Weights, x: Array) -> Array:
        if self.kind not in _EXPERTS:
            return gated_mlp(weights, x)
        scores = weights["gate.weight"] @ x
        chosen = self._softmax_choice(scores) if self.kind == "qwen3_next" else self._group_choice(weights, scores)
        routed = sum(share * gated_mlp(weights.below(f"experts.{index}."), x) for index, share in chosen.items())
        if self.kind == "qwen3_next":
            shared = sigmoid(weights.linear("shared_expert_gate", x)) * gated_mlp(weights.below("shared_expert."), x)
        else:
            shared = gated_mlp(weights.below("shared_experts."), x)
        return np.asarray(routed + shared)

    def _softmax_choice(self, scores: Array) -> dict[int, float]:
        """Expert -> share: the likeliest ones, renormalised."""
        assert self.config["norm_topk_prob"]
        likely = softmax(scores)
        best = np.argsort(-likely)[: self.config["num_experts_per_tok"]]
        return {int(index): float(likely[index] / likely[best].sum()) for index in best}

    def _group_choice(self, weights: Weights, scores: Array) -> dict[int, float]:
        """Expert -> share: the best by sigmoid + bias, of the groups whose two best add up to most; the bias counts for
        the choice only."""
        config = self.config
        assert config["norm_topk_prob"]
        plain = sigmoid(scores)
        biased = plain + weights["gate.e_score_correction_bias"]
        groups = np.split(biased, config["n_group"])
        totals = np.array([np.sort(group)[-2:].sum() for group in groups])
        kept = np.argsort(-totals)[: config["topk_group"]]
        size = len(biased) // config["n_group"]
        allowed = [index for index in range(len(biased)) if index // size in kept]
        best = sorted(allowed, key=lambda index: -biased[index])[: config["num_experts_per_tok"]]
        total = sum(plain[index] for index in best)
        return {index: float(plain[index] / total * config["routed_scaling_factor"]) for index in best}


def _rotate_pairs(heads: Array, position: int, theta: float) -> Array:
    """RoPE with pairs side by side: number 2i with number 2i + 1."""
    width = heads.shape[-1]
    turned: Array = heads.copy()
    for i in range(width // 2):
        angle = position * theta ** (-2.0 * i / width)
        first, second = heads[:, 2 * i], heads[:, 2 * i + 1]
        turned[:, 2 * i] = first * np.cos(angle) - second * np.sin(angle)
        turned[:, 2 * i + 1] = second * np.cos(angle) + first * np.sin(angle)
    return turned
