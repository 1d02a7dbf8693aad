"""GGUF's block formats: dequantising to float32, and random blocks for tests and dummy weights.

A row is a sequence of blocks; each holds block_len weights in block_bytes bytes. Values are exactly those of the gguf
library, which does the arithmetic on a CPU.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from lamella.runner_v2.errors import UnsupportedError
from lamella.runner_v2.quant.device_blocks import dequantise_blocks
from lamella.runner_v2.quant.scheme import FORMATS, WeightFormat

if TYPE_CHECKING:
    import gguf

# Byte offsets of the half-precision scales in a block; every other byte may be anything.
_SCALES = {
    "q8_0": (0,),
    "q4_0": (0,),
    "q4_1": (0, 2),
    "q5_0": (0,),
    "q5_1": (0, 2),
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q6_k": (208,),
}
_ROWS_AT_ONCE = 4096


@cache
def ggml_types() -> dict[str, gguf.GGMLQuantizationType]:
    """The library's type of each format. It is imported when a format of its is met: most models have none."""
    types = importlib.import_module("gguf").GGMLQuantizationType
    dense = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
    names = dense | {name: name.upper() for name, format in FORMATS.items() if format.quantised}
    return {name: types[ggml_name] for name, ggml_name in names.items()}


def format_of_ggml(ggml_type: gguf.GGMLQuantizationType, tensor: str) -> WeightFormat:
    """The format of a GGUF tensor type; UnsupportedError naming tensor, type and the supported ones."""
    for name, known in ggml_types().items():
        if known == ggml_type:
            return FORMATS[name]
    supported = ", ".join(t.name for t in ggml_types().values())
    raise UnsupportedError(f"tensor {tensor} has GGUF type {ggml_type.name}; supported: {supported}")


def dequantise(data: torch.Tensor, format: WeightFormat) -> torch.Tensor:
    """Float32 weights [..., columns] of raw blocks uint8 [..., row_bytes], where the data lies. Dense data is
    converted."""
    if not format.quantised:
        return data.float()
    if data.device.type != "cpu":
        return dequantise_blocks(data, format)
    rows = data.reshape(-1, data.shape[-1]).numpy()
    out = torch.empty(len(rows), data.shape[-1] // format.block_bytes * format.block_len)
    # in slices, because the library's intermediates take several times the size of its result
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        part = rows[start : start + _ROWS_AT_ONCE]
        out[start : start + len(part)] = torch.from_numpy(_dequantised(part, format))
    return out.reshape(*data.shape[:-1], out.shape[-1])


def random_blocks(format: WeightFormat, num_blocks: int, std: float, rng: np.random.Generator) -> np.ndarray:
    """Valid blocks uint8 [num_blocks, block_bytes] with random contents, scaled to about the given deviation.

    Scales differ from block to block, and every code and sub-scale occurs.
    """
    blocks = rng.integers(0, 256, (num_blocks, format.block_bytes), dtype=np.uint8)
    factors = rng.uniform(0.5, 1.5, num_blocks)
    _set_scales(format, blocks, factors)
    spread = float(np.sqrt(np.mean(_dequantised(blocks[:256], format) ** 2)))
    _set_scales(format, blocks, factors * (std / spread))
    return blocks


def _dequantised(rows: np.ndarray, format: WeightFormat) -> np.ndarray:
    quants = importlib.import_module("gguf.quants")
    return np.asarray(quants.dequantize(rows, ggml_types()[format.name]))


def _set_scales(format: WeightFormat, blocks: np.ndarray, factors: np.ndarray) -> None:
    """First scale: the step d. Second scale: the minimum, which centres unsigned codes about zero."""
    first, *rest = _SCALES[format.name]
    blocks[:, first : first + 2] = factors.astype(np.float16).view(np.uint8).reshape(-1, 2)
    for offset in rest:
        # legacy formats add m, K-quants subtract dmin times a sub-scale like that of d
        centre = {"q4_1": -7.5, "q5_1": -15.5, "q4_k": 7.5, "q5_k": 15.5}[format.name]
        blocks[:, offset : offset + 2] = (factors * centre).astype(np.float16).view(np.uint8).reshape(-1, 2)
