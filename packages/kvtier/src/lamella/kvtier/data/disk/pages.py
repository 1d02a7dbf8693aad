"""Page-aligned memory for headers, tails and blocks whose own memory is not aligned; reused by size."""

from __future__ import annotations

import mmap

from lamella.kvtier.data.disk.header import PAGE

_CHUNK_PAGES = 64
_MAX_IDLE_BYTES = 64 << 20


class PagePool:
    """take() and give_back(), by one thread. Content is whatever was there before."""

    def __init__(self) -> None:
        self._idle: dict[int, list[memoryview]] = {}
        self._idle_bytes = 0

    def take(self, num_bytes: int) -> memoryview:
        """At least num_bytes, rounded up to whole pages."""
        size = max(PAGE, -(-num_bytes // PAGE) * PAGE)
        idle = self._idle.setdefault(size, [])
        if not idle:
            if size > PAGE:
                return memoryview(mmap.mmap(-1, size))
            chunk = memoryview(mmap.mmap(-1, _CHUNK_PAGES * PAGE))
            idle += [chunk[n * PAGE : (n + 1) * PAGE] for n in range(_CHUNK_PAGES)]
        elif size > PAGE:
            self._idle_bytes -= size
        return idle.pop()

    def give_back(self, pages: memoryview) -> None:
        """As take() gave it."""
        size = len(pages)
        if size > PAGE:
            if self._idle_bytes + size > _MAX_IDLE_BYTES:
                return
            self._idle_bytes += size
        self._idle[size].append(pages)
