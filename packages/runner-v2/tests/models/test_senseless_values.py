"""Every field of a config, and every number of a GGUF file's metadata, with values that make no sense.

A config is read, or refused by an error that a person can act on. No other error, no endless loop, no memory eaten.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lamella.runner_v2.config import ModelConfig
from lamella.runner_v2.errors import RunnerError
from lamella.runner_v2.layers.rotary import make_table
from lamella.runner_v2.models.gguf import gguf_config
from lamella.runner_v2.testing.tiny_gguf import ARCHITECTURES, write_gguf
from lamella.runner_v2.testing.tiny_models import TINY_CONFIGS, model_config, tiny_config
from lamella.runner_v2.weights.gguf_file import GgufFile

SENSELESS: tuple[Any, ...] = (
    *(None, True, "", "x", "9" * 5000, b"x", [], [None], [[1]], {}, {"rope_type": 5}, {"full_attention": 3}),
    *(-1, 0, 1, 3, 10**7, 10**12, 10**400, -(10**400)),
    *(-1.0, 0.0, 1e-320, 1.5, 1e300, math.nan, math.inf, -math.inf),
)
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 64},
    {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 64,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "attention_factor": 1.0,
    },
    {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "attention_factor": 1.0,
    },
)


def survives(values: dict[str, Any]) -> ModelConfig | None:
    try:
        return model_config(values)
    except RunnerError as error:
        assert len(str(error)) < 600  # noqa: PT017 - most values are refused, some are not
        return None


@pytest.mark.parametrize("family", list(TINY_CONFIGS))
def test_any_field_of_a_config(family: str) -> None:
    config = tiny_config(family)
    for name in config:
        for value in SENSELESS:
            survives({**config, name: value})
        survives({key: config[key] for key in config if key != name})


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
def test_any_number_of_a_rope(rope: dict[str, Any]) -> None:
    """The tables of what is read are finite, or refused."""
    assert rope_survives(rope)
    for name in rope:
        for value in SENSELESS:
            rope_survives({**rope, name: value})


def rope_survives(rope: dict[str, Any]) -> bool:
    config = survives(tiny_config("llama", rope_parameters=rope))
    if config is None:
        return False
    try:
        table = make_table(config.ropes[0], config.head_dim, 128, 128)
    except RunnerError:
        return False
    assert table.cos.isfinite().all()
    assert table.sin.isfinite().all()
    return True


def test_a_norm_needs_a_positive_epsilon() -> None:
    for value in (0, -1e-5, math.nan, math.inf):
        with pytest.raises(RunnerError, match="rms_norm_eps"):
            model_config(tiny_config("llama", rms_norm_eps=value))


def test_counts_are_bounded_before_anything_is_made_of_them() -> None:
    for name in ("num_hidden_layers", "max_position_embeddings", "num_attention_heads", "vocab_size"):
        with pytest.raises(RunnerError, match=f"{name} is 1000000000000; needed: .* at most"):
            model_config(tiny_config("llama", **{name: 10**12}))


@pytest.mark.parametrize("family", list(ARCHITECTURES))
def test_any_number_of_gguf_metadata(family: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, family, tokenizer=False)
    file = GgufFile(path)
    metadata = dict(file.metadata())
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}

    def vector(name: str) -> tuple[float, ...] | None:
        tensor = file.tensors.get(name)
        return None if tensor is None else tuple(tensor.data.tolist())

    def read(values: Mapping[str, Any]) -> None:
        try:
            gguf_config(values, shapes, vector, "tiny.gguf", "float32")
        except RunnerError as error:
            assert len(str(error)) < 600  # noqa: PT017 - most values are refused, some are not

    gguf_config(metadata, shapes, vector, "tiny.gguf", "float32")
    for name in metadata:
        for value in SENSELESS:
            read({**metadata, name: value})
        read({key: metadata[key] for key in metadata if key != name})


@pytest.mark.parametrize("kind", ["linear", "yarn", "longrope"])
def test_any_scaling_of_gguf_metadata(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "qwen2", tokenizer=False)
    file = GgufFile(path)
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    metadata = {**file.metadata(), "qwen2.rope.scaling.type": kind, "qwen2.rope.scaling.factor": 2.0}
    extra = ("factor", "original_context_length", "attn_factor", "yarn_beta_fast", "yarn_beta_slow", "yarn_attn_factor")
    for name in extra:
        for value in SENSELESS:
            try:
                config = gguf_config(
                    {**metadata, f"qwen2.rope.scaling.{name}": value}, shapes, lambda _: None, "tiny.gguf", "float32"
                )
                make_table(config.ropes[0], config.head_dim, 128, 128)
            except RunnerError:
                pass


def test_a_stretch_beyond_all_contexts_is_refused() -> None:
    for factor in (1e300, 1e9):
        rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": factor, "original_max_position_embeddings": 64}
        with pytest.raises(RunnerError, match="stretched by"):
            model_config(tiny_config("llama", rope_parameters=rope))
