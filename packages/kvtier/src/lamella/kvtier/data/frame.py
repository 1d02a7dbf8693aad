"""What wraps a block's bytes outside this machine, so that wrong bytes are told from right ones.

    [ header, 128 bytes                                                                                ][ payload ]
      magic 8 | fingerprint 16 | key 32 | parent 32 | group 4 | length 8 | checksum of payload 4 | zeros | checksum 4

All numbers are little-endian. The last four bytes are the checksum of the header before them.
"""

from __future__ import annotations

import struct
import zlib

from lamella.kvtier.keys import KEY_BYTES, Key

HEADER_BYTES = 128
MAGIC = b"lamKV\x00\x01\x00"
_HEADER = struct.Struct(f"<8s16s{KEY_BYTES}s{KEY_BYTES}sIQI")
_NO_PARENT = bytes(KEY_BYTES)


def checksum(data: bytes | bytearray | memoryview) -> int:
    """32 bits over the bytes."""
    return zlib.crc32(data)


def pack(fingerprint: bytes, group: int, key: Key, parent: Key | None, payload: memoryview) -> bytearray:
    """Header and payload in memory of their own."""
    header = _HEADER.pack(MAGIC, fingerprint, key, parent or _NO_PARENT, group, len(payload), checksum(payload))
    frame = bytearray(HEADER_BYTES + len(payload))
    frame[: len(header)] = header
    frame[HEADER_BYTES - 4 : HEADER_BYTES] = checksum(memoryview(frame)[: HEADER_BYTES - 4]).to_bytes(4, "little")
    frame[HEADER_BYTES:] = payload
    return frame


def fault(frame: memoryview, fingerprint: bytes, group: int, key: Key) -> str | None:
    """What is wrong with a frame that should hold this block; None: the payload is what was packed."""
    if len(frame) < HEADER_BYTES:
        return "short"
    if int.from_bytes(frame[HEADER_BYTES - 4 : HEADER_BYTES], "little") != checksum(frame[: HEADER_BYTES - 4]):
        return "header checksum"
    magic, found_fingerprint, found_key, _, found_group, length, payload_sum = _HEADER.unpack_from(frame)
    if magic != MAGIC:
        return "magic"
    if (found_fingerprint, found_key, found_group) != (fingerprint, key, group):
        return "another block"
    if length != len(frame) - HEADER_BYTES:
        return "length"
    if payload_sum != checksum(frame[HEADER_BYTES:]):
        return "payload checksum"
    return None
