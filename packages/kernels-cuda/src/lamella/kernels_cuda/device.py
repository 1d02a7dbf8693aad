"""Whether kernels can run here, and the native module that holds them."""

from __future__ import annotations

import importlib
from types import ModuleType

_native: ModuleType | None = None
_reason = ""
try:
    _native = importlib.import_module("lamella.kernels_cuda._C")
except ImportError as error:  # built without nvcc, or for another platform
    _reason = (
        f"the native module of lamella-kernels-cuda cannot be loaded ({error}); install its wheel for Linux x86-64"
    )


def native() -> ModuleType:
    """The native module. RuntimeError with the remedy where it was not built."""
    if _native is None:
        raise RuntimeError(_reason)
    return _native


def capability(device: int = 0) -> tuple[int, int]:
    """Compute capability of a device, (0, 0) if there is no such device."""
    return (0, 0) if _native is None else divmod(_native.capability(device), 10)


def why_not(device: int = 0) -> str | None:
    """None if kernels can run on this device, else the reason."""
    if _native is None:
        return _reason
    major, minor = capability(device)
    if major == 0:
        return f"no CUDA device {device} with a driver that is new enough (CUDA 13 needs 580 or later)"
    archs = _native.archs.split(",")
    if any(_runs(arch, major, minor) for arch in archs):
        return None
    return f"built for {', '.join(archs)}, the device has compute capability {major}.{minor}"


def available(device: int = 0) -> bool:
    """Whether kernels can run on this device."""
    return why_not(device) is None


def _runs(arch: str, major: int, minor: int) -> bool:
    """Machine code with a suffix runs on its own device only, without one on later minors of the same major, too."""
    number = int(arch.rstrip("af"))
    same = number // 10 == major
    return same and (number % 10 == minor if arch.endswith("a") else number % 10 <= minor)
