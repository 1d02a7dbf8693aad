"""Llama and what is built like it: Llama 2 and 3, SmolLM2, Mistral."""

from __future__ import annotations

from lamella.runner_v2.config import ModelConfig
from lamella.runner_v2.models.family import HF_DECODER, Family, decoder_config, num_layers_of, windows_of
from lamella.runner_v2.models.fields import Fields


def parse_llama(fields: Fields) -> ModelConfig:
    """Full attention everywhere; biases where attention_bias and mlp_bias ask for them."""
    bias = fields.boolean("attention_bias", False)
    # refuses layer types other than full attention
    full = ("full_attention",) * num_layers_of(fields)
    return decoder_config(
        fields,
        "llama",
        windows=windows_of(fields, None, full),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.boolean("mlp_bias", False),
    )


def parse_mistral(fields: Fields) -> ModelConfig:
    """One window for all layers: null means none, a missing field means 4096 (as in the first release)."""
    window = fields.optional_integer("sliding_window", 4096)
    kind = "full_attention" if window is None else "sliding_attention"
    windows = windows_of(fields, window, (kind,) * num_layers_of(fields))
    if any(w != window for w in windows):
        raise fields.unsupported("layer_types", "supported: the same for all layers, as sliding_window says")
    return decoder_config(fields, "mistral", windows=windows)


LLAMA = Family("llama", ("LlamaForCausalLM",), ("llama",), parse_llama, HF_DECODER)
MISTRAL = Family("mistral", ("MistralForCausalLM",), ("mistral",), parse_mistral, HF_DECODER)
