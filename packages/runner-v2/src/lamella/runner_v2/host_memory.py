"""How much of the host's memory could still be taken."""

from __future__ import annotations

import os
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Memory that new allocations could use without swapping, within the container's limit if there is one.

    Where the system does not tell, half of the installed memory.
    """
    candidates = [_from_meminfo(_MEMINFO), _from_cgroup(_CGROUP)]
    known = [value for value in candidates if value is not None]
    return min(known) if known else _half_of_installed()


def _from_meminfo(path: Path) -> int | None:
    for line in _lines(path):
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return None


def _from_cgroup(folder: Path) -> int | None:
    """Limit less what is in use; the file cache counts as free."""
    limit, current = _lines(folder / "memory.max"), _lines(folder / "memory.current")
    if not limit or not current or limit[0].strip() == "max":
        return None
    cached = 0
    for line in _lines(folder / "memory.stat"):
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "active_file"):
            cached += int(value)
    return max(0, int(limit[0]) - int(current[0]) + cached)


def _half_of_installed() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
