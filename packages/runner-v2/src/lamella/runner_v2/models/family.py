"""What a model family declares, and what all decoder families read alike from a config.json."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lamella.runner_v2.config import Activation, LayerConfig, ModelConfig, MoeConfig, RopeConfig
from lamella.runner_v2.models.fields import Fields
from lamella.runner_v2.models.rope import LAYER_TYPES, rope_of, stretched
from lamella.runner_v2.weights.rules import Naming

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

MAX_LAYERS = 10_000
"""Objects are made for each layer before a tensor is looked for."""

DTYPES = {name: name for name in ("float32", "float16", "bfloat16")}

# Options of other families that change the arithmetic: refused where a checkpoint sets them to anything but their
# neutral value, because a model that ignores them would talk nonsense fluently.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "quantization_config": (),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "use_bidirectional_attention": (False,),
    "is_causal": (True,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "residual_multiplier": (1, 1.0),
    "embedding_multiplier": (1, 1.0),
    "attention_multiplier": (),
    "logits_scaling": (1, 1.0),
    "attention_chunk_size": (),
    "no_rope_layers": ([],),
    "num_kv_shared_layers": (0,),
    "shared_expert_intermediate_size": (0,),
    "n_shared_experts": (0,),
    "rope_interleaved": (False,),
}

HF_DECODER: dict[str, str] = {
    "embed": "{prefix}embed_tokens.weight",
    "final_norm": "{prefix}norm.weight",
    "lm_head": "{head}lm_head.weight",
    "layers.{i}.attn_norm": "{prefix}layers.{i}.input_layernorm.weight",
    "layers.{i}.mlp_norm": "{prefix}layers.{i}.post_attention_layernorm.weight",
    **{f"layers.{{i}}.{n}": f"{{prefix}}layers.{{i}}.self_attn.{n}_proj.weight" for n in "qkvo"},
    **{f"layers.{{i}}.{n}_bias": f"{{prefix}}layers.{{i}}.self_attn.{n}_proj.bias" for n in "qkvo"},
    **{f"layers.{{i}}.{n}": f"{{prefix}}layers.{{i}}.mlp.{n}_proj.weight" for n in ("gate", "up", "down")},
    **{f"layers.{{i}}.{n}_bias": f"{{prefix}}layers.{{i}}.mlp.{n}_proj.bias" for n in ("gate", "up", "down")},
}
HF_QK_NORM: dict[str, str] = {
    f"layers.{{i}}.{n}": f"{{prefix}}layers.{{i}}.self_attn.{n}.weight" for n in ("q_norm", "k_norm")
}
HF_MOE: dict[str, str] = {
    "layers.{i}.router": "{prefix}layers.{i}.mlp.gate.weight",
    **{
        f"layers.{{i}}.experts.{{e}}.{n}": f"{{prefix}}layers.{{i}}.mlp.experts.{{e}}.{n}_proj.weight"
        for n in ("gate", "up", "down")
    },
}


@dataclass(frozen=True)
class Family:
    """One model family: which checkpoints are it, how its config.json reads, what its tensors are called."""

    name: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    parse: Callable[[Fields], ModelConfig]
    names: Mapping[str, str]
    """Canonical key -> name, with {i}, {e} and, for what varies between savers, {prefix} and {head}."""
    prefixes: tuple[tuple[str, str], ...] = (("model.", ""),)
    """Pairs (prefix, head) in use; the one under which the embedding is found counts."""
    ignorable: tuple[str, ...] = (r".*rotary_emb\.inv_freq",)
    """Regular expressions of tensor names that carry nothing."""
    left_out: tuple[str, ...] = ()
    """Regular expressions of tensors of another modality, which this build does not use; said once when loading."""

    def naming(self, names: Collection[str]) -> Naming:
        """The names as the given files spell them."""
        prefix, head = next(
            (pair for pair in self.prefixes if f"{pair[0]}embed_tokens.weight" in names), self.prefixes[0]
        )
        spelled = {key: n.replace("{prefix}", prefix).replace("{head}", head) for key, n in self.names.items()}
        return Naming(spelled, self.ignorable + self.left_out)


def decoder_config(
    fields: Fields,
    family: str,
    *,
    head_dim: int | None = None,
    windows: Sequence[int | None] | None = None,
    moes: Sequence[MoeConfig | None] | None = None,
    sliding_rope: RopeConfig | None = None,
    theta: float = 10000.0,
    activation: str = "hidden_act",
    default_activation: str = "silu",
    tie_embeddings: bool = False,
    allow: tuple[str, ...] = (),
    **more: Any,
) -> ModelConfig:
    """The ModelConfig as most families read it. windows and moes are per layer; sliding_rope serves the layers with a
    window where it differs from that of the others; theta, default_activation and tie_embeddings are the family's
    defaults; allow names options which this family understands and others refuse; more goes into ModelConfig.
    """
    for name, neutral in _NEUTRAL.items():
        if name not in allow:
            fields.refuse_unless(name, *neutral)
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.wrong("num_key_value_heads", f"needed: a divisor of num_attention_heads ({num_heads})")
    head_dim = head_dim or head_dim_of(fields)
    num_layers = num_layers_of(fields)
    windows = windows or (None,) * num_layers
    moes = moes or (None,) * num_layers
    rope = rope_of(fields, head_dim, theta=theta)
    if sliding_rope is None:
        sliding_rope = rope_of(fields, head_dim, "sliding_attention", theta)
    ropes = (rope,) if sliding_rope == rope or not any(windows) else (rope, sliding_rope)
    config = ModelConfig(
        family=family,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size"),
        layers=tuple(
            LayerConfig(window, len(ropes) - 1 if window else 0, moe) for window, moe in zip(windows, moes, strict=True)
        ),
        ropes=ropes,
        max_position=_max_position(fields, rope),
        norm_eps=fields.positive("rms_norm_eps", 1e-6),
        attention_scale=head_dim**-0.5,
        activation=fields.choice(activation, ACTIVATIONS, default_activation),
        tie_embeddings=fields.boolean("tie_word_embeddings", tie_embeddings),
        dtype=fields.choice("dtype" if fields.has("dtype") else "torch_dtype", DTYPES, "bfloat16"),
    )
    return replace(config, **more)


def num_layers_of(fields: Fields) -> int:
    """num_hidden_layers."""
    return fields.integer("num_hidden_layers", maximum=MAX_LAYERS)


def head_dim_of(fields: Fields, default: int | None = None) -> int:
    """head_dim, or where it is missing the default, or hidden_size / num_attention_heads."""
    head_dim = fields.optional_integer("head_dim", default)
    if head_dim is not None:
        return head_dim
    hidden, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if hidden % num_heads:
        raise fields.wrong("hidden_size", f"needed: a multiple of num_attention_heads ({num_heads}), or head_dim")
    return hidden // num_heads


def windows_of(fields: Fields, window: int | None, default: Sequence[str]) -> tuple[int | None, ...]:
    """Window of each layer from layer_types, or from the given types where config.json has none."""
    types = fields.texts("layer_types") or tuple(default)
    num_layers = num_layers_of(fields)
    if len(types) != num_layers:
        raise fields.wrong("layer_types", f"needed: one for each of {num_layers} layers")
    if any(name not in LAYER_TYPES for name in types):
        raise fields.unsupported("layer_types", f"supported: {', '.join(LAYER_TYPES)}")
    if window is None and "sliding_attention" in types:
        raise fields.unsupported("layer_types", "supported here, without a sliding window: full_attention")
    return tuple(window if name == "sliding_attention" else None for name in types)


def _max_position(fields: Fields, rope: RopeConfig) -> int:
    """Longest context."""
    return stretched(fields.integer("max_position_embeddings"), rope, fields.source)
