"""How much of the host's memory could still be taken."""

from __future__ import annotations

import os
from pathlib import Path

from lamella.runner_v2.cgroup import read_limits


def available_bytes(root: Path = Path("/")) -> int:
    """Memory that new allocations could use without swapping, within the container's limit if there is one. root: where
    proc/ and sys/ lie.

    Where the system does not tell, half of the installed memory.
    """
    candidates = [_from_meminfo(root / "proc" / "meminfo"), read_limits(root).memory_free_bytes]
    known = [value for value in candidates if value is not None]
    return min(known) if known else _half_of_installed()


def _from_meminfo(path: Path) -> int | None:
    for line in _lines(path):
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return None


def _half_of_installed() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
