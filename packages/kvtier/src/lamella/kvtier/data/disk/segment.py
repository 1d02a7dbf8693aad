"""Segments: append-only files of records, and the names of all files in a store's folder.

    <number>-<fingerprint>-<writer>.open    one writer appends; the rest of the file is reserved or zeros
    <number>-<fingerprint>-<writer>.kv      sealed: never changes again, may be read and reclaimed by every process
    <writer>.lock                           held as long as the writer lives; its open segments may be sealed by
                                            whoever gets it
    folder.lock                             held while a process makes room
    index-<fingerprint>.ckpt                the index of sealed segments

Numbers rise over all writers, so that they say which segment is oldest.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from lamella.kvtier.data.disk.index import Name

FOLDER_LOCK = "folder.lock"
_PATTERN = re.compile(r"([0-9a-f]{12})-([0-9a-f]{8})-([0-9a-f]{8})\.(open|kv)")


class SegmentName(NamedTuple):
    number: int
    fingerprint: str
    """The first eight digits: whose records they are is in each header."""
    writer: str
    sealed: bool

    @property
    def file(self) -> str:
        ending = "kv" if self.sealed else "open"
        return f"{self.number:012x}-{self.fingerprint}-{self.writer}.{ending}"


def parse_name(file: str) -> SegmentName | None:
    """None: the file is no segment."""
    match = _PATTERN.fullmatch(file)
    if match is None:
        return None
    return SegmentName(int(match[1], 16), match[2], match[3], match[4] == "kv")


def short(fingerprint: bytes) -> str:
    return fingerprint[:4].hex()


def checkpoint_name(fingerprint: bytes) -> str:
    return f"index-{short(fingerprint)}.ckpt"


def lock_name(writer: str) -> str:
    return f"{writer}.lock"


class Segment:
    """A segment whose records are in the index."""

    __slots__ = ("full", "id", "name", "num_bytes", "num_writing", "records", "room")

    def __init__(self, id: int, name: SegmentName, num_bytes: int, room: int = 0) -> None:
        self.id = id
        self.name = name
        self.num_bytes = num_bytes
        """Of a segment that we write: where the next record goes."""
        self.room = room
        """Bytes the file may have."""
        self.num_writing = 0
        """Writes in flight."""
        self.full = False
        """Nothing more is written to it; it is sealed when the writes in flight have ended."""
        self.records: list[Name] = []
        """What was written here; the index knows what still is."""
