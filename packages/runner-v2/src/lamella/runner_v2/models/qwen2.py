"""Qwen2 and Qwen2.5: Llama with biases on q, k and v."""

from __future__ import annotations

from lamella.runner_v2.config import ModelConfig
from lamella.runner_v2.models.family import HF_DECODER, Family, decoder_config, num_layers_of, windows_of
from lamella.runner_v2.models.fields import Fields


def qwen_windows(fields: Fields) -> tuple[int | None, ...]:
    """use_sliding_window switches sliding_window on for the layers from max_window_layers on."""
    num_layers = num_layers_of(fields)
    window = fields.optional_integer("sliding_window", 4096) if fields.boolean("use_sliding_window", False) else None
    first = num_layers if window is None else fields.integer("max_window_layers", 28, minimum=0)
    types = ["sliding_attention" if idx >= first else "full_attention" for idx in range(num_layers)]
    return windows_of(fields, window, types)


def parse_qwen2(fields: Fields) -> ModelConfig:
    return decoder_config(fields, "qwen2", windows=qwen_windows(fields), qkv_bias=True)


QWEN2 = Family("qwen2", ("Qwen2ForCausalLM",), ("qwen2",), parse_qwen2, HF_DECODER)
