"""CRC-32C of buffers: the native one, or a reference in Python that is right and slow.

Without the native module, stores therefore write zlib's CRC-32, which Python has in C; a flag in the record says which.
"""

from __future__ import annotations

import zlib

try:
    from lamella.kvtier import _C as native
except ImportError:  # built without a compiler
    native = None  # type: ignore[assignment]

__all__ = ["Bytes", "crc32c", "native", "payload_checksum", "reference_crc32c"]

Bytes = bytes | bytearray | memoryview


def _make_table() -> list[int]:
    table = []
    for n in range(256):
        for _ in range(8):
            n = (n >> 1) ^ (0x82F63B78 if n & 1 else 0)
        table.append(n)
    return table


_TABLE = _make_table()


def reference_crc32c(data: Bytes, crc: int = 0) -> int:
    """Byte by byte. crc: of what came before."""
    table = _TABLE
    crc ^= 0xFFFFFFFF
    for byte in memoryview(data).cast("B"):
        crc = (crc >> 8) ^ table[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def crc32c(data: Bytes, crc: int = 0) -> int:
    """crc: of what came before."""
    return native.crc32c(data, crc) if native is not None else reference_crc32c(data, crc)


def payload_checksum(data: Bytes, zlib_crc: bool) -> int:
    """Of a record's bytes as they are stored."""
    return zlib.crc32(data) if zlib_crc else crc32c(data)
