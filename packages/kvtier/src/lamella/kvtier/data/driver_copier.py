"""Copies of many blocks by the device's copy engines: one call of the driver for all of them.

The engines take nothing from kernels that run meanwhile but memory bandwidth. Batched copies came with CUDA 12.8; below
some ten KiB a copy costs more than its bytes, and a kernel is faster (what a start measures decides).
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

MAX_COPIES = 4096
"""Of one call: the engines begin when it returns."""
_IN_STREAM_ORDER = 1
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources are read when the stream comes to the copy."""
_BESIDE_COMPUTE = 1
"""CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", ctypes.c_uint),
    )


class DriverCopier:
    """A BlockCopier by cuMemcpyBatchAsync."""

    name = "copy engines"

    def __init__(self, call: Any = None) -> None:
        """call: the driver's function, with the parameters of CUDA 12.8; None: that of this machine's driver. OSError
        or AttributeError where there is none."""
        self._call = call or ctypes.CDLL("libcuda.so.1").cuMemcpyBatchAsync
        self._attributes = _Attributes(_IN_STREAM_ORDER, _Location(), _Location(), _BESIDE_COMPUTE)
        self._first = ctypes.c_size_t(0)

    def prepare(self, pairs: torch.Tensor, device: torch.device) -> npt.NDArray[np.uint64]:
        """[2, n]: sources, targets."""
        return np.ascontiguousarray(pairs.numpy().T).astype(np.uint64)

    def copy(self, source: torch.Tensor, target: torch.Tensor, pairs: npt.NDArray[np.uint64]) -> None:
        """RuntimeError if the driver refuses."""
        num_bytes = source.shape[1] * source.element_size()
        assert target.shape[1] * target.element_size() == num_bytes, "blocks differ in size"
        places = [
            tensor.data_ptr() + numbers * np.uint64(tensor.stride(0) * tensor.element_size())
            for tensor, numbers in ((source, pairs[0]), (target, pairs[1]))
        ]
        stream = _current_stream(target if target.is_cuda else source)
        sizes = np.full(min(MAX_COPIES, pairs.shape[1]), num_bytes, np.uint64)
        for start in range(0, pairs.shape[1], MAX_COPIES):
            sources, targets = (np.ascontiguousarray(place[start : start + MAX_COPIES]) for place in places)
            failed = ctypes.c_size_t(0)
            code = self._call(
                ctypes.c_void_p(targets.ctypes.data),
                ctypes.c_void_p(sources.ctypes.data),
                ctypes.c_void_p(sizes.ctypes.data),
                ctypes.c_size_t(len(sources)),
                ctypes.byref(self._attributes),
                ctypes.byref(self._first),
                ctypes.c_size_t(1),
                ctypes.byref(failed),
                ctypes.c_void_p(stream),
            )
            if code:
                raise RuntimeError(f"the driver refuses {len(sources)} copies of {num_bytes} bytes: CUDA error {code}")


def driver_copier() -> DriverCopier | None:
    """None where the driver has no batched copies."""
    try:
        return DriverCopier()
    except (OSError, AttributeError):
        return None


def _current_stream(tensor: torch.Tensor) -> int:
    return int(torch.cuda.current_stream(tensor.device).cuda_stream) if tensor.is_cuda else 0
