"""GGUF blocks turned into numbers by tensor operations, where the blocks lie on a device.

    uint8 [num_blocks, block_bytes] ──▶ float32 [num_blocks, block_len]

The values are those of the gguf library, which does the same on a CPU with numpy.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lamella.runner_v2.quant.scheme import WeightFormat

_WEIGHTS_AT_ONCE = 1 << 24
"""Intermediates take several times the size of the result: so many weights bound them to some hundred megabytes."""


def dequantise_blocks(data: torch.Tensor, format: WeightFormat) -> torch.Tensor:
    """Float32 weights [..., columns] of raw blocks uint8 [..., row_bytes], on the device of the blocks."""
    blocks = data.reshape(-1, format.block_bytes)
    out = torch.empty(len(blocks), format.block_len, dtype=torch.float32, device=data.device)
    decode = _DECODERS[format.name]
    step = max(1, _WEIGHTS_AT_ONCE // format.block_len)
    for start in range(0, len(blocks), step):
        out[start : start + step] = decode(blocks[start : start + step])
    return out.view(*data.shape[:-1], data.shape[-1] // format.block_bytes * format.block_len)


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """[N, 1] float32: the half-precision number at a byte of each block."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(codes: torch.Tensor, width: int) -> torch.Tensor:
    """uint8 [N, n] -> [N, 2n]: of every `width` bytes the low halves, then the high ones."""
    groups = codes.reshape(len(codes), -1, 1, width)
    return torch.cat([groups & 0x0F, groups >> 4], dim=2).reshape(len(codes), -1)


def _bits(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [N, n] -> [N, 8n] of 0 and 1, the lowest bit of each byte first."""
    return ((codes.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=codes.device)) & 1).flatten(1)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * blocks[:, 2:].contiguous().view(torch.int8).float()


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:], 16).float() - 8)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:], 16).float() + _half(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    codes = _nibbles(blocks[:, 6:], 16) | (_bits(blocks[:, 2:6]) << 4)
    return _half(blocks, 0) * (codes.float() - 16)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    codes = _nibbles(blocks[:, 8:], 16) | (_bits(blocks[:, 4:8]) << 4)
    return _half(blocks, 0) * codes.float() + _half(blocks, 2)


def _sub_scales(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 [N, 12] -> scales and minima, [N, 8, 1] each: six bits a number, the upper two of the last four apart."""
    scales, minima, rest = packed.reshape(-1, 3, 4).unbind(1)
    all_scales = torch.cat([scales & 0x3F, (rest & 0x0F) | ((scales >> 2) & 0x30)], dim=1)
    all_minima = torch.cat([minima & 0x3F, (rest >> 4) | ((minima >> 2) & 0x30)], dim=1)
    return all_scales.unsqueeze(-1).float(), all_minima.unsqueeze(-1).float()


def _with_sub_scales(blocks: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    scales, minima = _sub_scales(blocks[:, 4:16])
    steps, floors = _half(blocks, 0).unsqueeze(-1) * scales, _half(blocks, 2).unsqueeze(-1) * minima
    return (steps * codes.view(-1, 8, 32).float() - floors).flatten(1)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    return _with_sub_scales(blocks, _nibbles(blocks[:, 16:], 32))


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device).view(1, 8, 1)
    high = ((blocks[:, 16:48].unsqueeze(1) >> shifts) & 1).flatten(1)  # bit i of byte j: weight 32 i + j
    return _with_sub_scales(blocks, _nibbles(blocks[:, 48:], 32) | (high << 4))


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device).view(1, 1, 4, 1)
    high = ((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3).flatten(1)
    codes = (_nibbles(blocks[:, :128], 64) | (high << 4)).float() - 32
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return ((_half(blocks, 208) * scales).unsqueeze(-1) * codes.view(-1, 16, 16)).flatten(1)


_DECODERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "q8_0": _q8_0,
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
}
