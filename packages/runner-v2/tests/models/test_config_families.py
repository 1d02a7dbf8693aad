"""config.json of real models and odd variants of them -> ModelConfig."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from lamella.runner_v2.config import ModelConfig, MoeConfig, RopeConfig
from lamella.runner_v2.errors import CheckpointError, UnsupportedError
from lamella.runner_v2.models.fields import Fields
from lamella.runner_v2.models.registry import ARCHITECTURES, family_of
from lamella.runner_v2.testing.tiny_models import tiny_config

CONFIGS = Path(__file__).parent / "configs"


def hub(name: str, **changes: Any) -> ModelConfig:
    return parse({**json.loads((CONFIGS / f"{name}.json").read_text()), **changes})


def parse(values: dict[str, Any]) -> ModelConfig:
    fields = Fields(values, "config.json")
    return family_of(fields).parse(fields)


def shape(config: ModelConfig) -> tuple[int, ...]:
    return (
        config.hidden_size,
        config.num_layers,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.intermediate_size,
        config.vocab_size,
        config.max_position,
    )


def windows(config: ModelConfig) -> list[int | None]:
    return [layer.window for layer in config.layers]


def test_llama_31() -> None:
    config = hub("llama-3.1-8b-instruct")
    assert config.family == "llama"
    assert shape(config) == (4096, 32, 32, 8, 128, 14336, 128256, 131072)
    assert config.ropes == (
        RopeConfig(
            theta=500000.0,
            kind="llama3",
            factor=8.0,
            original_max_position=8192,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
        ),
    )
    assert (config.norm_eps, config.attention_scale, config.tie_embeddings) == (1e-5, 128**-0.5, False)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm) == (False,) * 4


def test_smollm2() -> None:
    config = hub("smollm2-135m-instruct")
    assert shape(config) == (576, 30, 9, 3, 64, 1536, 49152, 8192)
    assert config.ropes == (RopeConfig(theta=100000.0),)
    assert config.tie_embeddings
    assert config.dtype == "bfloat16"


def test_llama_with_biases() -> None:
    config = hub("smollm2-135m-instruct", attention_bias=True, mlp_bias=True)
    assert config.qkv_bias
    assert config.o_bias
    assert config.mlp_bias


def test_mistral() -> None:
    first, third = hub("mistral-7b-v0.1"), hub("mistral-7b-instruct-v0.3")
    assert first.family == third.family == "mistral"
    assert windows(first) == [4096] * 32
    assert windows(third) == [None] * 32
    assert shape(third) == (4096, 32, 32, 8, 128, 14336, 32768, 32768)
    assert third.ropes == (RopeConfig(theta=1e6),)
    values = json.loads((CONFIGS / "mistral-7b-v0.1.json").read_text())
    del values["sliding_window"]
    assert windows(parse(values)) == [4096] * 32, "the class's default where the field is missing"


def test_qwen2() -> None:
    config = hub("qwen2.5-0.5b-instruct")
    assert config.family == "qwen2"
    assert shape(config) == (896, 24, 14, 2, 64, 4864, 151936, 32768)
    assert (config.qkv_bias, config.o_bias, config.qk_norm) == (True, False, False)
    assert windows(config) == [None] * 24
    assert config.tie_embeddings


def test_qwen2_windows() -> None:
    config = hub("qwen2.5-0.5b-instruct", use_sliding_window=True, sliding_window=4096)
    assert windows(config) == [None] * 21 + [4096] * 3
    typed = ["full_attention", "sliding_attention"] * 12
    config = hub("qwen2.5-0.5b-instruct", use_sliding_window=True, sliding_window=4096, layer_types=typed)
    assert windows(config) == [None, 4096] * 12


def test_qwen2_yarn_lengthens_the_context() -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
    config = hub("qwen2.5-0.5b-instruct", rope_scaling=scaling)
    assert config.max_position == 131072
    assert config.ropes == (RopeConfig(theta=1e6, kind="yarn", factor=4.0, original_max_position=32768),)


def test_qwen3() -> None:
    config = hub("qwen3-0.6b")
    assert config.family == "qwen3"
    assert shape(config) == (1024, 28, 16, 8, 128, 3072, 151936, 40960)
    assert (config.qkv_bias, config.o_bias, config.qk_norm, config.tie_embeddings) == (False, False, True, True)


def test_qwen3_moe() -> None:
    config = hub("qwen3-30b-a3b")
    assert config.family == "qwen3_moe"
    assert shape(config) == (2048, 48, 32, 4, 128, 6144, 151936, 40960)
    assert {layer.moe for layer in config.layers} == {MoeConfig(128, 8, 768, True)}
    mixed = hub("qwen3-30b-a3b", mlp_only_layers=[0], decoder_sparse_step=2)
    assert [idx for idx, layer in enumerate(mixed.layers) if layer.moe] == list(range(1, 48, 2))
    with_default = hub("qwen3-30b-a3b", norm_topk_prob=None)
    assert with_default.layers[0].moe == MoeConfig(128, 8, 768, False)


def test_qwen3_moe_in_the_spelling_of_newer_savers() -> None:
    values = json.loads((CONFIGS / "qwen3-30b-a3b.json").read_text())
    del values["num_experts"], values["head_dim"]
    assert parse({**values, "num_local_experts": 64}).layers[0].moe == MoeConfig(64, 8, 768, True)
    assert parse({**values, "num_local_experts": 64}).head_dim == 64


def test_gemma3_1b() -> None:
    config = hub("gemma-3-1b-it")
    assert config.family == "gemma3_text"
    assert shape(config) == (1152, 26, 4, 1, 256, 6912, 262144, 32768)
    assert windows(config) == [None if idx % 6 == 5 else 512 for idx in range(26)]
    assert config.ropes == (RopeConfig(theta=1e6), RopeConfig(theta=10000.0))
    assert [layer.rope_idx for layer in config.layers] == [0 if idx % 6 == 5 else 1 for idx in range(26)]
    assert (config.activation, config.tie_embeddings) == ("gelu_tanh", True)
    assert config.norm_plus_one
    assert config.sandwich_norms
    assert config.qk_norm
    assert config.attention_scale == 1 / 16
    assert config.embed_scale == 34.0  # sqrt(1152) = 33.94 in bfloat16
    assert hub("gemma-3-1b-it", torch_dtype="float32").embed_scale == pytest.approx(1152**0.5)


def test_gemma3_inside_the_multimodal_wrapper() -> None:
    config = hub("gemma-3-4b-it")
    assert config.family == "gemma3_text"
    assert shape(config) == (2560, 34, 8, 4, 256, 10240, 262208, 131072)
    assert windows(config) == [None if idx % 6 == 5 else 1024 for idx in range(34)]
    assert config.ropes == (RopeConfig(theta=1e6, kind="linear", factor=8.0), RopeConfig(theta=10000.0))
    assert config.embed_scale == 50.5
    assert config.tie_embeddings


def test_gemma3_options() -> None:
    config = hub("gemma-3-1b-it", query_pre_attn_scalar=168, attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
    assert config.attention_scale == 168**-0.5
    assert (config.attention_softcap, config.logits_softcap) == (50.0, 30.0)
    assert [layer.window for layer in hub("gemma-3-1b-it", sliding_window_pattern=2).layers[:4]] == [512, None] * 2


def test_rope_of_one_kind_in_every_spelling() -> None:
    parameters = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    parameters["original_max_position_embeddings"] = 8192
    expected = hub("llama-3.1-8b-instruct").ropes
    for key in ("type", "rope_type"):
        scaling = {**parameters, key: "llama3"}
        assert hub("llama-3.1-8b-instruct", rope_scaling=scaling).ropes == expected
        nested = {"full_attention": {**scaling, "rope_theta": 500000.0}}
        for newer in ({**scaling, "rope_theta": 500000.0}, nested):
            config = hub("llama-3.1-8b-instruct", rope_scaling=None, rope_theta=None, rope_parameters=newer)
            assert config.ropes == expected


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"type": "linear", "factor": 2.0}, RopeConfig(theta=100000.0, kind="linear", factor=2.0)),
        (
            {"type": "dynamic", "factor": 2.0},
            RopeConfig(theta=100000.0, kind="dynamic", factor=2.0, original_max_position=8192),
        ),
        (
            {"rope_type": "yarn", "original_max_position_embeddings": 2048, "beta_fast": 16, "truncate": False},
            RopeConfig(
                theta=100000.0, kind="yarn", factor=4.0, original_max_position=2048, beta_fast=16.0, truncate=False
            ),
        ),
        (
            {
                "type": "su",
                "short_factor": [1.0] * 32,
                "long_factor": [2.0] * 32,
                "original_max_position_embeddings": 4096,
            },
            RopeConfig(
                theta=100000.0,
                kind="longrope",
                factor=2.0,
                original_max_position=4096,
                short_factor=(1.0,) * 32,
                long_factor=(2.0,) * 32,
            ),
        ),
    ],
)
def test_rope_kinds(scaling: dict[str, Any], expected: RopeConfig) -> None:
    assert hub("smollm2-135m-instruct", rope_scaling=scaling).ropes == (expected,)


def test_partial_rotation() -> None:
    with pytest.raises(UnsupportedError, match=r"partial_rotary_factor = 0\.5 .*take it out"):
        hub("smollm2-135m-instruct", partial_rotary_factor=0.5)


def test_tiny_configs_nest_rope_per_layer_type() -> None:
    config = parse(tiny_config("gemma3_text"))
    assert config.ropes == (RopeConfig(theta=100000.0, kind="linear", factor=4.0), RopeConfig(theta=10000.0))
    assert windows(config) == [16, 16, None] * 2


def test_model_type_alone_is_enough() -> None:
    for architecture in ("LlamaForCausalLM", "Gemma3ForCausalLM"):
        name = {"LlamaForCausalLM": "llama", "Gemma3ForCausalLM": "gemma3_text"}[architecture]
        values = {**tiny_config(name), "architectures": None}
        assert parse(values) == parse(tiny_config(name))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"architectures": ["FooForCausalLM"]}, UnsupportedError, ["FooForCausalLM", *ARCHITECTURES]),
        ({"architectures": None, "model_type": "foo"}, UnsupportedError, ["model_type", "'foo'", "qwen3_moe"]),
        ({"rope_scaling": {"type": "spiral", "factor": 2}}, UnsupportedError, ["type", "'spiral'", "llama3"]),
        ({"rope_scaling": {"rope_type": "linear"}}, CheckpointError, ["rope_scaling", "factor is missing"]),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, CheckpointError, ["short_factor", "64"]),
        ({"quantization_config": {"quant_method": "awq"}}, UnsupportedError, ["quantization_config", "awq"]),
        ({"hidden_act": "relu6"}, UnsupportedError, ["hidden_act", "'relu6'", "silu"]),
        ({"torch_dtype": "float64"}, UnsupportedError, ["torch_dtype", "'float64'", "bfloat16"]),
        ({"use_bidirectional_attention": True}, UnsupportedError, ["use_bidirectional_attention = True"]),
        ({"residual_multiplier": 0.22}, UnsupportedError, ["residual_multiplier = 0.22"]),
        ({"layer_types": ["sliding_attention"] * 32}, UnsupportedError, ["layer_types", "full_attention"]),
        ({"layer_types": ["full_attention"] * 31}, CheckpointError, ["layer_types", "32 layers"]),
        ({"hidden_size": None}, CheckpointError, ["hidden_size is None"]),
        ({"hidden_size": "wide"}, CheckpointError, ["hidden_size is 'wide'", "whole number"]),
        ({"num_hidden_layers": 0}, CheckpointError, ["num_hidden_layers is 0"]),
        ({"num_key_value_heads": 5}, CheckpointError, ["num_key_value_heads is 5", "divisor"]),
        ({"hidden_size": 4100}, CheckpointError, ["hidden_size is 4100", "num_attention_heads (32)"]),
        ({"tie_word_embeddings": "yes"}, CheckpointError, ["tie_word_embeddings", "true or false"]),
        ({"rope_theta": -1}, CheckpointError, ["rope_theta"]),
    ],
)
def test_errors_name_field_and_value(changes: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        hub("llama-3.1-8b-instruct", **changes)
    message = str(caught.value)
    assert "config.json" in message
    assert [word for word in words if word not in message] == []


def test_errors_of_other_families() -> None:
    with pytest.raises(UnsupportedError, match="shared_expert_intermediate_size"):
        hub("qwen3-30b-a3b", shared_expert_intermediate_size=512)
    with pytest.raises(CheckpointError, match="num_experts_per_tok is 200"):
        hub("qwen3-30b-a3b", num_experts_per_tok=200)
    with pytest.raises(CheckpointError, match="text_config is missing"):
        parse({"architectures": ["Gemma3ForConditionalGeneration"]})
    with pytest.raises(UnsupportedError, match="layer_types"):
        hub("mistral-7b-v0.1", layer_types=["full_attention"] * 32)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_transformers_reads_the_same(path: Path) -> None:
    values = json.loads(path.read_text())
    theirs: Any = transformers.AutoConfig.for_model(**values)
    theirs = getattr(theirs, "text_config", theirs)
    ours = parse(values)
    types = getattr(theirs, "layer_types", None) or (
        ["sliding_attention" if theirs.sliding_window else "full_attention"] * theirs.num_hidden_layers
        if hasattr(theirs, "sliding_window")
        else ["full_attention"] * theirs.num_hidden_layers
    )
    assert windows(ours) == [theirs.sliding_window if kind == "sliding_attention" else None for kind in types]
    for kind, layer in zip(types, ours.layers, strict=True):
        rope = theirs.rope_parameters.get(kind, theirs.rope_parameters)
        read = ours.ropes[layer.rope_idx]
        assert (read.kind, read.theta, read.factor) == (rope["rope_type"], rope["rope_theta"], rope.get("factor", 1.0))
    assert ours.vocab_size == theirs.vocab_size
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
