"""Blocks in half or a quarter of their bytes on disk: float8 with one scale per layer, tensor and head of a block.

    slot     [ rank 0: layer a: k [kv_heads, block_size, head_dim] | v … | layer b … ][ rank 1 … ]      dtype
    record   [ scales: float32, one per plane ][ values: e4m3, in the order of the slot ]
             plane: the block_size x head_dim values of one head

What comes back is not what went in: each value within 1/16 of itself (three bits of mantissa), and those below 2^-14 of
the plane's largest within 2^-18 of it. Off by default for that reason; a record of it has a fingerprint of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch

from lamella.kvtier.data.host_buffer import HostBuffer
from lamella.kvtier.errors import LayoutError

_LARGEST = 448.0
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class RowGeometry(NamedTuple):
    """How the bytes of a group's block are to be read, on one rank."""

    kv_heads: int
    block_size: int
    head_dim: int
    dtype: str
    """float32, float16 or bfloat16."""
    layers: int
    tensors: int = 2
    """Per layer: keys and values."""


class Fp8Codec:
    """Turns slots into records and back. One thread uses it."""

    def __init__(self, buffer: HostBuffer, geometries: Sequence[RowGeometry], num_scratch: int = 64) -> None:
        """geometries: per group. num_scratch: records that may be on their way at once, per group.

        Raises LayoutError for rows that have no such form.
        """
        self._planes: list[int] = []
        self._dtypes: list[torch.dtype] = []
        sizes: list[int] = []
        for group, rows in enumerate(geometries):
            dtype = _DTYPES.get(rows.dtype)
            if dtype is None:
                raise LayoutError(
                    f"group {group}: rows of {rows.dtype} are not stored as fp8, those of {', '.join(_DTYPES)} are; "
                    "leave store_dtype out"
                )
            planes = rows.layers * rows.tensors * rows.kv_heads
            values = planes * rows.block_size * rows.head_dim
            if values * dtype.itemsize != buffer.bytes_per_block[group]:
                raise LayoutError(
                    f"group {group}: {rows} makes {values * dtype.itemsize} bytes a block, "
                    f"its slots hold {buffer.bytes_per_block[group]}"
                )
            self._planes.append(planes * buffer.num_ranks)
            self._dtypes.append(dtype)
            sizes.append((planes * 4 + values) * buffer.num_ranks)
        self.packed_bytes = tuple(sizes)
        """Per group, of a record."""
        self._scratch = HostBuffer(sizes, [num_scratch] * len(sizes))
        self._free = [list(range(num_scratch)) for _ in sizes]

    @staticmethod
    def fingerprint(fingerprint: bytes) -> bytes:
        """Under which records of this form are readable: 16 bytes, from those of the layout."""
        return hashlib.blake2b(fingerprint, digest_size=16, person=b"lamella.fp8.1").digest()

    def take(self, group: int) -> int | None:
        """A place for one record, or None: all are in use."""
        return self._free[group].pop() if self._free[group] else None

    def give_back(self, group: int, place: int) -> None:
        self._free[group].append(place)

    def view(self, group: int, place: int) -> memoryview:
        """The bytes of a place, page-aligned."""
        return self._scratch.view(group, place)

    def pack(self, group: int, slot: memoryview, record: memoryview) -> None:
        """Fill the record. Raises ValueError for values that are not finite: those are not stored."""
        planes = self._planes[group]
        values = torch.frombuffer(slot, dtype=self._dtypes[group]).view(planes, -1).float()
        largest = values.abs().amax(1)
        if not bool(torch.isfinite(largest).all()):
            raise ValueError("a block holds values that are not finite")
        scales = torch.where(largest > 0, largest / _LARGEST, 1.0).clamp_min(torch.finfo(torch.float32).tiny)
        into_scales, into_values = self._parts(group, record)
        into_scales.copy_(scales)
        # rounding up in the division must not reach beyond the largest value that there is
        into_values.copy_((values / scales[:, None]).clamp_(-_LARGEST, _LARGEST))

    def unpack(self, group: int, record: memoryview, slot: memoryview) -> None:
        """Fill the slot."""
        scales, values = self._parts(group, record)
        into = torch.frombuffer(slot, dtype=self._dtypes[group]).view(self._planes[group], -1)
        into.copy_(values.float() * scales[:, None])

    def _parts(self, group: int, record: memoryview) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales [planes] float32, values [planes, block_size * head_dim] e4m3."""
        planes = self._planes[group]
        data = torch.frombuffer(record, dtype=torch.uint8)
        values = data[planes * 4 :].view(torch.float8_e4m3fn).view(planes, -1)
        return data[: planes * 4].view(torch.float32), values
