"""What this machine offers to this process, read once at start and handed on as data."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from lamella.engine.config.gpus import NOT_LOOKED, Gpus, read_gpus
from lamella.runner_v2.cgroup import read_limits


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts that defaults are chosen from."""

    cores: int
    """Cores that this process may use: physical ones, within its affinity mask and its container's CPU quota."""
    available_bytes: int
    """Memory that can be had without swapping, within the container's limit."""
    total_bytes: int
    """Memory that is installed, or that the container may use."""
    name: str
    logical_cores: int = 1
    """All that the system shows, whether this process may use them or not."""
    gpus: Gpus = NOT_LOOKED


def read_machine(root: Path = Path("/"), *, with_gpus: bool = False) -> Machine:
    """Look at this machine. root: where the container's limits are looked for, below proc/ and sys/. with_gpus: at its
    GPUs, too, which imports torch where there are any."""
    logical = os.cpu_count() or 1
    usable = _usable_cores() or logical
    limits = read_limits(root)
    cores = min(usable, psutil.cpu_count(logical=False) or usable)
    if limits.cpus is not None:
        cores = min(cores, int(limits.cpus))  # with a thread more than there is time for, all wait for the stopped one
    cores = max(1, cores)
    memory = psutil.virtual_memory()
    available, total = int(memory.available), int(memory.total)
    if limits.memory_free_bytes is not None:
        available = min(available, limits.memory_free_bytes)
    if limits.memory_bytes is not None:
        total = min(total, limits.memory_bytes)
    return Machine(
        cores=cores,
        available_bytes=available,
        total_bytes=total,
        name=f"{platform.machine()} {sys.platform}, {cores} core{'s' if cores > 1 else ''}",
        logical_cores=logical,
        gpus=read_gpus() if with_gpus else NOT_LOOKED,
    )


def _usable_cores() -> int | None:
    """Those of the affinity mask, or as many as Python was told (-X cpu_count), where it can say."""
    if sys.version_info >= (3, 13):
        return os.process_cpu_count()
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return None
