"""Tensor operations give the numbers of the gguf library, bit for bit."""

import numpy as np
import pytest
import torch

from lamella.runner_v2.quant import device_blocks
from lamella.runner_v2.quant.device_blocks import dequantise_blocks
from lamella.runner_v2.quant.gguf_blocks import dequantise, random_blocks
from lamella.runner_v2.quant.scheme import FORMATS

QUANTISED = [name for name, format in FORMATS.items() if format.quantised]


@pytest.mark.parametrize("name", QUANTISED)
def test_equal_to_the_library(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    format = FORMATS[name]
    blocks = torch.from_numpy(random_blocks(format, 6 * 10, 0.02, np.random.default_rng(0)))
    data = blocks.view(2, 3, 10 * format.block_bytes)
    expected = dequantise(data, format)
    assert torch.equal(dequantise_blocks(data, format), expected)
    monkeypatch.setattr(device_blocks, "_WEIGHTS_AT_ONCE", 7 * format.block_len)
    assert torch.equal(dequantise_blocks(data, format), expected), "in slices"


@pytest.mark.parametrize("name", QUANTISED)
def test_the_result_lies_where_the_blocks_do(name: str) -> None:
    format = FORMATS[name]
    out = dequantise(torch.empty(5, 4 * format.block_bytes, dtype=torch.uint8, device="meta"), format)
    assert (out.device.type, tuple(out.shape), out.dtype) == ("meta", (5, 4 * format.block_len), torch.float32)


def test_no_rows() -> None:
    assert dequantise_blocks(torch.empty(0, 18, dtype=torch.uint8), FORMATS["q4_0"]).shape == (0, 32)
