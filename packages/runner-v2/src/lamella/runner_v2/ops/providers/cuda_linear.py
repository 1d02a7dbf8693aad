"""Matrices of the CUDA provider: dense, in the activations' type, multiplied by the own kernel or by cuBLAS."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from lamella.runner_v2.ops.linear import split_bias
from lamella.runner_v2.quant.gguf_blocks import dequantise
from lamella.runner_v2.weights.slots import RawPart

Packed = Mapping[str, torch.Tensor]

FEW_TOKENS = 8
SMALL_MATRIX = 1 << 24
"""Up to so many tokens the own kernel multiplies by matrices of fewer elements: it starts while its predecessor ends,
which counts where a product takes a few microseconds. Large matrices and many tokens are cuBLAS's: on an H200, [m,
4096] x [4096, 28672], own and cuBLAS in us: m=1 58 and 57, m=8 58 and 58, m=32 62 and 59, m=64 75 and 63, m=256 124 and
93."""
MULTIPLE = 8
"""The own kernels move 16 bytes at a time."""


class Matrix(NamedTuple):
    """A matrix in use."""

    weight: torch.Tensor  # [out, in]
    bias: torch.Tensor | None  # [out]
    workspace: torch.Tensor
    own: bool
    """The own kernel multiplies by it, where tokens are few."""


class Workspaces:
    """Scratch memory of the kernels, made when a handle is bound and shared by all of them: one stream works at a time.

    Each of the kernels leaves its workspace as the next call needs it.
    """

    def __init__(self, kernels: Any, max_num_tokens: int) -> None:
        self._kernels = kernels
        self._max_num_tokens = max_num_tokens
        self._linear: dict[torch.device, torch.Tensor] = {}
        self._tails: dict[tuple[torch.device | int, ...], torch.Tensor] = {}
        self._moe: dict[torch.device, torch.Tensor] = {}
        self._moe_bytes: dict[tuple[int, int, int, int], int] = {}

    def linear(self, device: torch.device) -> torch.Tensor:
        """For products of up to FEW_TOKENS rows."""
        if device not in self._linear:
            self._linear[device] = self._kernels.linear_workspace(FEW_TOKENS, device)
        return self._linear[device]

    def tail(self, device: torch.device, inner: int) -> torch.Tensor:
        """For tails of dense layers of this inner width."""
        key = (device, inner)
        if key not in self._tails:  # the same for every layer
            self._tails[key] = self._kernels.layer_tail_workspace(inner, device)
        return self._tails[key]

    def experts_tail(self, device: torch.device, inner: int, num_experts: int, top_k: int) -> torch.Tensor:
        """For tails of layers with experts of these sizes."""
        key = (device, inner, num_experts, top_k)
        if key not in self._tails:
            self._tails[key] = self._kernels.experts_tail_workspace(inner, num_experts, top_k, device)
        return self._tails[key]

    def moe(self, device: torch.device, top_k: int, num_experts: int, hidden: int, inner: int) -> torch.Tensor:
        """For experts of this shape and steps of up to max_num_tokens. Handles that were bound before keep theirs."""
        shape = (top_k, num_experts, hidden, inner)
        if shape not in self._moe_bytes:  # the same for every layer
            self._moe_bytes[shape] = self._kernels.moe_workspace_bytes(self._max_num_tokens, *shape)
        most = self._moe_bytes[shape]
        known = self._moe.get(device)
        if known is None or known.numel() < most:
            self._moe[device] = self._kernels.moe_workspace(most, device)
        return self._moe[device]


def dense(part: RawPart, dtype: torch.dtype) -> torch.Tensor:
    """A part's weights in the activations' type, where its data lies."""
    return dequantise(part.data, part.format).to(dtype) if part.format.quantised else part.data.to(dtype)


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows of all of them; of one it is the tensor itself, as the store copies anyway."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def pack_matrix(parts: Sequence[RawPart], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """weight [sum of rows, in] and, if any part has one, bias [sum of rows]."""
    weights, biases = split_bias(parts)
    packed = {"weight": joined([dense(part, dtype) for part in weights])}
    if any(bias is not None for bias in biases):
        packed["bias"] = joined(
            [
                torch.zeros(weight.shape[0], dtype=dtype, device=weight.data.device)
                if bias is None
                else bias.data.to(dtype)
                for weight, bias in zip(weights, biases, strict=True)
            ]
        )
    return packed


def pack_experts(parts: Sequence[RawPart], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """gate_up [num_experts, 2 * width, hidden] and down [num_experts, hidden, width] of gate_0, up_0, down_0, ..."""
    matrices = [dense(part, dtype) for part in parts]
    gate_up = [torch.cat([gate, up]) for gate, up in zip(matrices[0::3], matrices[1::3], strict=True)]
    return {"gate_up": torch.stack(gate_up), "down": torch.stack(matrices[2::3])}


def bind_matrix(packed: Packed, workspaces: Workspaces, prefix: str = "") -> Matrix:
    """The matrix of pack_matrix()'s tensors under this prefix."""
    weight = packed[f"{prefix}weight"]
    aligned = weight.shape[0] % MULTIPLE == 0 and weight.shape[1] % MULTIPLE == 0
    own = aligned and weight.numel() < SMALL_MATRIX
    return Matrix(weight, packed.get(f"{prefix}bias"), workspaces.linear(weight.device), own)


def product(kernels: Any, x: torch.Tensor, matrix: Matrix) -> torch.Tensor:  # [T, in] -> [T, out]
    """x @ weight^T + bias, nothing fused to it."""
    if matrix.own and x.shape[0] <= FEW_TOKENS:
        out: torch.Tensor = kernels.linear(x, matrix.weight, matrix.workspace, bias=matrix.bias)
        return out
    return F.linear(x, matrix.weight, matrix.bias)
