"""Contract of `linear`: rows times a matrix that may consist of several parts with formats of their own.

Site: weights = format of each weight part, in order; params:
    in      input width of this rank
    outs    tuple: output rows of each part on this rank; the result has their sum as width
    bias    whether bias parts come too

    pack(parts) -> named tensors     parts: the weight parts in order, then bias parts (keys end in "_bias"); a part
                                     without a bias of its own counts as zero bias
    bind(packed) -> handle
    run(x [T, in], handle) -> [T, sum(outs)]    in x's dtype, a fresh tensor

No activation, no residual, no all-reduce: under tensor parallelism the result is this rank's partial sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from lamella.runner_v2.ops.spec import Op
from lamella.runner_v2.weights.slots import RawPart

BIAS_SUFFIX = "_bias"


class DenseLinear(NamedTuple):
    """Handle of the reference."""

    weight: torch.Tensor  # [out, in]
    bias: torch.Tensor | None  # [out] float32


def linear(x: torch.Tensor, handle: DenseLinear) -> torch.Tensor:  # x [T, in] -> [T, out]
    """The product is computed in the weight's dtype, the bias is added in x's."""
    out = F.linear(x.to(handle.weight.dtype), handle.weight).to(x.dtype)
    return out if handle.bias is None else out.add_(handle.bias.to(x.dtype))


def split_bias(parts: Sequence[RawPart]) -> tuple[list[RawPart], list[RawPart | None]]:
    """Weight parts, and for each its bias part or None."""
    weights = [p for p in parts if not p.key.endswith(BIAS_SUFFIX)]
    biases = {p.key: p for p in parts if p.key.endswith(BIAS_SUFFIX)}
    return weights, [biases.get(p.key + BIAS_SUFFIX) for p in weights]


LINEAR = Op("linear", linear, "x @ concat(parts)^T (+ bias), a partial sum under tensor parallelism")
