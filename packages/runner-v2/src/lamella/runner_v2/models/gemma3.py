"""Gemma 3 text models, also inside the multimodal wrapper (whose vision tower is left out).

Five layers with a sliding window to one with full attention, each kind with a rotary embedding of its own; norms on
both sides of attention and MLP; norm factors stored as w - 1; embeddings scaled by sqrt(hidden).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from lamella.runner_v2.config import ModelConfig, RopeConfig
from lamella.runner_v2.models.family import (
    HF_DECODER,
    HF_QK_NORM,
    Family,
    decoder_config,
    head_dim_of,
    num_layers_of,
    windows_of,
)
from lamella.runner_v2.models.fields import Fields
from lamella.runner_v2.models.rope import rope_of

_TEXT_DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}

HF_GEMMA3 = (
    HF_DECODER
    | HF_QK_NORM
    | {
        "layers.{i}.attn_post_norm": "{prefix}layers.{i}.post_attention_layernorm.weight",
        "layers.{i}.mlp_norm": "{prefix}layers.{i}.pre_feedforward_layernorm.weight",
        "layers.{i}.mlp_post_norm": "{prefix}layers.{i}.post_feedforward_layernorm.weight",
    }
)
_IGNORABLE = (r".*rotary_emb.*inv_freq", r".*embed_tokens\.embed_scale")


def embed_scale(hidden_size: int, dtype: str) -> float:
    """sqrt(hidden) as a number of the type of the embedding's weights."""
    return float(torch.tensor(hidden_size**0.5, dtype=getattr(torch, dtype)))


def parse_gemma3_text(fields: Fields) -> ModelConfig:
    fields = Fields({**_TEXT_DEFAULTS, **fields.values}, fields.source)
    num_layers, head_dim = num_layers_of(fields), head_dim_of(fields)
    # two spellings of the pattern's length; layer_types, where present, takes its place
    period_name = "sliding_window_pattern" if fields.has("sliding_window_pattern") else "_sliding_window_pattern"
    period = fields.integer(period_name, 6)
    types = ["full_attention" if (idx + 1) % period == 0 else "sliding_attention" for idx in range(num_layers)]
    bias = fields.boolean("attention_bias", False)
    config = decoder_config(
        fields,
        "gemma3_text",
        windows=windows_of(fields, fields.optional_integer("sliding_window"), types),
        sliding_rope=_sliding_rope(fields, head_dim),
        theta=1_000_000.0,
        activation="hidden_activation" if fields.has("hidden_activation") else "hidden_act",
        default_activation="gelu_pytorch_tanh",
        tie_embeddings=True,
        allow=("attn_logit_softcapping", "final_logit_softcapping"),
        attention_scale=fields.positive("query_pre_attn_scalar", 256.0) ** -0.5,
        attention_softcap=fields.optional_number("attn_logit_softcapping"),
        logits_softcap=fields.optional_number("final_logit_softcapping"),
        qk_norm=True,
        norm_plus_one=True,
        sandwich_norms=True,
        qkv_bias=bias,
        o_bias=bias,
    )
    return replace(config, embed_scale=embed_scale(config.hidden_size, config.dtype))


def parse_gemma3(fields: Fields) -> ModelConfig:
    """The text part of a multimodal checkpoint. tie_word_embeddings may stand inside or outside."""
    text = fields.section("text_config")
    if text is None:
        raise fields.wrong("text_config", "this model family needs it")
    outer = ("tie_word_embeddings", "dtype", "torch_dtype", "quantization_config")
    inherited = {name: fields.values[name] for name in outer if fields.has(name) and not text.has(name)}
    return parse_gemma3_text(Fields({**text.values, **inherited}, text.source))


def _sliding_rope(fields: Fields, head_dim: int) -> RopeConfig:
    """Nested in rope_parameters, or in older files rope_local_base_freq; never scaled in the latter."""
    nested = fields.section("rope_parameters")
    if nested is not None:
        return rope_of(fields, head_dim, "sliding_attention", 10_000.0)
    return RopeConfig(theta=fields.positive("rope_local_base_freq", 10_000.0))


GEMMA3_TEXT = Family(
    "gemma3_text", ("Gemma3ForCausalLM",), ("gemma3_text",), parse_gemma3_text, HF_GEMMA3, ignorable=_IGNORABLE
)
GEMMA3 = Family(
    "gemma3_text",
    ("Gemma3ForConditionalGeneration",),
    ("gemma3",),
    parse_gemma3,
    HF_GEMMA3,
    prefixes=(("language_model.model.", "language_model."), ("model.language_model.", ""), ("model.", "")),
    ignorable=_IGNORABLE,
    left_out=(r"(model\.)?(vision_tower|multi_modal_projector)\..*",),
)
