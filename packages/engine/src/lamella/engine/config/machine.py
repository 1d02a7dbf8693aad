"""What this machine offers, read once at start and handed on as data."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts that defaults are chosen from."""

    cores: int
    """Cores that this process may use: physical ones, within its affinity mask."""
    available_bytes: int
    """Memory that can be had without swapping."""
    total_bytes: int
    name: str
    logical_cores: int = 1
    """All that the system shows, whether this process may use them or not."""


def read_machine() -> Machine:
    """Look at this machine."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    physical = psutil.cpu_count(logical=False) or usable
    memory = psutil.virtual_memory()
    return Machine(
        cores=max(1, min(usable, physical)),
        available_bytes=int(memory.available),
        total_bytes=int(memory.total),
        name=f"{platform.machine()} {sys.platform}, {max(1, min(usable, physical))} cores",
        logical_cores=os.cpu_count() or 1,
    )
