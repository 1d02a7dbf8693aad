"""What a Linux container, or any control group that this process is in, leaves it of the machine.

    proc/self/cgroup                           0::/a/b                v2: the group
                                               4:cpu,cpuacct:/a/b     v1: one line per set of controllers
    sys/fs/cgroup/a/b/cpu.max                  "200000 100000": microseconds in each so many, or "max"
    sys/fs/cgroup/a/b/memory.{max,current}
    sys/fs/cgroup/cpu/a/b/cpu.cfs_{quota,period}_us            v1
    sys/fs/cgroup/memory/a/b/memory.{limit,usage}_in_bytes     v1

Each group above counts as well: the narrowest limit holds. A container often sees its own group as the root; then the
files lie directly in sys/fs/cgroup. What is not there, or cannot be read, limits nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_NO_LIMIT = 1 << 60
"""v1 writes a number near 2^63 where there is no limit."""
_FILE_CACHE = ("inactive_file", "active_file", "total_inactive_file", "total_active_file")


class Limits(NamedTuple):
    """None: no limit."""

    cpus: float | None
    """CPU seconds per second."""
    memory_bytes: int | None
    memory_free_bytes: int | None
    """What may still be taken; the file cache counts as free."""


def read_limits(root: Path = Path("/")) -> Limits:
    """The limits of this process; root: where proc/ and sys/ lie."""
    cpus = [quota for folder in _folders(root, "cpu") if (quota := _cpus(folder)) is not None]
    memory = [pair for folder in _folders(root, "memory") if (pair := _memory(folder)) is not None]
    return Limits(
        min(cpus, default=None),
        min((limit for limit, _ in memory), default=None),
        min((free for _, free in memory), default=None),
    )


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Those of the controller's groups, this process's own first."""
    mount = root / "sys" / "fs" / "cgroup"
    for line in _lines(root / "proc" / "self" / "cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if number == "0" and not controllers:
            top = mount
        elif controller in controllers.split(","):
            top = mount / controller if (mount / controller).is_dir() else mount / controllers
        else:
            continue
        group = PurePosixPath(name.lstrip("/"))
        for part in (group, *group.parents):
            if ".." not in part.parts:  # outside of what this process is shown
                yield top / part


def _cpus(folder: Path) -> float | None:
    quota, *period = _words(folder / "cpu.max") or _words(folder / "cpu.cfs_quota_us") or ["max"]
    period = period or _words(folder / "cpu.cfs_period_us")
    if not (quota.isdigit() and period and period[0].isdigit() and int(period[0])):
        return None  # "max" in v2, -1 in v1
    return int(quota) / int(period[0])


def _memory(folder: Path) -> tuple[int, int] | None:
    """Limit, and what is left of it."""
    limit = _number(folder / "memory.max", folder / "memory.limit_in_bytes")
    used = _number(folder / "memory.current", folder / "memory.usage_in_bytes")
    if limit is None or used is None or limit >= _NO_LIMIT:
        return None
    stat = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat") if " " in line)
    # v1 tells of the group alone and, under total_, of those below as well
    names = _FILE_CACHE[2:] if _FILE_CACHE[2] in stat else _FILE_CACHE[:2]
    cached = sum(int(stat[name]) for name in names if stat.get(name, "").isdigit())
    return limit, max(0, limit - used + cached)


def _number(*files: Path) -> int | None:
    """What the first file holds that there is."""
    for file in files:
        words = _words(file)
        if words:
            return int(words[0]) if words[0].isdigit() else None
    return None


def _words(file: Path) -> list[str]:
    return " ".join(_lines(file)).split()


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
