"""Check a folder of a disk tier offline: every header and every payload of every segment, and the checkpoints.

Reads only; a store may have the folder open meanwhile, and then the segment that it writes counts as unfinished.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field

from lamella.kvtier.data.disk import checkpoint
from lamella.kvtier.data.disk.checksum import payload_checksum
from lamella.kvtier.data.disk.header import PAGE, ZLIB_CRC, RecordHeader, read_header
from lamella.kvtier.data.disk.segment import parse_name, short
from lamella.kvtier.errors import KvTierError


@dataclass(slots=True)
class FolderReport:
    segments: int = 0
    records: int = 0
    """Whole and right."""
    num_bytes: int = 0
    """Of their blocks."""
    file_bytes: int = 0
    """Of all files in the folder."""
    faults: Counter[str] = field(default_factory=Counter)
    """By kind. A record behind a damaged header is not found and not counted."""
    unfinished: int = 0
    """Segments whose writer lives, or ended without sealing them; a store seals them when it opens the folder."""
    fingerprints: Counter[str] = field(default_factory=Counter)
    """Records per fingerprint, in hexadecimal digits."""
    groups: Counter[int] = field(default_factory=Counter)
    damaged: list[str] = field(default_factory=list)
    """file:position: kind, the first hundred."""

    @property
    def ok(self) -> bool:
        return not self.faults

    def note(self, kind: str, place: str) -> None:
        self.faults[kind] += 1
        if len(self.damaged) < 100:
            self.damaged.append(f"{place}: {kind}")


def verify_folder(folder: str | os.PathLike[str]) -> FolderReport:
    """Raises KvTierError if the folder cannot be read at all."""
    path = os.fspath(folder)
    report = FolderReport()
    try:
        files = sorted(os.listdir(path))
    except OSError as problem:
        raise KvTierError(f"the folder {path} cannot be read: {problem.strerror}") from problem
    for file in files:
        place = os.path.join(path, file)
        try:
            report.file_bytes += os.path.getsize(place)
            if parse_name(file) is not None:
                _verify_segment(place, file, report)
            elif file.endswith(".ckpt"):
                _verify_checkpoint(place, file, report)
        except FileNotFoundError:
            continue  # reclaimed or sealed meanwhile
        except OSError as problem:
            report.note(f"io: {problem.strerror}", file)
    return report


def _verify_segment(place: str, file: str, report: FolderReport) -> None:
    name = parse_name(file)
    assert name is not None
    report.segments += 1
    report.unfinished += not name.sealed
    with open(place, "rb", buffering=0) as segment:
        size = os.fstat(segment.fileno()).st_size
        position = 0
        while position < size:
            page = segment.read(PAGE)
            header = read_header(memoryview(page)) if len(page) == PAGE else "length"
            if isinstance(header, RecordHeader) and header.position != position:
                header = "position"
            if isinstance(header, RecordHeader) and position + header.record_bytes > size:
                header = "length"
            if isinstance(header, str):
                if name.sealed or header not in ("magic", "length"):
                    report.note(header, f"{file}:{position}")
                return
            padded = segment.read(header.record_bytes - PAGE)
            _verify_payload(header, padded, name.fingerprint, f"{file}:{position}", report)
            position += header.record_bytes


def _verify_payload(header: RecordHeader, padded: bytes, fingerprint: str, place: str, report: FolderReport) -> None:
    stored = memoryview(padded)[: header.stored_bytes]
    if short(header.fingerprint) != fingerprint:
        report.note("fingerprint", place)
    elif len(padded) < header.record_bytes - PAGE:
        report.note("short read", place)
    elif payload_checksum(stored, bool(header.flags & ZLIB_CRC)) != header.payload_checksum:
        report.note("checksum", place)
    else:
        report.records += 1
        report.num_bytes += header.num_bytes
        report.fingerprints[header.fingerprint.hex()] += 1
        report.groups[header.group] += 1


def _verify_checkpoint(place: str, file: str, report: FolderReport) -> None:
    with open(place, "rb") as stored:
        data = stored.read()
    found = checkpoint.decode(data, data[16:32])
    if isinstance(found, str):
        report.note(f"checkpoint {found}", file)
