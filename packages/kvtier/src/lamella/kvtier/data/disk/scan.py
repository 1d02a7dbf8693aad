"""Read the headers of one segment, one record after the other, up to the first that is not right.

    [ h )payload    [ h )payload    [ h )payload    torn, or never written
      0               1               2               ▲ the segment ends here

Records of one segment mostly have one length: headers are read ahead where the next ones should lie.
"""

from __future__ import annotations

from lamella.kvtier.data.disk.header import PAGE, RecordHeader, read_header
from lamella.kvtier.data.disk.pages import PagePool
from lamella.kvtier.data.disk.segment import SegmentName

AHEAD = 16


class Scan:
    """Ask wanted() for positions to read headers at, give() what was read; done when nothing is wanted or awaited."""

    def __init__(self, name: SegmentName, file: str, num_bytes: int, pages: PagePool, start: int = 0) -> None:
        self.name = name
        self.file = file
        self.num_bytes = num_bytes
        self.end = start
        """Up to here the segment holds whole records."""
        self.headers: list[RecordHeader] = []
        self.fault: str | None = None
        """Why the last record was not taken: what is wrong with its header; None at the end of the file."""
        self._pages = pages
        self._read: dict[int, tuple[memoryview, int]] = {}
        self._awaited: set[int] = set()
        self._next = start
        self._stride = 0
        self._ended = False

    @property
    def done(self) -> bool:
        return not self._awaited and (self._ended or self.end + PAGE > self.num_bytes)

    def wanted(self, max_count: int) -> list[tuple[int, memoryview]]:
        """(position, page) of headers to read now, at most max_count."""
        found: list[tuple[int, memoryview]] = []
        while (
            not self._ended
            and len(found) < max_count
            and self._next + PAGE <= self.num_bytes
            and len(self._awaited) < (AHEAD if self._stride else 1)
        ):
            if self._next not in self._awaited:
                self._awaited.add(self._next)
                found.append((self._next, self._pages.take(PAGE)))
            self._next += self._stride or self.num_bytes
        return found

    def give(self, position: int, page: memoryview, result: int) -> None:
        """What came of a read: the page is ours again. result: as of DiskDone."""
        self._awaited.discard(position)
        if position < self.end or self._ended:
            self._pages.give_back(page)
            return
        self._read[position] = (page, result)
        while not self._ended and self.end in self._read:
            page, result = self._read.pop(self.end)
            header = read_header(page) if result == PAGE else "io" if result < 0 else "length"
            self._pages.give_back(page)
            self._take(header)
        if self.done:
            self._forget()

    def _take(self, header: RecordHeader | str) -> None:
        if isinstance(header, str):
            self._end(header)
        elif header.position != self.end:
            self._end("position")
        elif self.end + header.record_bytes > self.num_bytes:
            self._end("length")
        else:
            self.headers.append(header)
            self.end += header.record_bytes
            if header.record_bytes != self._stride:
                self._stride = header.record_bytes
                self._forget()
                self._next = self.end

    def _end(self, fault: str | None) -> None:
        self._ended = True
        self.fault = fault
        self._forget()

    def _forget(self) -> None:
        for page, _ in self._read.values():
            self._pages.give_back(page)
        self._read.clear()
