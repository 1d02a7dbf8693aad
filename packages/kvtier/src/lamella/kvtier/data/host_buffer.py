"""The host tier's memory: one shared mapping, cut into page-aligned slots per group.

    group 0                                group 1
    [ slot 0 ][ slot 1 ] … [ slot n-1 ]    [ slot 0 ] …
      │
      └ [ rank 0: bytes_per_block ][ rank 1 ] … [ unused up to the page ]

Nothing is touched when it is made: the system hands out a page when a block is first written there, so a slab of any
size costs no time at the start. The mapping is a file without a name: other processes map the same bytes through `fd`.
Pages are advised to be huge where the system has them.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lamella.kvtier.errors import CapacityError

PAGE_BYTES = 4096
REGION_BYTES = 2 << 20
"""Groups begin at a multiple of this: a huge page."""


class HostBuffer:
    """Slots [0, num_slots[group]) of every group."""

    def __init__(
        self,
        bytes_per_block: Sequence[int],
        num_slots: Sequence[int],
        *,
        num_ranks: int = 1,
        available_bytes: int | None = None,
        fd: int | None = None,
    ) -> None:
        """bytes_per_block: per group, of one rank. available_bytes: memory that may be used; None: what the system and
        this process's control group leave. fd: the file of a buffer with the same arguments in another process.

        Raises CapacityError when the slots are more than the memory.
        """
        assert len(bytes_per_block) == len(num_slots)
        self.bytes_per_block = tuple(bytes_per_block)
        self.num_slots = tuple(num_slots)
        self.num_ranks = num_ranks
        self.slot_bytes = tuple(_round_up(size * num_ranks, PAGE_BYTES) for size in bytes_per_block)
        """Per group, from one slot to the next."""
        offsets: list[int] = []
        end = 0
        for size, count in zip(self.slot_bytes, self.num_slots):
            offsets.append(end)
            end = _round_up(end + size * count, REGION_BYTES)
        self.offsets = tuple(offsets)
        self.num_bytes = end
        if fd is None:
            _require(end, free_memory() if available_bytes is None else available_bytes)
            self.fd = _anonymous_file(end)
        else:
            self.fd = os.dup(fd)
        self._mapping = mmap.mmap(self.fd, end, mmap.MAP_SHARED)
        self._bytes = memoryview(self._mapping)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages says no: pages are small then
                self._mapping.madvise(mmap.MADV_HUGEPAGE)

    def view(self, group: int, slot: int) -> memoryview:
        """The bytes of all ranks, writable: num_ranks x bytes_per_block."""
        start = self._start(group, slot)
        return self._bytes[start : start + self.bytes_per_block[group] * self.num_ranks]

    def rank_view(self, group: int, slot: int, rank: int) -> memoryview:
        """The bytes of one rank, writable: bytes_per_block."""
        assert 0 <= rank < self.num_ranks, f"rank {rank} of {self.num_ranks}"
        size = self.bytes_per_block[group]
        start = self._start(group, slot) + rank * size
        return self._bytes[start : start + size]

    def region(self, group: int) -> memoryview:
        """All slots of a group, writable: num_slots x slot_bytes."""
        start = self.offsets[group]
        return self._bytes[start : start + self.slot_bytes[group] * self.num_slots[group]]

    def close(self) -> None:
        """Give the memory back once the last view of it is gone."""
        self._bytes.release()
        with contextlib.suppress(BufferError):  # views are still out: the mapping ends with the last of them
            self._mapping.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _start(self, group: int, slot: int) -> int:
        if not 0 <= slot < self.num_slots[group]:
            raise IndexError(f"slot {slot} of group {group}, which has {self.num_slots[group]} slots")
        return self.offsets[group] + slot * self.slot_bytes[group]


def slots_for(num_bytes: int, bytes_per_block: Sequence[int], weights: Sequence[int], num_ranks: int = 1) -> list[int]:
    """Slots per group that num_bytes hold, in the proportion of the weights (blocks a long sequence has per group, or
    the device's numbers of blocks).

    Raises CapacityError when not even one slot per group fits.
    """
    sizes = [_round_up(size * num_ranks, PAGE_BYTES) for size in bytes_per_block]
    # the padding between groups is paid from the same purse
    usable = num_bytes - REGION_BYTES * (len(sizes) - 1)
    share = usable / sum(size * weight for size, weight in zip(sizes, weights))
    slots = [int(share * weight) for weight in weights]
    if min(slots) < 1:
        raise CapacityError(
            f"a host tier of {num_bytes / 2**20:.1f} MiB holds not even one block of every group "
            f"({', '.join(f'{size / 2**20:.2f} MiB' for size in sizes)} a block): give it more memory"
        )
    return slots


def free_memory() -> int:
    """Bytes that the system and this process's control group have left; a very large number where neither tells."""
    limits = [1 << 62]
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        limits.append(int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024)
    for limit, usage in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # "max", or no such control group: no limit
            limits.append(int(Path(limit).read_text()) - int(Path(usage).read_text()))
    return max(0, min(limits))


def _require(wanted: int, available: int) -> None:
    if wanted > available:
        raise CapacityError(
            f"the host tier needs {wanted / 2**30:.2f} GiB of memory, but {available / 2**30:.2f} GiB are left: "
            "make it smaller (ram=…)"
        )


def _anonymous_file(num_bytes: int) -> int:
    """A file in memory that has no name; where the system knows no such thing, one that was unlinked."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("lamella-kv", os.MFD_CLOEXEC)
    else:
        fd, path = tempfile.mkstemp(prefix="lamella-kv-")
        os.unlink(path)
    os.truncate(fd, num_bytes)
    return fd


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
