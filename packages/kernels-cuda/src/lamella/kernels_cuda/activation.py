"""Gated activations over rows [gate | up], with fp8 quantisation in the same pass, and the quantisers alone."""

from __future__ import annotations

from typing import Literal

import torch

from lamella.kernels_cuda.device import native

Kind = Literal["silu", "gelu", "gelu_tanh"]

_CODES = {"silu": 1, "gelu": 2, "gelu_tanh": 3}
_NONE, _SILU = 0, 1
_GROUP = 128


def gated_activation(
    x: torch.Tensor,  # [.., 2 * width]
    kind: Kind,
    *,
    tile: int = 0,
    out: torch.Tensor | None = None,  # [.., width]
) -> torch.Tensor:
    """act(gate) * up, gate being the first half of a row; bfloat16, float16 or float32, act rounded to that type first.

    tile 64: a row is 64 gates, their 64 ups, and so on, as a product with weights of pack_gate_up() leaves it. gelu is
    the exact one (erf). Rows may be strided; they start at multiples of 16 bytes, and so do their halves.
    ValueError names the argument that does not fit.
    """
    if kind not in _CODES:
        raise ValueError(f"kind: is {kind!r}, needed {', '.join(_CODES)}")
    width = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], width), dtype=x.dtype, device=x.device) if out is None else out
    native().gated_activation(_rows(out), _rows(x), _CODES[kind], tile)
    return out


def silu_mul(
    x: torch.Tensor,  # [.., 2 * width]
    *,
    tile: int = 0,
    out: torch.Tensor | None = None,  # [.., width]
) -> torch.Tensor:
    """gated_activation() of SiLU."""
    return gated_activation(x, "silu", tile=tile, out=out)


def quant_fp8_per_token(
    x: torch.Tensor,  # [num_rows, width] bfloat16 or float16
    *,
    out: torch.Tensor | None = None,  # [num_rows, width] float8_e4m3fn
    scale: torch.Tensor | None = None,  # [num_rows] float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, scale): out * scale is x; scale = max(max|x| / 448, 1 / (448 * 512)) per row."""
    return _per_token(x, x.shape[-1], _NONE, 0, out, scale)


def silu_mul_fp8_per_token(
    x: torch.Tensor,  # [num_rows, 2 * width] bfloat16 or float16
    *,
    tile: int = 0,
    out: torch.Tensor | None = None,  # [num_rows, width] float8_e4m3fn
    scale: torch.Tensor | None = None,  # [num_rows] float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """quant_fp8_per_token() of silu_mul(), without the way through memory."""
    return _per_token(x, x.shape[-1] // 2, _SILU, tile, out, scale)


def quant_fp8_per_group(
    x: torch.Tensor,  # [num_rows, width] bfloat16 or float16
    *,
    column_major: bool = False,
    pow2: bool = False,
    out: torch.Tensor | None = None,  # [num_rows, width] float8_e4m3fn
    scale: torch.Tensor | None = None,  # [num_rows, width / 128] float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, scale): one scale per 128 neighbours of a row, max(max|x|, 1e-10) / 448, rounded up to a power of two with
    pow2.

    column_major: the returned scale has stride 1 along the rows, and its columns start at multiples of 16 bytes. A
    given scale is filled by its strides.
    """
    return _per_group(x, x.shape[-1], _NONE, 0, column_major, pow2, out, scale)


def silu_mul_fp8_per_group(
    x: torch.Tensor,  # [num_rows, 2 * width] bfloat16 or float16
    *,
    tile: int = 0,
    column_major: bool = False,
    pow2: bool = False,
    out: torch.Tensor | None = None,  # [num_rows, width] float8_e4m3fn
    scale: torch.Tensor | None = None,  # [num_rows, width / 128] float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """quant_fp8_per_group() of silu_mul(), without the way through memory."""
    return _per_group(x, x.shape[-1] // 2, _SILU, tile, column_major, pow2, out, scale)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.dim() == 2 else x.view(-1, x.shape[-1])


def _per_token(
    x: torch.Tensor, width: int, act: int, tile: int, out: torch.Tensor | None, scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if out is None:
        out = torch.empty((x.shape[0], width), dtype=torch.float8_e4m3fn, device=x.device)
    if scale is None:
        scale = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    native().act_fp8_token(out.view(torch.uint8), scale, x, act, tile)
    return out, scale


def _per_group(
    x: torch.Tensor,
    width: int,
    act: int,
    tile: int,
    column_major: bool,
    pow2: bool,
    out: torch.Tensor | None,
    scale: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, groups = x.shape[0], width // _GROUP
    if out is None:
        out = torch.empty((num_rows, width), dtype=torch.float8_e4m3fn, device=x.device)
    if scale is None and column_major:
        padded = -(-num_rows // 4) * 4
        scale = torch.zeros((groups, padded), dtype=torch.float32, device=x.device).t()[:num_rows]
    elif scale is None:
        scale = torch.empty((num_rows, groups), dtype=torch.float32, device=x.device)
    native().act_fp8_group(out.view(torch.uint8), scale, x, act, pow2, tile)
    return out, scale
