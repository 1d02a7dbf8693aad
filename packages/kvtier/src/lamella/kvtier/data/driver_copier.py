"""Copies of many pieces by the device's copy engines: one call of the driver for all of them.

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
_CUDA_12_8 = 12080
"""Later versions of the call have other parameters; the driver hands out each."""
_IN_STREAM_ORDER = 1
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources are read when the stream comes to the copy."""
_BESIDE_COMPUTE = 1
"""CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE."""

Addresses = npt.NDArray[np.int64]


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
        self._call = call or _find_call()
        self._attributes = _Attributes(_IN_STREAM_ORDER, _Location(), _Location(), _BESIDE_COMPUTE)
        self._first = ctypes.c_size_t(0)

    def copy(
        self, sources: Addresses, targets: Addresses, num_bytes: int, device: torch.device, *, loads: bool, beside: bool
    ) -> None:
        """The engines are in no kernel's way, whatever goes on beside. RuntimeError if the driver refuses."""
        stream = int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0
        sizes = np.full(min(MAX_COPIES, len(sources)), num_bytes, np.uint64)
        sources, targets = np.ascontiguousarray(sources), np.ascontiguousarray(targets)
        for start in range(0, len(sources), MAX_COPIES):
            count = min(MAX_COPIES, len(sources) - start)
            failed = ctypes.c_size_t(0)
            code = self._call(
                ctypes.c_void_p(targets.ctypes.data + 8 * start),
                ctypes.c_void_p(sources.ctypes.data + 8 * start),
                ctypes.c_void_p(sizes.ctypes.data),
                ctypes.c_size_t(count),
                ctypes.byref(self._attributes),
                ctypes.byref(self._first),
                ctypes.c_size_t(1),
                ctypes.byref(failed),
                ctypes.c_void_p(stream),
            )
            if code:
                raise RuntimeError(f"the driver refuses {count} copies of {num_bytes} bytes: CUDA error {code}")


def driver_copier() -> DriverCopier | None:
    """None where the driver has no batched copies."""
    try:
        return DriverCopier()
    except (OSError, AttributeError):
        return None


def _find_call() -> Any:
    find = ctypes.CDLL("libcuda.so.1").cuGetProcAddress_v2
    found, status = ctypes.c_void_p(), ctypes.c_int()
    code = find(
        b"cuMemcpyBatchAsync",
        ctypes.byref(found),
        ctypes.c_int(_CUDA_12_8),
        ctypes.c_uint64(0),
        ctypes.byref(status),
    )
    if code or not found.value:
        raise AttributeError(f"the driver has no batched copies: CUDA error {code}, status {status.value}")
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    make = ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer)
    return make(found.value)
