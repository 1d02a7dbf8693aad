"""What the stand-ins of CUDA kernels ask of their tensors: the same as the kernels, with the same complaint."""

from __future__ import annotations

from collections.abc import Sequence

import torch

HALF = (torch.bfloat16, torch.float16)
REAL = (*HALF, torch.float32)
_ALIGNMENT = 16


def require(holds: bool, name: str, why: str) -> None:
    """ValueError naming the argument."""
    if not holds:
        raise ValueError(f"{name}: {why}")


def check(
    tensor: torch.Tensor, name: str, dtypes: Sequence[torch.dtype], shape: Sequence[int], *, aligned: bool = False
) -> None:
    """Of one of the types and of this shape, -1 leaving a size open, with a contiguous last dimension. aligned: every
    row starts at a multiple of 16 bytes."""
    require(tensor.dtype in dtypes, name, f"is {tensor.dtype}, needed {', '.join(map(str, dtypes))}")
    fits = tensor.dim() == len(shape) and all(want in (-1, have) for have, want in zip(tensor.shape, shape))
    require(fits, name, f"has shape {list(tensor.shape)}, needed {list(shape)}")
    require(tensor.shape[-1] <= 1 or tensor.stride(-1) == 1, name, "the last dimension is not contiguous")
    if aligned:
        check_aligned(tensor, name)


def check_dense(tensor: torch.Tensor, name: str, dtypes: Sequence[torch.dtype], shape: Sequence[int]) -> None:
    """As check(), and no gaps between rows."""
    check(tensor, name, dtypes, shape)
    require(tensor.is_contiguous(), name, "is not contiguous")


def check_aligned(tensor: torch.Tensor, name: str) -> None:
    """Every row starts at a multiple of 16 bytes."""
    strides = [stride for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1]) if size > 1]
    starts = (tensor.data_ptr(), *(stride * tensor.element_size() for stride in strides))
    require(all(start % _ALIGNMENT == 0 for start in starts), name, "rows do not start at multiples of 16 bytes")
