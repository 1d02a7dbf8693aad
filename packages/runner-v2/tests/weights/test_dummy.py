"""Made-up weights: right shapes and formats, the same for the same seed, sane in size."""

import math

import pytest
import torch

from lamella.runner_v2.errors import CheckpointError, ConfigError
from lamella.runner_v2.quant.gguf_blocks import dequantise
from lamella.runner_v2.quant.scheme import FORMATS
from lamella.runner_v2.testing.tiny_models import TINY_CONFIGS, WIDE, model_config, tiny_config
from lamella.runner_v2.weights import dummy
from lamella.runner_v2.weights.dummy import DummyCheckpoint
from lamella.runner_v2.weights.loader import check
from lamella.runner_v2.weights.rules import parts_of

LLAMA = model_config(tiny_config("llama", **WIDE))


@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_it_fits_every_family(family: str) -> None:
    config = model_config(tiny_config(family))
    checkpoint = DummyCheckpoint(config)
    parts = parts_of(config)
    check(checkpoint, list(parts.values()))
    for part in parts.values():
        raw = checkpoint.read(part, 0, 1)
        assert tuple(raw.data.shape) == raw.shape == part.shape
        assert raw.format.name == config.dtype
    assert checkpoint.has("lm_head") is not config.tie_embeddings


@pytest.mark.parametrize("name", FORMATS)
def test_formats_and_sizes(name: str) -> None:
    checkpoint, parts = DummyCheckpoint(LLAMA, name), parts_of(LLAMA)
    for key in ("layers.0.gate", "layers.0.down", "embed"):
        raw = checkpoint.read(parts[key], 0, 1)
        values = dequantise(raw.data, raw.format)
        assert values.shape == parts[key].shape
        assert values.std().item() * math.sqrt(values.shape[1]) == pytest.approx(1, rel=0.15)
        assert not torch.equal(values[0], values[1])
    norm = checkpoint.read(parts["layers.0.attn_norm"], 0, 1)
    assert norm.format.name == ("float32" if FORMATS[name].quantised else name)
    assert norm.data.float().mean().item() == pytest.approx(1, abs=0.1)


def test_seeds_and_keys_make_different_weights() -> None:
    part = parts_of(LLAMA)["layers.0.gate"]
    up = parts_of(LLAMA)["layers.0.up"]
    first = DummyCheckpoint(LLAMA, "q4_0", seed=1).read(part, 0, 1).data
    assert torch.equal(first, DummyCheckpoint(LLAMA, "q4_0", seed=1).read(part, 0, 1).data)
    assert not torch.equal(first, DummyCheckpoint(LLAMA, "q4_0", seed=2).read(part, 0, 1).data)
    assert not torch.equal(first, DummyCheckpoint(LLAMA, "q4_0", seed=1).read(up, 0, 1).data)


@pytest.mark.parametrize("name", ["bfloat16", "q4_0"])
def test_it_is_made_where_it_is_wanted(name: str) -> None:
    here, there = DummyCheckpoint(LLAMA, name), DummyCheckpoint(LLAMA, name, device="meta")
    for part in parts_of(LLAMA).values():
        one, other = here.read(part, 0, 1), there.read(part, 0, 1)
        assert other.data.device.type == "meta"
        assert (one.data.shape, one.data.dtype, one.shape) == (other.data.shape, other.data.dtype, other.shape)


def test_views_and_copies_of_the_pool_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [parts_of(LLAMA)[key] for key in ("layers.0.k", "layers.0.gate", "embed", "layers.0.k")]
    viewing = DummyCheckpoint(LLAMA, "bfloat16")
    viewed = [viewing.read(part, 0, 1).data for part in parts]
    monkeypatch.setattr(dummy, "_VIEWED_LEN", 0)
    copying = DummyCheckpoint(LLAMA, "bfloat16")
    for part, data in zip(parts, viewed, strict=True):
        assert torch.equal(data, copying.read(part, 0, 1).data)


def test_routers_spread_and_norms_are_one_in_a_model_with_experts() -> None:
    config = model_config(tiny_config("qwen3_moe"))
    checkpoint, parts = DummyCheckpoint(config), parts_of(config)
    router = checkpoint.read(parts["layers.1.router"], 0, 1).data.float()
    assert router.std().item() == pytest.approx(1, rel=0.15)
    assert checkpoint.read(parts["layers.0.attn_norm"], 0, 1).data.float().eq(1).all()
    expert = checkpoint.read(parts["layers.1.experts.0.up"], 0, 1).data.float()
    assert expert.std().item() * math.sqrt(expert.shape[1]) == pytest.approx(1, rel=0.15)


def test_errors() -> None:
    with pytest.raises(ConfigError, match="unknown format 'q3_k'; known: float32"):
        DummyCheckpoint(LLAMA, "q3_k")
    narrow = model_config(tiny_config("llama"))
    with pytest.raises(ConfigError, match=r"layers.0.q has 64 columns.*q4_k.*256"):
        DummyCheckpoint(narrow, "q4_k").read(parts_of(narrow)["layers.0.q"], 0, 1)
    with pytest.raises(CheckpointError, match=r"has no layers.0.router"):
        DummyCheckpoint(LLAMA).format_of("layers.0.router")
