"""Norms, activations and products of the stand-in for the CUDA kernels (testing/cuda_kernels.py)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from lamella.runner_v2.testing.cuda_checks import HALF, REAL, check, check_aligned, check_dense, require

_TILE = 64
FLAGS = 1024
"""Bytes of a workspace that are zeros between calls."""


def rms_norm(
    x: torch.Tensor,  # [num_rows, width]
    weight: torch.Tensor,  # [width]
    eps: float,
    *,
    residual: torch.Tensor | None = None,  # [num_rows, width]
    plus_one: bool = False,
    out: torch.Tensor | None = None,  # [num_rows, width]
) -> torch.Tensor:
    check(x, "x", REAL, (-1, -1), aligned=True)
    require(x.shape[1] * x.element_size() % 16 == 0, "x", "rows are no multiple of 16 bytes")
    check_dense(weight, "weight", (x.dtype,), (x.shape[1],))
    if residual is not None:
        check(residual, "residual", (x.dtype,), x.shape, aligned=True)
        residual.copy_(residual.float() + x.float())
        x = residual
    normed = normed_rows(x, weight, eps, plus_one)
    if out is None:
        return normed
    check(out, "out", (x.dtype,), x.shape, aligned=True)
    return out.copy_(normed)


def gated_activation(
    x: torch.Tensor,  # [.., 2 * width]
    kind: str,
    *,
    tile: int = 0,
    out: torch.Tensor | None = None,  # [.., width]
) -> torch.Tensor:
    rows = x if x.dim() == 2 else x.view(-1, x.shape[-1])
    check(rows, "x", REAL, (-1, -1), aligned=True)
    require(rows.shape[1] % 2 == 0, "x", "has an odd width")
    require(rows.shape[1] // 2 * x.element_size() % 16 == 0, "x", "halves are no multiple of 16 bytes")
    require(tile in (0, _TILE), "tile", f"is {tile}, needed 0 or {_TILE}")
    gate, up = x.float().chunk(2, dim=-1)
    if tile:
        require(rows.shape[1] % (2 * tile) == 0, "x", "rows are no whole tiles")
        gate, up = (part.flatten(-2) for part in x.float().view(*x.shape[:-1], -1, 2, tile).unbind(-2))
    result = (_activate(gate, kind).to(x.dtype).float() * up).to(x.dtype)
    return result if out is None else out.copy_(result)


def silu_mul(x: torch.Tensor, *, tile: int = 0, out: torch.Tensor | None = None) -> torch.Tensor:
    return gated_activation(x, "silu", tile=tile, out=out)


def linear(
    x: torch.Tensor,  # [num_tokens, in]
    weight: torch.Tensor,  # [out, in]; packed by pack_gate_up with activation
    workspace: torch.Tensor,
    *,
    activation: str | None = None,
    bias: torch.Tensor | None = None,  # [out]
    residual: torch.Tensor | None = None,  # [num_tokens, out]
    squares_in: torch.Tensor | None = None,  # [parts, num_tokens] float32
    eps: float = 0.0,
    gain: torch.Tensor | None = None,  # [out]
    scaled_out: torch.Tensor | None = None,  # [num_tokens, out]
    squares_out: torch.Tensor | None = None,  # [ceil(out / 128), num_tokens] float32
    prefetch: torch.Tensor | None = None,
    out: torch.Tensor | None = None,  # [num_tokens, out]
    portable: bool = False,
) -> torch.Tensor:
    check(x, "x", HALF, (-1, -1), aligned=True)
    num_tokens, width = x.shape
    check(weight, "w", (x.dtype,), (-1, width), aligned=True)
    require(width % 8 == 0, "x", "its width is no multiple of 16 bytes")
    require(weight.shape[0] % (8 if activation is None else 128) == 0, "w", "rows are no multiple")
    num_out = weight.shape[0] // (1 if activation is None else 2)
    check_workspace(workspace, FLAGS + _gemm_bytes(num_tokens))
    for name, vector in (("bias", bias), ("gain", gain)):
        if vector is not None:
            check_dense(vector, name, (x.dtype,), (num_out,))
            check_aligned(vector, name)
    for name, matrix in (("residual", residual), ("scaled_out", scaled_out), ("out", out)):
        if matrix is not None:
            check(matrix, name, (x.dtype,), (num_tokens, num_out), aligned=True)
    require(gain is None or scaled_out is not None, "scaled_out", "is needed with gain")
    if prefetch is not None:
        require(prefetch.is_contiguous(), "prefetch", "is not contiguous")
    sums = x.float() @ weight.float().T
    if squares_in is not None:
        check_dense(squares_in, "squares_in", (torch.float32,), (-1, num_tokens))
        sums *= torch.rsqrt(squares_in.sum(0) / width + eps).unsqueeze(1)
    if activation is not None:
        gate, up = sums.view(num_tokens, -1, 2, _TILE).unbind(2)
        sums, up = gate.reshape(num_tokens, -1), up.reshape(num_tokens, -1)
    if bias is not None:
        sums = sums + bias.float()
    if activation is not None:
        sums = _activate(sums.to(x.dtype).float(), activation) * up.to(x.dtype).float()
    result = sums.to(x.dtype)
    if residual is not None:
        result = (result.float() + residual.float()).to(x.dtype)
    if gain is not None and scaled_out is not None:
        scaled_out.copy_(result.float() * gain.float())
    if squares_out is not None:
        require(activation is None, "squares_out", "is not for products with an activation")
        check_dense(squares_out, "squares_out", (torch.float32,), (-(-num_out // 128), num_tokens))
        padded = F.pad(result.float() ** 2, (0, -num_out % 128))
        squares_out.copy_(padded.view(num_tokens, -1, 128).sum(2).T)
    return result if out is None else out.copy_(result)


def linear_workspace(num_tokens: int, device: torch.device | str | int = "cpu") -> torch.Tensor:
    return torch.zeros(FLAGS + _gemm_bytes(num_tokens), dtype=torch.uint8, device=device)


def pack_gate_up(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    require(gate.shape == up.shape and gate.shape[0] % _TILE == 0, "gate", "and up: equal rows by 64 are needed")
    pairs = zip(torch.split(gate, _TILE), torch.split(up, _TILE), strict=True)
    return torch.cat([tile for pair in pairs for tile in pair])


def normed_rows(x: torch.Tensor, weight: torch.Tensor, eps: float, plus_one: bool) -> torch.Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if plus_one:
        return (normed * (1.0 + weight.float())).to(x.dtype)
    return (normed.to(x.dtype).float() * weight.float()).to(x.dtype)


def _activate(x: torch.Tensor, kind: str) -> torch.Tensor:
    require(kind in ("silu", "gelu", "gelu_tanh"), "kind", f"is {kind!r}, needed silu, gelu, gelu_tanh")
    if kind == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def _gemm_bytes(num_tokens: int) -> int:
    """Steps of powers of two from 8 to 256 rows, as the kernels' tiles."""
    return 64 * min(256, max(8, 1 << (num_tokens - 1).bit_length()))


def check_workspace(workspace: torch.Tensor, needed: int) -> None:
    check_dense(workspace, "workspace", (torch.uint8,), (-1,))
    require(workspace.numel() >= needed, "workspace", f"has {workspace.numel()} bytes, needed {needed}")
    require(not bool(workspace[:FLAGS].any()), "workspace", "its head is not zero")
