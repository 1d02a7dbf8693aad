"""Layers that norm for their successor: whole tiny models on the CUDA provider, whose kernels a stand-in plays here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lamella.runner_v2.attention.cuda import CudaAttention
from lamella.runner_v2.attention.paged import PagedAttention
from lamella.runner_v2.config import LayerConfig, ModelConfig, MoeConfig, RopeConfig
from lamella.runner_v2.inputs import LayerCache, ModelInput
from lamella.runner_v2.layers.decoder import Carried, ChainedLayer, DecoderLayer
from lamella.runner_v2.layers.rotary import make_table
from lamella.runner_v2.ops.chained import chained_layer, split_parts
from lamella.runner_v2.ops.providers import cuda_chained, cuda_linear
from lamella.runner_v2.ops.providers.cuda import CudaProvider
from lamella.runner_v2.ops.providers.cuda_linear import FEW_TOKENS
from lamella.runner_v2.ops.providers.torch import TorchProvider
from lamella.runner_v2.ops.spec import Provider, Site
from lamella.runner_v2.testing import cuda_kernels
from lamella.runner_v2.testing.assembled import (
    KERNEL_SIZES,
    MAX_LEN,
    MAX_TOKENS,
    Assembled,
    mixed_steps,
    padded,
    step_of,
)
from lamella.runner_v2.testing.attention_cases import AttentionCase, make_data
from lamella.runner_v2.testing.op_cases import raw_part, relative_error
from lamella.runner_v2.testing.poison import poison, poisoned_memory
from lamella.runner_v2.testing.tiny_models import TINY_CONFIGS, write_folder
from lamella.runner_v2.weights.rules import parts_of


class Counted:
    """Kernels that write down who was called."""

    def __init__(self, kernels: Any) -> None:
        self.calls: list[str] = []
        self._kernels = kernels

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._kernels, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            return function(*args, **kwargs)

        return call


def on_cuda(path: Path, dtype: torch.dtype, kernels: Any = cuda_kernels, kv_dtype: str = "auto") -> Assembled:
    with cuda_kernels.using(kernels):
        return Assembled(path, (CudaProvider(kernels, MAX_TOKENS, "cpu"), TorchProvider(dtype)), dtype, kv_dtype)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for family in TINY_CONFIGS:
        for dtype in ("bfloat16", "float16"):
            write_folder(folder / f"{family}-{dtype}", family, seed=3, dtype=dtype, tokenizer=False, **KERNEL_SIZES)
    return folder


@pytest.fixture
def tails(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel for few tokens' layers, as far as it serves them."""
    monkeypatch.setattr(cuda_chained, "MAX_TAIL_TOKENS", 8)


@pytest.mark.parametrize("max_tail_tokens", [0, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_families_match_the_reference(
    folder: Path, family: str, dtype: torch.dtype, max_tail_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long and short chunks, decoding, a mixture and padding: no farther from the reference in float32 than that
    reference is in 16 bits."""
    monkeypatch.setattr(cuda_chained, "MAX_TAIL_TOKENS", max_tail_tokens)
    path = folder / f"{family}-{str(dtype).removeprefix('torch.')}"
    exact, rounded = Assembled(path, (TorchProvider(),), torch.float32), Assembled(path, (TorchProvider(dtype),), dtype)
    ours = on_cuda(path, dtype)
    results: list[tuple[torch.Tensor, ...]] = []
    for i, batch in enumerate(mixed_steps(ours.config.vocab_size)):
        expected, limit = exact.step(batch), rounded.step(batch)
        with poisoned_memory():
            logits = ours.step(padded(batch, 3) if i == 4 else batch)[: len(expected)]
        assert logits.dtype == (torch.float32 if dtype == torch.float16 else dtype)
        assert relative_error(logits, expected) < 0.1
        results.append((logits, limit, expected))
    logits, limit, expected = (torch.cat(column) for column in zip(*results, strict=True))
    assert relative_error(logits, expected) < 1.25 * relative_error(limit, expected)
    kinds = {type(layer) for layer in ours.model.layers}
    assert kinds == ({DecoderLayer} if family == "gemma3_text" else {ChainedLayer})


def test_a_stage_may_drop_what_was_prepared(folder: Path) -> None:
    path = folder / "qwen3-bfloat16"
    whole, cut = on_cuda(path, torch.bfloat16), on_cuda(path, torch.bfloat16)
    ids = torch.arange(MAX_LEN)[None] % whole.config.vocab_size
    for batch in (step_of(ids, [(0, 0, 80)]), step_of(ids, [(0, 80, 5)])):
        assert relative_error(cut.step(batch, drop_ahead=True), whole.step(batch)) < 3e-2


def test_eight_bit_cache(folder: Path) -> None:
    path = folder / "qwen3-bfloat16"
    reference = Assembled(path, (TorchProvider(),), torch.float32)
    ours = on_cuda(path, torch.bfloat16, kv_dtype="fp8")
    assert ours.caches[0].k.dtype == torch.float8_e4m3fn
    ids = torch.arange(MAX_LEN)[None] % ours.config.vocab_size
    for batch in (step_of(ids, [(0, 0, 30)]), step_of(ids, [(0, 30, 1)])):
        assert relative_error(ours.step(batch), reference.step(batch)) < 0.2  # 3 bits of mantissa in keys and values


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("is_small", [True, False])
def test_nine_kernels_a_layer(folder: Path, family: str, is_small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding; the first layer norms its own input. Large products, cuBLAS's, are not among the calls."""
    if not is_small:
        monkeypatch.setattr(cuda_linear, "SMALL_MATRIX", 0)
    monkeypatch.setattr(cuda_chained, "MAX_TAIL_TOKENS", 0)
    kernels = Counted(cuda_kernels)
    ours = on_cuda(folder / f"{family}-bfloat16", torch.bfloat16, kernels)
    ids = torch.arange(MAX_LEN)[None] % ours.config.vocab_size
    ours.step(step_of(ids, [(0, 0, 20)]))
    kernels.calls.clear()
    ours.step(step_of(ids, [(0, 20, 1)], num_single=1))
    product = ["linear"] if is_small else []
    attention = [*product, "rope_write", "paged_decode", *product, "rms_norm"]
    layer = [*attention, *product, "gated_activation", *product, "rms_norm"]
    assert kernels.calls[:2] == ["decode_schedule_size", "decode_schedule"]
    # the last layer's residual sum is torch's, and the head norms
    expected = ["rms_norm", *layer * ours.config.num_layers, *product]
    assert kernels.calls[2:] == expected


@pytest.mark.usefixtures("tails")
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_three_kernels_a_layer_for_few_tokens(folder: Path, family: str) -> None:
    """Once the layers know who follows. One with biases has none."""
    kernels = Counted(cuda_kernels)
    ours = on_cuda(folder / f"{family}-bfloat16", torch.bfloat16, kernels)
    ids = torch.arange(MAX_LEN)[None] % ours.config.vocab_size
    ours.step(step_of(ids, [(0, 0, 20)]))
    kernels.calls.clear()
    ours.step(step_of(ids, [(0, 20, 1)], num_single=1))
    if family == "qwen2":
        assert "layer_tail" not in kernels.calls
        return
    layer = ["rope_write", "paged_decode", "layer_tail"]
    assert kernels.calls[2:] == ["rms_norm", "linear", *layer * ours.config.num_layers, "rms_norm", "linear"]


@pytest.mark.usefixtures("tails")
def test_three_kernels_a_layer_with_experts(folder: Path) -> None:
    kernels = Counted(cuda_kernels)
    ours = on_cuda(folder / "qwen3_moe-bfloat16", torch.bfloat16, kernels)
    ids = torch.arange(MAX_LEN)[None] % ours.config.vocab_size
    ours.step(step_of(ids, [(0, 0, 20)]))
    kernels.calls.clear()
    ours.step(step_of(ids, [(0, 20, 1)], num_single=1))
    tails = ["layer_tail", *["experts_tail"] * (ours.config.num_layers - 1)]
    layers = [name for tail in tails for name in ("rope_write", "paged_decode", tail)]
    assert kernels.calls[2:] == ["rms_norm", "linear", *layers, "rms_norm", "linear"]
    kernels.calls.clear()
    ours.step(step_of(ids, [(0, 20, 9)]))
    assert "fused_moe" in kernels.calls, "more tokens than the kernel takes"


@pytest.mark.usefixtures("tails")
def test_a_tail_knows_who_follows_or_leaves_it(folder: Path) -> None:
    """The first step of few tokens links the layers; what a layer left for another is not used."""
    kernels = Counted(cuda_kernels)
    ours = on_cuda(folder / "llama-bfloat16", torch.bfloat16, kernels)
    theirs = on_cuda(folder / "llama-bfloat16", torch.bfloat16)
    ids = torch.arange(MAX_LEN)[None] % ours.config.vocab_size
    first = ours.step(step_of(ids, [(0, 0, 7)]))
    assert kernels.calls.count("rms_norm") == ours.config.num_layers + 1
    kernels.calls.clear()
    assert torch.equal(ours.step(step_of(ids, [(0, 0, 7)])), first)
    assert kernels.calls.count("rms_norm") == 2  # before the first layer and the head
    batch = step_of(ids, [(0, 0, 7)])
    for model in (ours, theirs):
        inputs = ModelInput(batch.token_ids, batch.positions, (model.backend.plan(batch, 0),), model.caches)
        carried = model.model.layers[0](model.model.embed(inputs), inputs)
        again = model.model.layers[0](Carried(carried.hidden.clone()), inputs)
        other = model.model.layers[0](carried, inputs)  # not the layer whose qkv lies ready
        assert torch.equal(other.hidden, again.hidden)


@pytest.mark.parametrize("closes", [True, False])
def test_experts_norm_once_at_each_end(folder: Path, closes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the experts the norm is part of their kernel, unless the stream is too wide for it."""
    if not closes:
        monkeypatch.setattr(cuda_chained, "_MAX_CLOSED", 0)
    monkeypatch.setattr(cuda_chained, "MAX_TAIL_TOKENS", 0)
    kernels = Counted(cuda_kernels)
    ours = on_cuda(folder / "qwen3_moe-bfloat16", torch.bfloat16, kernels)
    ids = torch.arange(MAX_LEN)[None] % ours.config.vocab_size
    ours.step(step_of(ids, [(0, 0, 20)]))
    kernels.calls.clear()
    ours.step(step_of(ids, [(0, 20, 1)], num_single=1))
    attention = ["linear", "rope_write", "paged_decode", "linear", "rms_norm"]
    experts = [*attention, "linear", *([] if closes else ["moe_route"]), "fused_moe"]
    first = 2 + 1 + 9  # schedule, norm, dense layer
    behind = [] if closes else ["rms_norm"]
    assert kernels.calls[first:] == [*experts, *behind, *experts, "rms_norm", "linear"]


def test_the_last_layer_prepares_nothing(folder: Path) -> None:
    ours = on_cuda(folder / "llama-bfloat16", torch.bfloat16)
    ids = torch.arange(MAX_LEN)[None] % ours.config.vocab_size
    batch = step_of(ids, [(0, 0, 20)])
    inputs = ModelInput(batch.token_ids, batch.positions, (ours.backend.plan(batch, 0),), ours.caches)
    carried = ours.model.layers[0](ours.model.embed(inputs), inputs)
    assert carried.ahead is not None
    assert carried.ahead.normed.shape == carried.hidden.shape
    assert ours.model.layers[-1](carried, inputs).ahead is None


PLAIN = ModelConfig(
    family="llama",
    vocab_size=256,
    hidden_size=200,  # the last sum of squares is over fewer columns
    num_heads=6,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=128,
    layers=(LayerConfig(), LayerConfig()),
    ropes=(RopeConfig(),),
    max_position=MAX_LEN,
    norm_eps=1e-5,
    attention_scale=0.125,
)
EXPERTS = LayerConfig(moe=MoeConfig(4, 2, 64, norm_topk=False))
VARIANTS = {
    "plain": PLAIN,
    "biased": replace(PLAIN, qkv_bias=True, o_bias=True, mlp_bias=True),
    "norms plus one": replace(PLAIN, norm_plus_one=True, qk_norm=True, norm_eps=0.1),
    "partly rotated pairs": replace(PLAIN, ropes=(RopeConfig(rotary_dim=32, interleaved=True),)),
    "gelu": replace(PLAIN, activation="gelu"),
    "window and soft cap": replace(PLAIN, attention_softcap=5.0, layers=(LayerConfig(window=20),) * 2),
    "experts": replace(PLAIN, layers=(EXPERTS, EXPERTS), o_bias=True),
    "experts behind dense": replace(PLAIN, layers=(LayerConfig(), EXPERTS)),
    "dense behind experts": replace(PLAIN, layers=(EXPERTS, LayerConfig())),
}


def two_layers(
    config: ModelConfig, provider: Provider, dtype: torch.dtype, hidden: torch.Tensor, norm_scale: float
) -> torch.Tensor:
    """hidden [T, H] as one prompt through two layers: chained ones of the provider, or the reference's whole ones."""
    is_reference = isinstance(provider, TorchProvider)
    attention: Any = PagedAttention() if is_reference else CudaAttention(cuda_kernels, "cpu")
    case = AttentionCase(
        "", ((len(hidden), len(hidden)),), config.num_heads, config.num_kv_heads, config.head_dim,
        config.layers[0].window, config.attention_softcap,
    )  # fmt: skip
    attention.bind(case.limits(dtype, dtype))
    data = make_data(case, dtype, dtype=dtype)
    plan, rope = attention.plan(data.batch, 0), make_table(config.ropes[0], config.head_dim, MAX_LEN, MAX_LEN)
    base = 0.0 if config.norm_plus_one else 1.0
    parts = []
    for part in parts_of(config).values():
        raw = raw_part(part.key, part.shape, std=0.2 if len(part.shape) == 1 else None)
        if part.key.endswith("_norm"):
            raw = raw._replace(data=((raw.data + base) * norm_scale).to(torch.float16).float())
        parts.append(raw)
    ahead = None
    for i, layer in enumerate(config.layers):
        own = [part for part in parts if part.key.startswith(f"layers.{i}.")]
        following = [part for part in parts if part.key == f"layers.{i + 1}.attn_norm"]
        params = {"config": config, "layer": layer, "attention": attention.name, "kv_dtype": dtype}
        formats = tuple(part.format for part in own if len(part.shape) > 1)
        site = Site("decoder_layer" if is_reference else "chained_layer", "cpu", dtype, formats, 1, params)
        assert provider.supports(site) is None
        picked = provider.pick(site)
        assert picked.pack is not None
        assert picked.bind is not None
        cache = LayerCache(*(poison(torch.empty_like(pool)) for pool in data.cache))
        handle = picked.bind(picked.pack(own if is_reference else [*own, *following]), rope, attention)
        if is_reference:
            hidden = picked.run(hidden, plan, cache, handle)
        else:
            hidden, ahead = picked.run(hidden, ahead, plan, cache, handle)
    assert ahead is None
    return hidden


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_tokens", [1, FEW_TOKENS, 70])
@pytest.mark.parametrize("variant", VARIANTS)
def test_two_layers_match_the_reference(variant: str, num_tokens: int, dtype: torch.dtype) -> None:
    config = VARIANTS[variant]
    hidden = torch.randn(num_tokens, config.hidden_size, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = two_layers(config, TorchProvider(), torch.float32, hidden.float(), 1.0)
    ours = two_layers(config, CudaProvider(cuda_kernels, 128, "cpu"), dtype, hidden.clone(), 1.0)
    # two experts may be nearly as good as each other
    errors = (ours.float() - expected).norm(dim=1) / expected.norm(dim=1)
    assert errors.median() < (8e-3 if dtype == torch.bfloat16 else 1e-3)
    assert (errors < 2e-2).float().mean() > 0.9


@pytest.mark.parametrize("num_tokens", [5, 70])
def test_a_large_residual_stream_fits_float16(num_tokens: int) -> None:
    """What a norm's weight would lift beyond 65,504 is divided first."""
    hidden = torch.randn(num_tokens, PLAIN.hidden_size, generator=torch.Generator().manual_seed(1)) * 5000
    expected = two_layers(PLAIN, TorchProvider(), torch.float32, hidden.half().float(), 10.0)
    ours = two_layers(PLAIN, CudaProvider(cuda_kernels, 128, "cpu"), torch.float16, hidden.half(), 10.0)
    assert relative_error(ours, expected) < 1e-2


def test_the_reference_prepares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = torch.zeros(2, 8)
    monkeypatch.setattr("lamella.runner_v2.ops.chained.decoder_layer", lambda x, *_: x + 1)
    result, ahead = chained_layer(hidden, "anything", None, SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    assert torch.equal(result, hidden + 1)
    assert ahead is None


def test_the_next_norm_is_told_by_its_layer() -> None:
    keys = ("layers.1.attn_norm", "layers.1.q", "layers.10.attn_norm")
    parts = [raw_part(key, (8,) if key.endswith("norm") else (8, 8)) for key in keys]
    own, following = split_parts(parts)
    assert [part.key for part in own] == list(keys[:2])
    assert following is parts[2]
    assert split_parts(parts[:2]) == (parts[:2], None)
