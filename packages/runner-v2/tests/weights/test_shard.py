"""Cutting for 2 and 4 ranks: the pieces put together are the whole, in dense and in every block format."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from lamella.runner_v2.config import ModelConfig
from lamella.runner_v2.errors import ConfigError
from lamella.runner_v2.quant.gguf_blocks import dequantise, random_blocks
from lamella.runner_v2.quant.scheme import FORMATS, WeightFormat
from lamella.runner_v2.testing.tiny_models import TINY_CONFIGS, WIDE, model_config, tiny_config
from lamella.runner_v2.weights.dummy import DummyCheckpoint
from lamella.runner_v2.weights.rules import parts_of
from lamella.runner_v2.weights.shard import cut, span_of, vocab_rows
from lamella.runner_v2.weights.slots import Part, RawPart, Shard

FLOAT32 = FORMATS["float32"]


def raw_matrix(rows: int, columns: int, format: WeightFormat) -> torch.Tensor:
    if not format.quantised:
        return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(getattr(torch, format.name))
    blocks = random_blocks(format, rows * columns // format.block_len, 0.1, np.random.default_rng(0))
    return torch.from_numpy(blocks).reshape(rows, -1)


def pieces(part: Part, format: WeightFormat, data: torch.Tensor, tp_size: int) -> list[torch.Tensor]:
    cuts = [cut(part, format, data, rank, tp_size) for rank in range(tp_size)]
    values = [dequantise(raw.data, format) for raw in cuts]
    assert [tuple(v.shape) for v in values] == [raw.shape for raw in cuts]
    assert all(raw.data.is_contiguous() for raw in cuts)
    return values


@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.parametrize("name", FORMATS)
def test_rows_and_columns(name: str, tp_size: int) -> None:
    format = FORMATS[name]
    data = raw_matrix(32, 4 * 256, format)
    whole = dequantise(data, format)
    rows = pieces(Part("w", (32, 1024), Shard("rows", 8)), format, data, tp_size)
    assert torch.equal(torch.cat(rows), whole)
    assert {piece.shape for piece in rows} == {(32 // tp_size, 1024)}
    columns = pieces(Part("w", (32, 1024), Shard("columns", 256)), format, data, tp_size)
    assert torch.equal(torch.cat(columns, 1), whole)
    assert {piece.shape for piece in columns} == {(32, 1024 // tp_size)}


@pytest.mark.parametrize("name", ["float32", "q4_0", "q4_k"])
def test_few_kv_heads_are_replicated_on_neighbours(name: str) -> None:
    format = FORMATS[name]
    data = raw_matrix(2 * 8, 256, format)
    whole = dequantise(data, format)
    part = Part("k", (16, 256), Shard("rows", 8))
    first, second = whole[:8], whole[8:]
    for got, expected in zip(pieces(part, format, data, 4), (first, first, second, second), strict=True):
        assert torch.equal(got, expected)
    bias = torch.arange(16.0)
    got = cut(Part("k_bias", (16,), Shard("rows", 8)), FLOAT32, bias, 2, 4)
    assert torch.equal(got.data, bias[8:])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("vocab", "tp_size"), [(12, 4), (10, 4), (9, 2), (5, 4)])
def test_vocabulary_is_filled_up_with_zero_rows(name: str, vocab: int, tp_size: int) -> None:
    format = FORMATS[name]
    data = raw_matrix(vocab, 256, format)
    got = pieces(Part("embed", (vocab, 256), Shard("vocab")), format, data, tp_size)
    assert {piece.shape[0] for piece in got} == {vocab_rows(vocab, tp_size)}
    gathered = torch.cat(got)
    assert torch.equal(gathered[:vocab], dequantise(data, format))
    assert not gathered[vocab:].any()


def test_output_bias_joins_the_partial_sum_once() -> None:
    bias = torch.arange(1.0, 5.0)
    got = pieces(Part("o_bias", (4,), Shard("first")), FLOAT32, bias, 4)
    assert torch.equal(torch.stack(got).sum(0), bias)


def test_replicated_and_single_rank_are_the_whole() -> None:
    data = torch.randn(6, 4)
    for part in (Part("w", (6, 4)), Part("w", (6, 4), Shard("rows", 2))):
        tp_size = 3 if part.shard.kind == "replicated" else 1
        assert torch.equal(cut(part, FLOAT32, data, 0, tp_size).data, data)


def test_pieces_are_views_where_they_can_be() -> None:
    data = torch.randn(8, 4)
    got = cut(Part("w", (8, 4), Shard("rows", 2)), FLOAT32, data, 1, 2)
    assert got.data.data_ptr() == data[4:].data_ptr()


@pytest.mark.parametrize(
    ("key", "shape", "shard", "name", "tp_size", "words"),
    [
        ("layers.3.q", (576, 576), Shard("rows", 64), "float32", 2, "2 does not divide layers.3.q: 9 heads of 64"),
        ("layers.3.k", (192, 576), Shard("rows", 64), "float32", 4, "4 does not divide layers.3.k: 3 heads of 64"),
        ("layers.0.o", (64, 64), Shard("columns", 32), "float32", 4, "4 does not divide layers.0.o: 2 heads of 32"),
        ("layers.0.gate", (130, 64), Shard("rows"), "float32", 4, "4 does not divide layers.0.gate: 130 rows"),
        ("layers.0.down", (64, 4864), Shard("columns"), "q4_k", 2, r"layers.0.down \(4864 .* 2432, .*256 of q4_k"),
        ("layers.0.down", (64, 192), Shard("columns"), "q4_1", 4, r"layers.0.down \(192 .* 48, .*32 of q4_1"),
    ],
)
def test_impossible_cuts_are_named(
    key: str, shape: tuple[int, ...], shard: Shard, name: str, tp_size: int, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        span_of(Part(key, shape, shard), FORMATS[name], 0, tp_size)


@pytest.mark.parametrize(("name", "tp_size"), [("float32", 2), ("float32", 4), ("q8_0", 2), ("q6_k", 4)])
@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_every_part_of_every_family_reassembles(family: str, name: str, tp_size: int) -> None:
    extra = {"moe_intermediate_size": 1024, "num_experts": 4, "vocab_size": 322} if FORMATS[name].quantised else {}
    config = model_config(tiny_config(family, **{**WIDE, "num_hidden_layers": 1, "layer_types": None, **extra}))
    checkpoint = DummyCheckpoint(config, name)
    for part in parts_of(config).values():
        whole = checkpoint.read(part, 0, 1)
        ranks = [checkpoint.read(part, rank, tp_size) for rank in range(tp_size)]
        assert torch.equal(JOIN[part.shard.kind](part, ranks, config), dequantise(whole.data, whole.format)), part.key


def _join_rows(part: Part, ranks: list[RawPart], config: ModelConfig) -> torch.Tensor:
    copies = max(1, len(ranks) * part.shard.unit_len // part.shape[0])
    return torch.cat([dequantise(raw.data, raw.format) for raw in ranks[::copies]])


def _join_equal(part: Part, ranks: list[RawPart], config: ModelConfig) -> torch.Tensor:
    values = [dequantise(raw.data, raw.format) for raw in ranks]
    assert all(torch.equal(value, values[0]) for value in values)
    return values[0]


JOIN: dict[str, Callable[[Part, list[RawPart], ModelConfig], torch.Tensor]] = {
    "rows": _join_rows,
    "columns": lambda part, ranks, config: torch.cat([dequantise(raw.data, raw.format) for raw in ranks], 1),
    "vocab": lambda part, ranks, config: torch.cat([dequantise(r.data, r.format) for r in ranks])[: config.vocab_size],
    "first": lambda part, ranks, config: torch.stack([dequantise(raw.data, raw.format) for raw in ranks]).sum(0),
    "replicated": _join_equal,
}
