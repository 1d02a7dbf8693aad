"""Weights in the packed form of the native host kernels.

A matrix becomes three tensors under its prefix; the form is the same for every instruction set:

    panels  uint8 [ceil(rows / 16), panel_bytes]    16 rows interleaved, exact (see csrc/host/format.h)
    meta    int64 [3]                               format code, rows, cols
    bias    float32 [rows]                          where the matrix has one
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from lamella.runner_v2 import _C
from lamella.runner_v2.ops.linear import split_bias
from lamella.runner_v2.weights.slots import RawPart

Packed = Mapping[str, torch.Tensor]
NativePart = tuple[torch.Tensor, int, int, int, torch.Tensor | None]
"""Panels, format code, rows, cols, bias: what native handles are made of."""


def pack_matrix(part: RawPart, bias: RawPart | None = None, prefix: str = "") -> dict[str, torch.Tensor]:
    """One matrix [rows, cols] and its bias."""
    rows, cols = part.shape
    panels = torch.empty(_C.packed_shape(part.format.name, rows, cols), dtype=torch.uint8)
    data = part.data if part.data.stride(-1) == 1 else part.data.contiguous()
    _C.pack(part.format.name, rows, cols, data, panels)
    packed = {
        f"{prefix}panels": panels,
        f"{prefix}meta": torch.tensor([_C.format_code(part.format.name), rows, cols], dtype=torch.int64),
    }
    if bias is not None:
        packed[f"{prefix}bias"] = bias.data.float()
    return packed


def pack_matrices(parts: Sequence[RawPart], prefix: str = "") -> dict[str, torch.Tensor]:
    """Several matrices under "{prefix}{index}.", biases beside their matrices."""
    weights, biases = split_bias(parts)
    packed: dict[str, torch.Tensor] = {}
    for idx, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        packed.update(pack_matrix(weight, bias, f"{prefix}{idx}."))
    return packed


def pack_norm(part: RawPart, plus_one: bool) -> torch.Tensor:
    """The factors of a norm, float32."""
    weight = part.data.float()
    return weight + 1.0 if plus_one else weight.clone()


def native_part(packed: Packed, prefix: str = "") -> NativePart:
    """A packed matrix as native handles take it."""
    code, rows, cols = packed[f"{prefix}meta"].tolist()
    return packed[f"{prefix}panels"], code, rows, cols, packed.get(f"{prefix}bias")


def native_parts(packed: Packed, prefix: str = "") -> list[NativePart]:
    """All matrices under "{prefix}0.", "{prefix}1.", ...; none is an empty list."""
    parts: list[NativePart] = []
    while f"{prefix}{len(parts)}.meta" in packed:
        parts.append(native_part(packed, f"{prefix}{len(parts)}."))
    return parts
