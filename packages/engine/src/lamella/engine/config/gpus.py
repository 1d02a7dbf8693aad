"""The GPUs of this machine, asked of the driver itself.

    libcuda there? ─► kernels installed? ─► cuInit, names, sizes ─► can the kernels run on them?

Each question is asked only where the one before was answered with yes, so that a machine without an NVIDIA driver pays
for a library that is not found and nothing else. Nothing here imports torch unless there is a GPU for it.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

KERNELS = "lamella.kernels_cuda"
NO_DRIVER = "this machine has no NVIDIA driver (libcuda.so.1 is not there)"
NO_KERNELS = "lamella-kernels-cuda is not installed: pip install lamella-kernels-cuda"

# attributes of a device, and how much room its name gets
_MAJOR, _MINOR, _NAME_BYTES = 75, 76, 128


@dataclass(frozen=True, slots=True)
class Gpu:
    """One that the driver shows to this process."""

    index: int
    name: str
    total_bytes: int
    free_bytes: int
    """At the time of looking; the total where the driver's management library is missing."""
    capability: tuple[int, int]
    refused: str | None = None
    """Why the kernels cannot run on it."""


class Gpus(NamedTuple):
    """What was found, or why nothing was."""

    found: tuple[Gpu, ...] = ()
    missing: str = ""
    """Why `found` is empty, with the remedy."""


NOT_LOOKED = Gpus(missing="nobody looked")


def read_gpus(
    load: Callable[[str], Any] = ctypes.CDLL,
    installed: Callable[[], bool] | None = None,
    refuse: Callable[[int], str | None] | None = None,
) -> Gpus:
    """Look at the GPUs that the driver shows. load opens a shared library, installed says whether there are kernels,
    refuse why they cannot run on a device: for tests."""
    if sys.platform != "linux":
        return Gpus(missing=f"the CUDA kernels are built for Linux, this is {sys.platform}")
    try:
        driver = load("libcuda.so.1")
    except OSError:
        return Gpus(missing=NO_DRIVER)
    if not (installed or kernels_installed)():
        return Gpus(missing=NO_KERNELS)
    count = ctypes.c_int()
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if status or not count.value:
        return Gpus(missing=f"the NVIDIA driver shows no GPU to this process ({_meaning(status)})")
    free = _free_bytes(load)
    return Gpus(tuple(_read(driver, index, free, refuse or kernels_refuse) for index in range(count.value)))


def kernels_installed() -> bool:
    """Whether the package of CUDA kernels is there. Does not import it."""
    try:
        return importlib.util.find_spec(KERNELS) is not None
    except (ImportError, ValueError):
        return False


def kernels_refuse(index: int) -> str | None:
    """Why the kernels cannot run on this device; None if they can. Imports torch and the kernels, by name: the engine
    needs neither to start on a CPU."""
    try:
        torch = importlib.import_module("torch")
        kernels = importlib.import_module(KERNELS)
    except ImportError as error:
        return f"{KERNELS} cannot be imported ({error})"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA: install a CUDA build (https://pytorch.org)"
    if index >= torch.cuda.device_count():
        return f"torch {torch.__version__} (CUDA {torch.version.cuda}) does not see it: is the driver new enough?"
    reason: str | None = kernels.why_not(index)
    return reason


def _read(driver: Any, index: int, free_bytes: Callable[[str], int | None], refuse: Callable[[int], str | None]) -> Gpu:
    device, total = ctypes.c_int(), ctypes.c_size_t()
    name, bus = ctypes.create_string_buffer(_NAME_BYTES), ctypes.create_string_buffer(32)
    major, minor = ctypes.c_int(), ctypes.c_int()
    driver.cuDeviceGet(ctypes.byref(device), index)
    driver.cuDeviceGetName(name, _NAME_BYTES, device)
    driver.cuDeviceTotalMem_v2(ctypes.byref(total), device)
    driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
    driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
    driver.cuDeviceGetPCIBusId(bus, 32, device)
    free = free_bytes(bus.value.decode())
    return Gpu(
        index=index,
        name=name.value.decode(errors="replace"),
        total_bytes=total.value,
        free_bytes=total.value if free is None else min(free, total.value),
        capability=(major.value, minor.value),
        refused=refuse(index),
    )


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def _free_bytes(load: Callable[[str], Any]) -> Callable[[str], int | None]:
    """Asks the management library, which needs no context on the device, by the device's address on the bus."""
    try:
        library = load("libnvidia-ml.so.1")
        usable = library.nvmlInit_v2() == 0
    except (OSError, AttributeError):
        usable = False

    def free_bytes(bus: str) -> int | None:
        if not usable:
            return None
        handle, memory = ctypes.c_void_p(), _Memory()
        if library.nvmlDeviceGetHandleByPciBusId_v2(bus.encode(), ctypes.byref(handle)):
            return None
        if library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)):
            return None
        return int(memory.free)

    return free_bytes


def _meaning(status: int) -> str:
    known = {
        0: "it counts none: look at CUDA_VISIBLE_DEVICES",
        100: "CUDA_ERROR_NO_DEVICE: look at CUDA_VISIBLE_DEVICES and at the container's --gpus",
        803: "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH: driver and libraries differ, restart the machine",
    }
    return known.get(status, f"CUDA error {status}")
