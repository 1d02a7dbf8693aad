"""GGUF metadata -> ModelConfig, and what GGUF calls the tensors. One naming serves all architectures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from lamella.runner_v2.config import LayerConfig, ModelConfig, MoeConfig, RopeConfig
from lamella.runner_v2.errors import CheckpointError
from lamella.runner_v2.models.family import MAX_LAYERS
from lamella.runner_v2.models.fields import MAX_INTEGER, Fields
from lamella.runner_v2.models.gemma3 import embed_scale
from lamella.runner_v2.models.rope import stretched
from lamella.runner_v2.weights.rules import Naming

ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma3": "gemma3_text",
}

_NAMES: dict[str, str] = {
    "embed": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "lm_head": "output.weight",
    "layers.{i}.attn_norm": "blk.{i}.attn_norm.weight",
    "layers.{i}.mlp_norm": "blk.{i}.ffn_norm.weight",
    "layers.{i}.attn_post_norm": "blk.{i}.post_attention_norm.weight",
    "layers.{i}.mlp_post_norm": "blk.{i}.post_ffw_norm.weight",
    **{f"layers.{{i}}.{n}": f"blk.{{i}}.attn_{n}.weight" for n in ("q", "k", "v", "q_norm", "k_norm")},
    **{f"layers.{{i}}.{n}_bias": f"blk.{{i}}.attn_{n}.bias" for n in "qkv"},
    "layers.{i}.o": "blk.{i}.attn_output.weight",
    "layers.{i}.o_bias": "blk.{i}.attn_output.bias",
    **{f"layers.{{i}}.{n}": f"blk.{{i}}.ffn_{n}.weight" for n in ("gate", "up", "down")},
    **{f"layers.{{i}}.{n}_bias": f"blk.{{i}}.ffn_{n}.bias" for n in ("gate", "up", "down")},
    "layers.{i}.router": "blk.{i}.ffn_gate_inp.weight",
    **{f"layers.{{i}}.experts.{{e}}.{n}": f"blk.{{i}}.ffn_{n}_exps.weight" for n in ("gate", "up", "down")},
}
GGUF_NAMING = Naming(_NAMES, ignorable=(r"rope_freqs\.weight", r"rope_factors_(long|short)\.weight"))

# Widest Gemma 3: its attention scale is by hidden / heads; GGUF files do not say so.
_GEMMA3_27B_LAYERS = 62

Vector = Callable[[str], "tuple[float, ...] | None"]


def gguf_config(
    metadata: Mapping[str, object], shapes: Mapping[str, tuple[int, ...]], vector: Vector, path: str, embed_dtype: str
) -> ModelConfig:
    """The configuration of a GGUF file.

    shapes: of all tensors. vector(name): the values of a small float32 tensor, or None. embed_dtype: type of the
    embedding's weights, float32 where they are quantised.
    """
    fields = Fields(metadata, path)
    family = fields.choice("general.architecture", ARCHITECTURES)
    own = _Own(fields, fields.text("general.architecture"))
    if "token_embd.weight" not in shapes:
        raise CheckpointError(f"{path}: there is no tensor token_embd.weight")
    num_layers = own.count("block_count", maximum=MAX_LAYERS)
    num_heads, hidden = own.count("attention.head_count"), own.count("embedding_length")
    num_kv_heads = own.integer("attention.head_count_kv", num_heads) or num_heads
    if num_heads % num_kv_heads:
        raise fields.wrong(own.name("attention.head_count_kv"), f"needed: a divisor of the head count ({num_heads})")
    head_dim = own.count("attention.key_length", hidden // num_heads)
    if own.integer("attention.value_length", head_dim) != head_dim:
        raise fields.unsupported(own.name("attention.value_length"), f"supported: that of the keys, {head_dim}")
    config = ModelConfig(
        family=family,
        vocab_size=shapes["token_embd.weight"][0],
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=own.integer("feed_forward_length", 1),
        layers=(),
        ropes=(),
        max_position=own.count("context_length"),
        norm_eps=fields.positive(own.name("attention.layer_norm_rms_epsilon")),
        attention_scale=own.number("attention.scale", 0.0) or head_dim**-0.5,
        tie_embeddings="output.weight" not in shapes,
        qkv_bias="blk.0.attn_q.bias" in shapes,
        o_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_down.bias" in shapes,
        qk_norm=family in ("qwen3", "qwen3_moe", "gemma3_text"),
        dtype=embed_dtype,
        generation=_generation(fields),
    )
    rope = _rope(own, head_dim, vector)
    if family == "llama" and rope.rotary_dim is not None:
        raise fields.unsupported(own.name("rope.dimension_count"), f"supported: the head dimension, {head_dim}")
    config = replace(config, max_position=stretched(config.max_position, rope, path))
    if family == "gemma3_text":
        return _gemma3(own, config, rope, num_layers)
    window = own.integer("attention.sliding_window", 0) or None
    moe = _moe(own, config)
    layers = tuple(
        LayerConfig(window, 0, moe if f"blk.{idx}.ffn_gate_inp.weight" in shapes else None) for idx in range(num_layers)
    )
    return replace(config, layers=layers, ropes=(rope,))


class _Own:
    """Fields that carry the architecture's name in front. Zero is allowed: writers use it for "none"."""

    def __init__(self, fields: Fields, architecture: str) -> None:
        self.fields = fields
        self._architecture = architecture

    def name(self, name: str) -> str:
        return f"{self._architecture}.{name}"

    def integer(self, name: str, default: int | None = None) -> int:
        return self.fields.integer(self.name(name), default, minimum=0)

    def count(self, name: str, default: int | None = None, maximum: int = MAX_INTEGER) -> int:
        """Where zero makes no sense."""
        return self.fields.integer(self.name(name), default, maximum=maximum)

    def number(self, name: str, default: float | None = None) -> float:
        return self.fields.number(self.name(name), default)

    def refuse_unless(self, name: str, *neutral: object) -> None:
        self.fields.refuse_unless(self.name(name), *neutral)


def _rope(own: _Own, head_dim: int, vector: Vector) -> RopeConfig:
    rotary_dim = own.integer("rope.dimension_count", head_dim)
    rope = RopeConfig(
        theta=own.fields.positive(own.name("rope.freq_base"), 10000.0),
        rotary_dim=rotary_dim if rotary_dim != head_dim else None,
        freq_factors=vector("rope_freqs.weight"),
    )
    # a factor without a type is linear; older files use another name for it
    kind = own.fields.choice(
        own.name("rope.scaling.type"),
        {"none": "none", "linear": "linear", "yarn": "yarn", "longrope": "longrope"},
        "linear",
    )
    factor = own.number("rope.scaling.factor", own.number("rope.scale_linear", 0.0))
    if kind == "none" or (kind != "longrope" and factor in (0.0, 1.0)):
        return rope
    if factor < 0:
        raise own.fields.wrong(own.name("rope.scaling.factor"), "needed: a positive number")
    if kind == "linear":
        return replace(rope, kind="linear", factor=factor)
    original = own.count("rope.scaling.original_context_length", own.count("context_length"))
    attn_factor = own.number("rope.scaling.attn_factor", own.number("rope.scaling.yarn_attn_factor", 0.0)) or None
    if kind == "longrope":
        return replace(
            rope,
            kind="longrope",
            factor=factor or own.count("context_length") / original,
            original_max_position=original,
            attention_factor=attn_factor,
            short_factor=vector("rope_factors_short.weight"),
            long_factor=vector("rope_factors_long.weight"),
        )
    own.refuse_unless("rope.scaling.yarn_ext_factor", 1.0, -1.0)
    own.refuse_unless("rope.scaling.yarn_log_multiplier", 0.0)
    return replace(
        rope,
        kind="yarn",
        factor=factor,
        original_max_position=original,
        # GGUF's factor comes on top of the one that YaRN prescribes
        attention_factor=None if attn_factor is None else attn_factor * (1 + 0.1 * math.log(factor)),
        beta_fast=own.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=own.number("rope.scaling.yarn_beta_slow", 1.0),
    )


def _gemma3(own: _Own, config: ModelConfig, rope: RopeConfig, num_layers: int) -> ModelConfig:
    window = own.integer("attention.sliding_window", 0) or None
    pattern = own.fields.values.get(own.name("attention.sliding_window_pattern"), 6)
    if isinstance(pattern, list):
        sliding = [bool(item) for item in pattern]
        if len(sliding) != num_layers:
            raise own.fields.wrong(own.name("attention.sliding_window_pattern"), f"needed: {num_layers} of them")
    else:
        period = own.integer("attention.sliding_window_pattern", 6) or 1
        sliding = [(idx + 1) % period != 0 for idx in range(num_layers)]
    own.refuse_unless("attn_logit_softcapping", 0.0)
    scale = config.attention_scale
    if num_layers == _GEMMA3_27B_LAYERS and not own.number("attention.scale", 0.0):
        scale = float(config.hidden_size // config.num_heads) ** -0.5
    local = RopeConfig(theta=own.fields.positive(own.name("rope.freq_base_swa"), 10000.0), rotary_dim=rope.rotary_dim)
    return replace(
        config,
        layers=tuple(LayerConfig(window if s else None, int(s and window is not None)) for s in sliding),
        ropes=(rope, local),
        attention_scale=scale,
        activation="gelu_tanh",
        sandwich_norms=True,
        embed_scale=embed_scale(config.hidden_size, config.dtype),
        logits_softcap=own.number("final_logit_softcapping", 0.0) or None,
    )


def _moe(own: _Own, config: ModelConfig) -> MoeConfig | None:
    num_experts = own.integer("expert_count", 0)
    if num_experts == 0:
        return None
    if config.family != "qwen3_moe":
        raise own.fields.unsupported(own.name("expert_count"), "supported with experts: architecture qwen3moe")
    own.refuse_unless("expert_weights_scale", 0.0, 1.0)
    own.refuse_unless("expert_shared_count", 0)
    return MoeConfig(
        num_experts=num_experts,
        num_experts_per_token=own.count("expert_used_count", maximum=num_experts),
        intermediate_size=own.count("expert_feed_forward_length"),
        norm_topk=own.fields.boolean(own.name("expert_weights_norm"), True),
    )


def _generation(fields: Fields) -> dict[str, object]:
    names = {
        "temp": "temperature",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "penalty_repeat": "repetition_penalty",
    }
    found = {ours: fields.values.get(f"general.sampling.{theirs}") for theirs, ours in names.items()}
    return {name: value for name, value in found.items() if value is not None}
