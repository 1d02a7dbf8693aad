"""Cosines and sines of every kind against transformers' own."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from lamella.runner_v2.config import RopeConfig
from lamella.runner_v2.errors import ConfigError
from lamella.runner_v2.layers.rotary import make_table

HEAD_DIM = 32
ORIGINAL = 64
LONG = tuple(2.0 + 0.1 * i for i in range(HEAD_DIM // 2))
SHORT = tuple(1.0 + 0.01 * i for i in range(HEAD_DIM // 2))

KINDS: dict[str, tuple[RopeConfig, dict[str, Any], int]] = {
    # ours, theirs, length of the text
    "default": (RopeConfig(theta=1e5), {"rope_type": "default", "rope_theta": 1e5}, 100),
    "linear": (
        RopeConfig(kind="linear", factor=8.0),
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
        100,
    ),
    "dynamic, short": (
        RopeConfig(kind="dynamic", factor=4.0, original_max_position=ORIGINAL),
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
        40,
    ),
    "dynamic, long": (
        RopeConfig(kind="dynamic", factor=4.0, original_max_position=ORIGINAL),
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
        150,
    ),
    "llama3": (
        RopeConfig(kind="llama3", theta=5e5, factor=8.0, original_max_position=ORIGINAL),
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": ORIGINAL,
        },
        200,
    ),
    "yarn": (
        RopeConfig(kind="yarn", factor=4.0, original_max_position=ORIGINAL),
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
        200,
    ),
    "yarn, mscale": (
        RopeConfig(
            kind="yarn", factor=40.0, original_max_position=ORIGINAL, mscale=0.7, mscale_all_dim=1.3, truncate=False
        ),
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 40.0,
            "original_max_position_embeddings": ORIGINAL,
            "mscale": 0.7,
            "mscale_all_dim": 1.3,
            "truncate": False,
        },
        200,
    ),
    "longrope, short": (
        RopeConfig(kind="longrope", factor=4.0, original_max_position=ORIGINAL, short_factor=SHORT, long_factor=LONG),
        {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": ORIGINAL,
            "short_factor": list(SHORT),
            "long_factor": list(LONG),
        },
        60,
    ),
    "longrope, long": (
        RopeConfig(kind="longrope", factor=4.0, original_max_position=ORIGINAL, short_factor=SHORT, long_factor=LONG),
        {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": ORIGINAL,
            "short_factor": list(SHORT),
            "long_factor": list(LONG),
        },
        200,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_equals_transformers(kind: str) -> None:
    ours, theirs, length = KINDS[kind]
    config = LlamaConfig(
        hidden_size=2 * HEAD_DIM,
        num_attention_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=ORIGINAL if "dynamic" in kind else 4 * ORIGINAL,
        rope_parameters=theirs,
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(length).unsqueeze(0))
    table = make_table(ours, HEAD_DIM, length, length)
    torch.testing.assert_close(table.cos, cos[0, :, : HEAD_DIM // 2], rtol=0, atol=5e-6)
    torch.testing.assert_close(table.sin, sin[0, :, : HEAD_DIM // 2], rtol=0, atol=5e-6)


def test_partial_rotation_has_a_narrow_table() -> None:
    table = make_table(RopeConfig(rotary_dim=8), HEAD_DIM, 10, 10)
    assert table.cos.shape == (10, 4)
    assert torch.equal(table.cos, make_table(RopeConfig(), 8, 10, 10).cos)


def test_frequency_factors_divide() -> None:
    """Llama 3 files in GGUF carry their scaling as divisors."""
    plain = make_table(RopeConfig(), 4, 7, 7)
    divided = make_table(RopeConfig(freq_factors=(1.0, 2.0)), 4, 13, 13)
    torch.testing.assert_close(divided.cos[:7, 0], plain.cos[:, 0])
    torch.testing.assert_close(divided.cos[::2, 1], plain.cos[:, 1])
    with pytest.raises(ConfigError, match="2 are needed, one per rotating pair, 3 are given"):
        make_table(RopeConfig(freq_factors=(1.0, 2.0, 3.0)), 4, 7, 7)


def test_missing_fields() -> None:
    with pytest.raises(ConfigError, match="original_max_position_embeddings"):
        make_table(RopeConfig(kind="llama3"), HEAD_DIM, 10, 10)
    with pytest.raises(ConfigError, match="16 are needed, one per rotating pair, 0 are given"):
        make_table(RopeConfig(kind="longrope", original_max_position=4), HEAD_DIM, 10, 10)
