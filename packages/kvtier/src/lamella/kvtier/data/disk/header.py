"""What stands before a record's bytes on disk.

    record   [ header | zeros up to 4096 )[ payload | zeros up to the next multiple of 4096 )
             0                            4096

Everything a reader must know to refuse bytes that are not what it asked for is in the header: under which fingerprint
they were written, of which group, under which key, where, how long, and two checksums.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from lamella.kvtier.data.disk.checksum import crc32c
from lamella.kvtier.keys import KEY_BYTES, Key

PAGE = 4096
MAGIC = b"lmKVrec1"
VERSION = 1

FIRST = 1
"""The record is a sequence's first block: it has no parent."""
ZLIB_CRC = 2
"""The payload's checksum is zlib's CRC-32 instead of CRC-32C."""
ZSTD = 4
"""The payload is compressed."""
MOVED = 8
"""Copied forward when an older segment was reclaimed."""
_KNOWN_FLAGS = FIRST | ZLIB_CRC | ZSTD | MOVED

_FIELDS = struct.Struct("<8sII16sI32s32sQQQI")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size

FIELDS: dict[str, tuple[int, int]] = {
    "magic": (0, 8),
    "version": (8, 12),
    "flags": (12, 16),
    "fingerprint": (16, 32),
    "group": (32, 36),
    "key": (36, 68),
    "parent": (68, 100),
    "position": (100, 108),
    "stored_bytes": (108, 116),
    "num_bytes": (116, 124),
    "payload_checksum": (124, 128),
    "header_checksum": (128, 132),
}
"""Where each field lies: [start, end)."""

_NO_PARENT = bytes(KEY_BYTES)


class RecordHeader(NamedTuple):
    """The fields in their order, without magic, version and the header's own checksum."""

    flags: int
    fingerprint: bytes
    group: int
    key: Key
    parent: Key | None
    position: int
    """Of the record in its segment: tells a record that was written elsewhere."""
    stored_bytes: int
    """Length of the payload as it lies there."""
    num_bytes: int
    """Length of the block."""
    payload_checksum: int

    @property
    def record_bytes(self) -> int:
        return record_bytes(self.stored_bytes)


def record_bytes(stored_bytes: int) -> int:
    """What a record takes in its segment."""
    return PAGE + -(-stored_bytes // PAGE) * PAGE


def write_header(header: RecordHeader, page: memoryview) -> None:
    """Fill a page of 4096 bytes."""
    flags = header.flags | (FIRST if header.parent is None else 0)
    fields = _FIELDS.pack(
        MAGIC,
        VERSION,
        flags,
        header.fingerprint,
        header.group,
        header.key,
        header.parent or _NO_PARENT,
        header.position,
        header.stored_bytes,
        header.num_bytes,
        header.payload_checksum,
    )
    page[:HEADER_BYTES] = fields + _CHECKSUM.pack(crc32c(fields))
    page[HEADER_BYTES:] = bytes(PAGE - HEADER_BYTES)


def read_header(page: memoryview) -> RecordHeader | str:
    """The header, or what is wrong with it: "magic", "version", "header"."""
    fields = bytes(page[: _FIELDS.size])
    if fields[:8] != MAGIC:
        return "magic"
    if crc32c(fields) != _CHECKSUM.unpack_from(page, _FIELDS.size)[0]:
        return "header"
    _, version, flags, fingerprint, group, key, parent, position, stored, length, checksum = _FIELDS.unpack(fields)
    if version != VERSION or flags & ~_KNOWN_FLAGS:
        return "version"
    above = None if flags & FIRST else parent
    return RecordHeader(flags, fingerprint, group, key, above, position, stored, length, checksum)
