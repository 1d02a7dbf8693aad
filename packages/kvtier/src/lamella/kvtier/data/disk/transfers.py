"""Transfers of a store: what is under way, and what becomes of it.

Records are read and written by parts that lie behind one another in the file. A block's own memory is used where its
address and length allow it; header, tail and unaligned blocks go through pages of the store's.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import NamedTuple

from lamella.kvtier.data.disk.checksum import native, payload_checksum
from lamella.kvtier.data.disk.compression import Zstd
from lamella.kvtier.data.disk.header import PAGE, ZLIB_CRC, ZSTD, RecordHeader, read_header, write_header
from lamella.kvtier.data.disk.index import Name, Record, group_of
from lamella.kvtier.data.disk.pages import PagePool
from lamella.kvtier.errors import KvTierError

Ended = Callable[[int], None]
"""What to do with a transfer's result."""


class Transfer(NamedTuple):
    """In flight."""

    ended: Ended
    started_s: float


class Parts(NamedTuple):
    """A record's memory while it is on its way."""

    buffers: tuple[memoryview, ...]
    pages: tuple[memoryview, ...]
    """Of them, those that go back to the pool."""


class Framing:
    """Records to parts and back, for one fingerprint."""

    def __init__(self, fingerprint: bytes, alignment: int, pages: PagePool, compress: bool) -> None:
        """Raises KvTierError if blocks are to be compressed and cannot be."""
        self._fingerprint = fingerprint
        self._alignment = alignment
        self._pages = pages
        self._zstd = Zstd() if compress else None
        self._compress = compress
        self._written_flags = ZLIB_CRC if native is None else 0

    def pack(self, data: memoryview) -> tuple[memoryview, int]:
        """(the block as it is to be stored, flags)."""
        packed = self._zstd.pack(data) if self._compress and self._zstd is not None else None
        return (data, 0) if packed is None else (packed, ZSTD)

    def to_write(
        self, name: Name, parent: Name | None, position: int, stored: memoryview, num_bytes: int, flags: int
    ) -> Parts:
        """A whole record. flags: ZSTD if `stored` is compressed, MOVED."""
        flags |= self._written_flags
        checksum = payload_checksum(stored, bool(flags & ZLIB_CRC))
        header = RecordHeader(
            flags,
            self._fingerprint,
            group_of(name),
            name[4:],
            None if parent is None else parent[4:],
            position,
            len(stored),
            num_bytes,
            checksum,
        )
        page = self._pages.take(PAGE)
        write_header(header, page)
        whole = len(stored) // PAGE * PAGE if self._is_aligned(stored) else 0
        if whole == len(stored):
            return Parts((page, stored), (page,))
        rest = self._pages.take(len(stored) - whole)
        rest[: len(stored) - whole] = stored[whole:]
        rest[len(stored) - whole :] = bytes(len(rest) - len(stored) + whole)
        return Parts((page, stored[:whole], rest), (page, rest))

    def to_read(self, record: Record, into: memoryview | None) -> Parts:
        """Room for a whole record: in `into`, where that can be read into directly."""
        page = self._pages.take(PAGE)
        plain = into is not None and not record.flags & ZSTD
        if plain and into is not None and record.stored_bytes % PAGE == 0 and self._is_aligned(into):
            return Parts((page, into), (page,))
        rest = self._pages.take(record.stored_bytes)
        return Parts((page, rest), (page, rest))

    def check(self, name: Name, record: Record, parts: Parts, result: int) -> str | None:
        """What is wrong with a record that was read; None: it is what the index says, byte for byte."""
        if result < 0:
            return errno.errorcode.get(-result, "EIO")
        if result < PAGE + record.stored_bytes:
            return "short read"
        header = read_header(parts.buffers[0])
        if isinstance(header, str):
            return header
        parent = None if record.parent is None else record.parent[4:]
        wrong = (
            ("fingerprint", header.fingerprint != self._fingerprint),
            ("group", header.group != group_of(name)),
            ("key", header.key != name[4:]),
            ("parent", header.parent != parent),
            ("position", header.position != record.position),
            ("flags", bool((header.flags ^ record.flags) & ZSTD)),
            ("length", header.stored_bytes != record.stored_bytes or header.num_bytes != record.num_bytes),
        )
        for kind, is_wrong in wrong:
            if is_wrong:
                return kind
        stored = parts.buffers[1][: record.stored_bytes]
        if payload_checksum(stored, bool(header.flags & ZLIB_CRC)) != header.payload_checksum:
            return "checksum"
        return None

    def deliver(self, record: Record, parts: Parts, into: memoryview) -> str | None:
        """Put what was read and checked where it is wanted; or what is wrong with it."""
        stored = parts.buffers[1][: record.stored_bytes]
        if record.flags & ZSTD:
            try:
                self._zstd = self._zstd or Zstd()
            except KvTierError:
                return "zstd missing"
            data = self._zstd.unpack(stored, record.num_bytes)
            if data is None:
                return "compression"
            into[:] = data
        elif len(parts.pages) > 1:
            into[:] = stored
        return None

    def release(self, parts: Parts) -> None:
        for page in parts.pages:
            self._pages.give_back(page)

    def _is_aligned(self, memory: memoryview) -> bool:
        if self._alignment == 1 or native is None:
            return True
        return native.address(memory) % self._alignment == 0
