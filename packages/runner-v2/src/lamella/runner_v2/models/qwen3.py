"""Qwen3, dense and mixture of experts: RMSNorm over the head dimension of every q and k head."""

from __future__ import annotations

from lamella.runner_v2.config import ModelConfig, MoeConfig
from lamella.runner_v2.models.family import (
    HF_DECODER,
    HF_MOE,
    HF_QK_NORM,
    Family,
    decoder_config,
    head_dim_of,
    num_layers_of,
    windows_of,
)
from lamella.runner_v2.models.fields import Fields
from lamella.runner_v2.models.qwen2 import qwen_windows


def parse_qwen3(fields: Fields) -> ModelConfig:
    bias = fields.boolean("attention_bias", False)
    return decoder_config(
        fields,
        "qwen3",
        head_dim=head_dim_of(fields, 128),
        windows=qwen_windows(fields),
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
    )


def parse_qwen3_moe(fields: Fields) -> ModelConfig:
    """Experts on layer i unless mlp_only_layers names it or (i + 1) is no multiple of decoder_sparse_step. A window,
    where use_sliding_window switches it on, serves all layers."""
    num_layers = num_layers_of(fields)
    window = fields.optional_integer("sliding_window", 4096) if fields.boolean("use_sliding_window", False) else None
    kind = "full_attention" if window is None else "sliding_attention"
    # the number of experts has two names
    experts = fields.integer("num_experts" if fields.has("num_experts") else "num_local_experts", 128)
    moe = MoeConfig(
        num_experts=experts,
        num_experts_per_token=fields.integer("num_experts_per_tok", 8, maximum=experts),
        intermediate_size=fields.integer("moe_intermediate_size", 768),
        norm_topk=fields.boolean("norm_topk_prob", False),
    )
    if moe.num_experts_per_token > experts:
        raise fields.wrong("num_experts_per_tok", f"needed: at most the number of experts ({experts})")
    dense = set(fields.integers("mlp_only_layers"))
    step = fields.integer("decoder_sparse_step", 1)
    bias = fields.boolean("attention_bias", False)
    return decoder_config(
        fields,
        "qwen3_moe",
        windows=windows_of(fields, window, (kind,) * num_layers),
        moes=[None if idx in dense or (idx + 1) % step else moe for idx in range(num_layers)],
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
    )


QWEN3 = Family("qwen3", ("Qwen3ForCausalLM",), ("qwen3",), parse_qwen3, HF_DECODER | HF_QK_NORM)
QWEN3_MOE = Family(
    "qwen3_moe", ("Qwen3MoeForCausalLM",), ("qwen3_moe",), parse_qwen3_moe, HF_DECODER | HF_QK_NORM | HF_MOE
)
