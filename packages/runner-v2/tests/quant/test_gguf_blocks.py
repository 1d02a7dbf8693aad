"""Dequantising equals the gguf library, on random blocks of every format."""

import gguf
import numpy as np
import pytest
import torch
from gguf import quants

from lamella.runner_v2.errors import UnsupportedError
from lamella.runner_v2.quant.gguf_blocks import dequantise, format_of_ggml, ggml_types, random_blocks
from lamella.runner_v2.quant.scheme import FORMATS

QUANTISED = [name for name, format in FORMATS.items() if format.quantised]


@pytest.mark.parametrize("name", QUANTISED)
def test_scheme_agrees_with_the_library(name: str) -> None:
    block_len, block_bytes = gguf.GGML_QUANT_SIZES[ggml_types()[name]]
    assert (FORMATS[name].block_len, FORMATS[name].block_bytes) == (block_len, block_bytes)


@pytest.mark.parametrize("name", QUANTISED)
def test_dequantised_values_are_the_librarys(name: str) -> None:
    format = FORMATS[name]
    # more rows than are worked on at once
    rows = random_blocks(format, 5000 * 2, 0.1, np.random.default_rng(1)).reshape(5000, -1)
    values = dequantise(torch.from_numpy(rows), format)
    assert values.shape == (5000, 2 * format.block_len)
    assert torch.equal(values, torch.from_numpy(quants.dequantize(rows, ggml_types()[name])))


@pytest.mark.parametrize("name", ["q4_1", "q6_k"])
def test_leading_dimensions_are_kept(name: str) -> None:
    format = FORMATS[name]
    rows = torch.from_numpy(random_blocks(format, 24, 0.1, np.random.default_rng(2))).reshape(
        2, 3, 4 * format.block_bytes
    )
    values = dequantise(rows, format)
    assert values.shape == (2, 3, 4 * format.block_len)
    assert torch.equal(values[1, 2], dequantise(rows[1, 2], format))


@pytest.mark.parametrize("name", QUANTISED)
def test_random_blocks_are_finite_and_of_the_asked_size(name: str) -> None:
    blocks = random_blocks(FORMATS[name], 512, 0.02, np.random.default_rng(3))
    values = quants.dequantize(blocks, ggml_types()[name])
    assert np.isfinite(values).all()
    assert values.std() == pytest.approx(0.02, rel=0.1)
    assert abs(values.mean()) < 0.004
    assert len(np.unique(blocks[:, 6])) > 200, "codes are random"


def test_dense_becomes_float32() -> None:
    data = torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16)
    assert torch.equal(dequantise(data, FORMATS["bfloat16"]), torch.tensor([[1.5, -2.0]]))


def test_unsupported_type_is_named() -> None:
    with pytest.raises(UnsupportedError, match=r"blk\.0\.attn_q\.weight has GGUF type IQ4_XS; supported: .*Q4_K"):
        format_of_ggml(gguf.GGMLQuantizationType.IQ4_XS, "blk.0.attn_q.weight")
