"""Device memory by purpose.

An arena hands out the memory of one purpose (weights, KV cache), knows how much, and can be told a limit. All memory of
a tag coming from one place is what later allows a whole purpose to be unmapped or exported.
"""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from lamella.runner_v2.errors import CapacityError

_ALIGNMENT = 64  # a cache line, and the widest vector load
_CHUNK_BYTES = 32 << 20


class Arena:
    """Memory of one purpose on one device.

    On a CPU it grows by chunks of anonymous memory, whose pages cost nothing until they are touched; small tensors
    share a chunk, a large one gets its own. Elsewhere each tensor is an allocation of the device's own allocator.
    Tensors stay valid as long as they are referenced, even after release().
    """

    def __init__(self, tag: str, device: str = "cpu", limit_bytes: int | None = None) -> None:
        self.tag = tag
        self.device = torch.device(device)
        self.limit_bytes = limit_bytes
        self.allocated_bytes = 0
        """Bytes of all tensors handed out since the last release()."""
        self.num_tensors = 0
        self._chunk: torch.Tensor | None = None  # uint8, the part that is still free

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor. CapacityError if it would exceed the limit or the device's memory."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if self.limit_bytes is not None and self.allocated_bytes + num_bytes > self.limit_bytes:
            raise CapacityError(
                f"{self.tag}: {_size(num_bytes)} more do not fit: {_size(self.allocated_bytes)} of a limit of "
                f"{_size(self.limit_bytes)} are in use"
            )
        try:
            tensor = self._take(num_bytes).view(dtype).view(tuple(shape)) if self._chunked(num_bytes) else None
            if tensor is None:
                tensor = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        except (MemoryError, OSError, torch.OutOfMemoryError) as error:
            raise CapacityError(f"{self.tag}: no memory on {self.device} for {_size(num_bytes)}: {error}") from error
        self.allocated_bytes += num_bytes
        self.num_tensors += 1
        return tensor

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Like empty(), filled with zeros."""
        tensor = self.empty(shape, dtype)
        # a chunk is handed out once, and the system hands it out zeroed: touching it would only make it resident
        return tensor if self.device.type == "cpu" else tensor.zero_()

    def release(self) -> None:
        """Forget everything handed out; memory returns to the system with the last reference to it."""
        self._chunk = None
        self.allocated_bytes = 0
        self.num_tensors = 0

    def _chunked(self, num_bytes: int) -> bool:
        return self.device.type == "cpu" and num_bytes > 0

    def _take(self, num_bytes: int) -> torch.Tensor:
        padded = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if padded > _CHUNK_BYTES // 4:
            return _map(padded)[:num_bytes]
        if self._chunk is None or len(self._chunk) < padded:
            self._chunk = _map(_CHUNK_BYTES)
        taken, self._chunk = self._chunk[:num_bytes], self._chunk[padded:]
        return taken


@contextmanager
def allocating(what: str) -> Iterator[None]:
    """Tell of memory that a block does not get as CapacityError; torch has no class of its own for it on a CPU."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise CapacityError(f"{what}: out of memory: {error}") from error
    except RuntimeError as error:
        found = re.search(r"can't allocate memory: you tried to allocate (\d+) bytes|not enough memory", str(error))
        if found is None:
            raise
        size = f", {_size(int(found[1]))} more were needed" if found[1] else ""
        raise CapacityError(f"{what}: out of memory{size}") from error


def _map(num_bytes: int) -> torch.Tensor:
    """Fresh zeroed memory as uint8, at a page's border."""
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)


def _size(num_bytes: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes} bytes"
