"""Many small copies in one kernel, between device and pinned host memory or within the device.

One copy call per block costs more than the block below about 1 MiB; here thread blocks walk over all blocks and keep
the link full. Lists of addresses lie on the device; what they point to must stay alive until the stream has passed the
call.
"""

from __future__ import annotations

import torch

from lamella.kernels_cuda.device import native

HOST_BLOCKS = 32
"""Thread blocks that fill the link to the host and leave most of the device to others."""
DEVICE_BLOCKS = 528
"""Thread blocks that fill the device's memory."""


def copy_blocks(
    src_ptrs: torch.Tensor,  # [num_copies] int64 on the device: addresses, 0 skips a copy
    dst_ptrs: torch.Tensor,  # [num_copies] int64 on the device
    num_bytes: int | torch.Tensor,  # of every copy, or [num_copies] int64 on the device
    *,
    max_bytes: int | None = None,
    max_blocks: int = HOST_BLOCKS,
) -> None:
    """Copy num_bytes from each source to its target. Addresses are of the device or of pinned host memory; multiples of
    16 are fastest. Copies must not overlap.

    max_bytes: no entry of a num_bytes tensor is larger; needed with one, as sizes are not read on the host. max_blocks:
    thread blocks that work on it, at 16 KiB in flight each.
    """
    if isinstance(num_bytes, torch.Tensor):
        if max_bytes is None:
            raise ValueError("max_bytes: missing, and num_bytes is a tensor")
        native().copy_blocks(src_ptrs, dst_ptrs, num_bytes, max_bytes, max_blocks)
    else:
        native().copy_blocks(src_ptrs, dst_ptrs, None, num_bytes, max_blocks)


def copy_block_pairs(
    src: torch.Tensor,  # [num_src_blocks, ..], on the device or pinned
    dst: torch.Tensor,  # [num_dst_blocks, ..], on the device or pinned
    pairs: torch.Tensor,  # [num_copies, 2] int64 on the device: block of src, block of dst; negative skips a copy
    *,
    max_blocks: int | None = None,
) -> None:
    """dst[b] = src[a] for each pair (a, b).

    Blocks are contiguous, with any stride between them; both tensors hold blocks of one size, and pairs lie within them
    (not checked: they are on the device). max_blocks: as of copy_blocks(), by default what suits the link.
    """
    bytes_of = _block_bytes(src, "src")
    if _block_bytes(dst, "dst") != bytes_of:
        raise ValueError(f"dst: blocks of {_block_bytes(dst, 'dst')} bytes, those of src have {bytes_of}")
    if max_blocks is None:
        max_blocks = DEVICE_BLOCKS if src.is_cuda and dst.is_cuda else HOST_BLOCKS
    native().copy_pairs(
        src.data_ptr(),
        dst.data_ptr(),
        pairs,
        bytes_of,
        src.stride(0) * src.element_size(),
        dst.stride(0) * dst.element_size(),
        max_blocks,
    )


def _block_bytes(tensor: torch.Tensor, name: str) -> int:
    """Bytes of a block. ValueError if the device cannot reach it or a block has gaps."""
    if tensor.dim() < 2:
        raise ValueError(f"{name}: has shape {list(tensor.shape)}, needed [num_blocks, ..]")
    if not (tensor.is_cuda or tensor.is_pinned()):
        raise ValueError(f"{name}: neither on a CUDA device nor in pinned memory")
    expected = 1
    for size, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.stride()[1:])):
        if size != 1 and stride != expected:
            raise ValueError(f"{name}: a block is not contiguous")
        expected *= size
    return expected * tensor.element_size()
