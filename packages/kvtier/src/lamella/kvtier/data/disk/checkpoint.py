"""The index of all sealed segments in one compact file, so that a start reads no headers.

    [ magic, version, fingerprint, counts | segments: name, bytes | columns of the records | checksum of all before )

A file that is damaged, of another version or of another fingerprint counts as absent: the headers are read instead.
Every read checks the record itself, so a checkpoint that is too old or wrong costs misses and nothing else.
"""

from __future__ import annotations

import struct
import sys
import zlib
from array import array
from collections.abc import Iterable
from typing import NamedTuple

from lamella.kvtier.data.disk import checksum
from lamella.kvtier.data.disk.index import Name, Record
from lamella.kvtier.keys import KEY_BYTES

MAGIC = b"lmKVckp1"
VERSION = 1
_HEAD = struct.Struct("<8sII16sQQQ")
_SEGMENT = struct.Struct("<48sQ")
_CHECKSUM = struct.Struct("<I")
_ZLIB_CRC = 1
_NAME_BYTES = 4 + KEY_BYTES
RECORD_BYTES = 2 * _NAME_BYTES + 4 * 8 + 1
"""What a record takes in the file."""
_NO_PARENT = bytes(_NAME_BYTES)


class Checkpoint(NamedTuple):
    segments: list[tuple[str, int]]
    """(file, its bytes); records count segments by their place here."""
    records: dict[Name, Record]
    waiting: set[Name]


def encode(
    fingerprint: bytes,
    segments: Iterable[tuple[str, int]],
    records: Iterable[tuple[Name, Record]],
    waiting: set[Name],
) -> bytes:
    """The file. records: with segment numbers that are places in `segments`; parents of one segment need no order."""
    files = list(segments)
    names: list[Name] = []
    parents: list[Name] = []
    columns = [array("q") for _ in range(4)]
    flags = bytearray()
    late: list[Name] = []
    for name, record in records:
        names.append(name)
        parents.append(record.parent or _NO_PARENT)
        for column, value in zip(columns, record):
            assert isinstance(value, int)
            column.append(value)
        flags.append(record.flags)
        if name in waiting:
            late.append(name)
    if sys.byteorder == "big":
        for column in columns:
            column.byteswap()
    kind = _ZLIB_CRC if checksum.native is None else 0
    parts = [
        _HEAD.pack(MAGIC, VERSION, kind, fingerprint, len(files), len(names), len(late)),
        *(_SEGMENT.pack(name.encode(), size) for name, size in files),
        b"".join(names),
        b"".join(parents),
        *(column.tobytes() for column in columns),
        bytes(flags),
        b"".join(late),
    ]
    body = b"".join(parts)
    crc = zlib.crc32(body) if kind else checksum.crc32c(body)
    return body + _CHECKSUM.pack(crc)


def decode(data: bytes, fingerprint: bytes) -> Checkpoint | str:
    """What the file says, or what is wrong with it."""
    view = memoryview(data)
    if len(view) < _HEAD.size + _CHECKSUM.size:
        return "length"
    magic, version, kind, written_under, num_segments, num_records, num_waiting = _HEAD.unpack_from(view)
    if magic != MAGIC or version != VERSION or kind not in (0, _ZLIB_CRC):
        return "version"
    expected = _HEAD.size + num_segments * _SEGMENT.size + num_records * RECORD_BYTES + num_waiting * _NAME_BYTES
    if len(view) != expected + _CHECKSUM.size:
        return "length"
    body = view[:expected]
    if (zlib.crc32(body) if kind else checksum.crc32c(body)) != _CHECKSUM.unpack_from(view, expected)[0]:
        return "checksum"
    if written_under != fingerprint:
        return "fingerprint"
    at = _HEAD.size
    files = []
    for padded, size in _SEGMENT.iter_unpack(view[at : at + num_segments * _SEGMENT.size]):
        files.append((padded.rstrip(b"\0").decode("ascii", "replace"), size))
    at += num_segments * _SEGMENT.size
    names = _names(view[at : at + num_records * _NAME_BYTES])
    at += num_records * _NAME_BYTES
    parents = [None if name == _NO_PARENT else name for name in _names(view[at : at + num_records * _NAME_BYTES])]
    at += num_records * _NAME_BYTES
    columns = []
    for _ in range(4):
        column = array("q")
        column.frombytes(view[at : at + 8 * num_records])
        if sys.byteorder == "big":
            column.byteswap()
        columns.append(column)
        at += 8 * num_records
    flags = view[at : at + num_records]
    records = dict(zip(names, map(Record._make, zip(*columns, flags, _shared(parents, names)))))
    late = set(_names(view[at + num_records : expected]))
    return Checkpoint(files, records, late)


def _names(packed: memoryview) -> list[Name]:
    return [name for (name,) in struct.iter_unpack(f"{_NAME_BYTES}s", packed)]


def _shared(parents: list[Name | None], names: list[Name]) -> list[Name | None]:
    """The parents, as the same objects as the names: half the memory, and dictionaries compare them by identity."""
    known: dict[Name | None, Name | None] = dict(zip(names, names))
    return [known.get(parent, parent) for parent in parents]
