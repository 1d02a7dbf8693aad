"""Blocks as records in the segments of one folder: the books of a disk tier, without a thread.

    write ──▶ SegmentWriter ─┐                     ┌▶ TicketResult
    read  ───────────────────┼▶ step() ⇄ Disk ─────┤
    folder, other processes ─┘                     └▶ Presence

All methods are called by one thread; step() does whatever can be done now and waits for the disk at most as long as it
is told. Everything that can be wrong with a folder ends as a miss: nothing of it is raised.
"""

from __future__ import annotations

import errno
import logging
from collections import deque
from collections.abc import Iterator, Sequence

from lamella.kvtier.data.disk import checkpoint
from lamella.kvtier.data.disk.counts import StoreCounts
from lamella.kvtier.data.disk.header import FIRST, RecordHeader
from lamella.kvtier.data.disk.index import Name, Record, RecordIndex, group_of, name_of
from lamella.kvtier.data.disk.pages import PagePool
from lamella.kvtier.data.disk.plan import StorePlan
from lamella.kvtier.data.disk.scan import Scan
from lamella.kvtier.data.disk.segment import (
    Segment,
    SegmentName,
    checkpoint_name,
    lock_name,
    parse_name,
    short,
)
from lamella.kvtier.data.disk.transfers import Ended, Framing, Transfer
from lamella.kvtier.data.disk.writer import SegmentWriter, Write
from lamella.kvtier.jobs import Presence, TicketId, TicketResult
from lamella.kvtier.keys import Key
from lamella.kvtier.protocols import Clock, Disk, DiskOp

logger = logging.getLogger("lamella.kvtier")

_CHECKPOINT_EVERY = 1 << 30
"""Sealed bytes; or sixteen times the checkpoint's own size, if that is more."""
_CLOSE_S = 5.0
_SCANS = 4
"""Segments whose headers are read at the same time."""


class RecordStore:
    """Opening reads the checkpoint and the headers behind it; content() is complete from then on."""

    def __init__(self, disk: Disk, clock: Clock, plan: StorePlan, writer: str) -> None:
        """writer: eight hexadecimal digits that no other open store of this folder has."""
        self.disk = disk
        self.clock = clock
        self.plan = plan
        self.counts = StoreCounts()
        self.index = RecordIndex(plan.standalone)
        self.generation = 0
        """Raised by clear(): writes of an older one are not listed when they end."""
        self.events: list[TicketResult | Presence] = []
        self._pages = PagePool()
        self.framing = Framing(plan.fingerprint, disk.alignment, self._pages, plan.compress)
        self._segments: dict[int, Segment] = {}
        self._by_file: dict[str, Segment] = {}
        self._next_segment = 0
        self._scans: dict[str, Scan] = {}
        self._ignored: set[str] = set()
        """Sealed files without a record of use: of another fingerprint, or damaged at their start."""
        self._reads: deque[tuple[TicketId, Name, memoryview]] = deque()
        self._in_flight: dict[int, Transfer] = {}
        self._next_op = 0
        self._ended: list[tuple[TicketId, str | None]] = []
        self._idle_since = clock.now()
        self._told_error = False
        self._writer_id = writer
        self.writer = SegmentWriter(self, writer)
        self._rescan_at = 0.0
        self._opening = True
        self._open()
        self._opening = False

    # ---- what callers ask ------------------------------------------------------------------------------------------

    def content(self) -> Iterator[tuple[int, Key, Key | None]]:
        """(group, key, parent) of every record that can be found, parents first."""
        return self.index.listed()

    def write(self, ticket: TicketId, group: int, key: Key, parent: Key | None, data: memoryview) -> None:
        """data must stay as it is until the ticket ends."""
        reason = self.writer.refusal(len(data))
        if reason is None and len(self.writer.waiting) >= self.plan.max_writes:
            reason = "busy"
        if reason is not None:
            self.counts.refused[reason] += 1
            self.finish([ticket], reason)
            return
        above = None if parent is None else name_of(group, parent)
        self.writer.add(Write([ticket], name_of(group, key), above, data, len(data), 0, self.generation))

    def read(self, ticket: TicketId, group: int, key: Key, into: memoryview) -> None:
        """Fill `into`, whose length must be the block's. Its content is undefined if the ticket fails."""
        self._reads.append((ticket, name_of(group, key), into))

    def delete(self, group: int, keys: Sequence[Key]) -> None:
        """Forget these blocks and what hangs on them. Their space comes back with their segments; a restart may find
        those that no checkpoint left out."""
        for key in keys:
            self.drop(name_of(group, key))

    def clear(self) -> None:
        """Forget everything, and remove the segments of this fingerprint."""
        self.generation += 1
        self._tell((), [*self.index.records])
        self.counts.dropped += len(self.index)
        self.index.clear()
        self._scans = {file: scan for file, scan in self._scans.items() if not scan.name.sealed}
        self.writer.clear()
        try:
            for file in self.disk.names():
                name = parse_name(file)
                if name is not None and name.sealed and name.fingerprint == short(self.plan.fingerprint):
                    self.forget_segment(name)
                    self.disk.remove(file)
            self._remove_checkpoint()
        except OSError as problem:
            self._count_fault("clear", problem)

    @property
    def num_waiting(self) -> int:
        """Reads and writes that have not ended."""
        return len(self._reads) + len(self._in_flight) + len(self.writer.waiting)

    @property
    def busy(self) -> bool:
        return bool(self._reads or self._in_flight or self._scans or self.writer.busy)

    def step(self, timeout_s: float) -> None:
        """Start what can be started, take what has ended; wait for it at most timeout_s. Answers lie in `events`."""
        now = self.clock.now()
        if now >= self._rescan_at:
            self._rescan_at = now + self.plan.rescan_s
            self._rescan()
        if not self._in_flight:
            self._idle_since = now
        self._fail_if_stalled(now)
        room = self.plan.depth - len(self._in_flight)
        ops: list[DiskOp] = []
        self._start_reads(ops, room)
        self._start_scans(ops, room)
        if ops:
            self.disk.submit(ops)  # before the writer renames and removes files that they name
        writes: list[DiskOp] = []
        self.writer.start(writes, room - len(ops))
        if writes:
            self.disk.submit(writes)
        if self.events or self._ended:
            timeout_s = 0.0
        retry_s = self.writer.retry_in_s
        if retry_s is not None:
            timeout_s = min(timeout_s, retry_s)
        for op_id, result in self.disk.poll(1, timeout_s):
            self._in_flight.pop(op_id).ended(result)
        self._tell_results()
        if self.writer.sealed_bytes >= max(_CHECKPOINT_EVERY, 16 * checkpoint.RECORD_BYTES * len(self.index)):
            self.save_checkpoint()

    def close(self) -> bool:
        """Finish what is in flight, seal, write the checkpoint. False: the disk does not answer, and was left as it
        is; then its buffers must not be freed."""
        self.writer.fail_waiting("closed")
        for ticket, _, _ in self._reads:
            self.finish([ticket], "closed")
        self._reads.clear()
        self._scans.clear()
        end = self.clock.now() + _CLOSE_S
        while self._in_flight and self.clock.now() < end:
            for op_id, result in self.disk.poll(1, 0.1):
                self._in_flight.pop(op_id).ended(result)
        if self._in_flight:
            return False
        self.writer.close()
        self._tell_results()
        if not self.disk.read_only:
            self.save_checkpoint()
            try:
                if self.disk.lock(lock_name(self._writer_id)):
                    self.disk.unlock(lock_name(self._writer_id), remove=True)
            except OSError as problem:
                self._count_fault("close", problem)
        self.disk.close()
        return True

    def save_checkpoint(self) -> None:
        """Write the index of sealed segments."""
        self.writer.sealed_bytes = 0
        sealed = [segment for segment in self._segments.values() if segment.name.sealed]
        places = {segment.id: place for place, segment in enumerate(sealed)}
        records = [
            (name, record._replace(segment=places[record.segment]))
            for name, record in self.index.records.items()
            if record.segment in places
        ]
        files = [(segment.name.file, segment.num_bytes) for segment in sealed]
        left_out = len(records) < len(self.index)
        waiting = self.index.waiting
        if left_out:
            # what hangs on a record of an open segment waits until that is found again
            kept = RecordIndex(self.plan.standalone)
            for name, record in records:
                kept.add(name, record)
            waiting = kept.waiting
        try:
            data = checkpoint.encode(self.plan.fingerprint, files, records, waiting)
            self.disk.put(checkpoint_name(self.plan.fingerprint), data)
        except OSError as problem:
            self._count_fault("checkpoint", problem)

    # ---- what the writer asks --------------------------------------------------------------------------------------

    def transfer(self, ended: Ended, write: bool, file: str, position: int, buffers: tuple[memoryview, ...]) -> DiskOp:
        """An op that is told to `ended` when it is done."""
        self._next_op += 1
        self._in_flight[self._next_op] = Transfer(ended, self.clock.now())
        return DiskOp(self._next_op, write, file, position, buffers)

    def finish(self, tickets: Sequence[TicketId], error: str | None) -> None:
        self._ended.extend((ticket, error) for ticket in tickets)

    def list_record(self, name: Name, record: Record, told: bool = False) -> None:
        """A record that can be read from now on. told: its ticket says so."""
        listed = self.index.add(name, record)
        if not self._opening:
            self._tell([link for link in listed if not told or link != name], ())

    def drop(self, name: Name) -> None:
        """Forget a record and what hangs on it."""
        gone = self.index.drop(name)
        self.counts.dropped += len(gone)
        self._tell((), gone)

    def lies_in(self, name: Name, segment: Segment) -> bool:
        record = self.index.records.get(name)
        return record is not None and record.segment == segment.id

    def add_segment(self, name: SegmentName, num_bytes: int, room: int = 0) -> Segment:
        segment = Segment(self._next_segment, name, num_bytes, room)
        self._next_segment += 1
        self._segments[segment.id] = self._by_file[name.file] = segment
        return segment

    def find_segment(self, name: SegmentName) -> Segment | None:
        return self._by_file.get(name.file)

    def rename_segment(self, segment: Segment, name: SegmentName) -> None:
        del self._by_file[segment.name.file]
        segment.name = name
        self._by_file[name.file] = segment

    def forget_segment(self, name: SegmentName, copied: bool = False) -> None:
        """Its records can no longer be read; they are dropped. copied: by somebody else's doing, who may have copied
        some forward."""
        self._ignored.discard(name.file)
        self._scans.pop(name.file, None)
        segment = self._by_file.pop(name.file, None)
        if segment is None:
            return
        there = [record for record in dict.fromkeys(segment.records) if self.lies_in(record, segment)]
        if copied:
            self._tell((), self.index.lose(there))
            self.counts.dropped += len(there)
        else:
            for record in there:
                if self.lies_in(record, segment):
                    self.drop(record)
        del self._segments[segment.id]

    def is_scanning(self, file: str) -> bool:
        return file in self._scans

    # ---- reads -----------------------------------------------------------------------------------------------------

    def _start_reads(self, ops: list[DiskOp], max_ops: int) -> None:
        while self._reads and len(ops) < max_ops:
            ticket, name, into = self._reads.popleft()
            record = self.index.records.get(name)
            if record is None:
                self.counts.absent += 1
                self.finish([ticket], "absent")
            elif record.num_bytes != len(into):
                self._miss(ticket, name, record, "length")
            else:
                ops.append(self._read_op(ticket, name, record, into))

    def _read_op(self, ticket: TicketId, name: Name, record: Record, into: memoryview) -> DiskOp:
        parts = self.framing.to_read(record, into)

        def ended(result: int) -> None:
            wrong = self.framing.check(name, record, parts, result) or self.framing.deliver(record, parts, into)
            self.framing.release(parts)
            if wrong is not None:
                self._miss(ticket, name, record, wrong)
                return
            if self.index.records.get(name) is record:
                self.index.hit.add(name)
            self.counts.reads += 1
            self.counts.bytes_read += record.num_bytes
            self.finish([ticket], None)

        file = self._segments[record.segment].name.file
        return self.transfer(ended, False, file, record.position, parts.buffers)

    def _miss(self, ticket: TicketId, name: Name, record: Record, wrong: str) -> None:
        """A record that is not what it should be: it is not asked again."""
        self.counts.faults[wrong] += 1
        if self.index.records.get(name) is record:
            self.drop(name)
        self.finish([ticket], wrong)

    def _fail_if_stalled(self, now: float) -> None:
        """What is in flight may still be written to; what waits behind it need not wait for ever."""
        if not self._in_flight or now - next(iter(self._in_flight.values())).started_s < self.plan.stall_s:
            return
        self.counts.faults["stalled"] += len(self._reads) + len(self.writer.waiting)
        for ticket, _, _ in self._reads:
            self.finish([ticket], "stalled")
        self._reads.clear()
        self.writer.fail_waiting("stalled")

    def _tell(self, added: Sequence[Name], removed: Sequence[Name]) -> None:
        if not (added or removed):
            return
        self._tell_results()  # news of a record come behind the ticket that wrote it
        records = self.index.records
        came = []
        for name in added:
            parent = records[name].parent
            came.append((group_of(name), name[4:], None if parent is None else parent[4:]))
        went = tuple((group_of(name), name[4:]) for name in removed)
        self.events.append(Presence("disk", "", tuple(came), went))

    def _tell_results(self) -> None:
        """Of what ended together, each ticket has its share of the time."""
        if not self._ended:
            return
        now = self.clock.now()
        share = max(now - self._idle_since, 0.0) / len(self._ended)
        self._idle_since = now
        self.events += [TicketResult(ticket, error is None, error, share) for ticket, error in self._ended]
        self._ended.clear()

    # ---- the folder ------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """What was sealed, and what writers that are gone left behind."""
        if not self.disk.read_only:
            try:
                self.disk.lock(lock_name(self._writer_id))
            except OSError as problem:
                self.writer.fault(problem.errno or errno.EIO)
        self._load_checkpoint()
        self._rescan()
        self._rescan_at = self.clock.now() + self.plan.rescan_s
        while self._scans:
            ops: list[DiskOp] = []
            self._start_scans(ops, self.plan.depth - len(self._in_flight))
            if ops:
                self.disk.submit(ops)
            for op_id, result in self.disk.poll(1, 0.1) if self._in_flight else ():
                self._in_flight.pop(op_id).ended(result)
        self.events.clear()

    def _load_checkpoint(self) -> None:
        file = checkpoint_name(self.plan.fingerprint)
        try:
            sizes = self.disk.names()
            if file not in sizes:
                return
            found = checkpoint.decode(self.disk.get(file), self.plan.fingerprint)
        except OSError as problem:
            self._count_fault("checkpoint", problem)
            return
        if isinstance(found, str):
            self.counts.faults[f"checkpoint {found}"] += 1
            return
        lost: set[int] = set()
        for place, (segment_file, num_bytes) in enumerate(found.segments):
            name = parse_name(segment_file)
            segment = self.add_segment(name or SegmentName(0, "", f"gone{place}", True), num_bytes)
            if name is None or sizes.get(segment_file) != num_bytes:
                lost.add(segment.id)
        self.index.load(found.records, found.waiting)
        lists = [segment.records for segment in self._segments.values()]
        if not all(record[0] < len(lists) for record in found.records.values()):
            self.index.clear()  # a checksum that fits is no proof of sense
            lost = set(self._segments)
        else:
            for record_name, record in found.records.items():
                lists[record[0]].append(record_name)
        for number in lost:
            self.forget_segment(self._segments[number].name, copied=True)
        self.counts.dropped = 0

    def _rescan(self) -> None:
        """Take notice of segments that came and went without us."""
        try:
            sizes = self.disk.names()
        except OSError as problem:
            self._count_fault("folder", problem)
            return
        mine = short(self.plan.fingerprint)
        for file in [file for file in self._by_file if file not in sizes]:
            if self._by_file[file].name.sealed:
                self.forget_segment(self._by_file[file].name, copied=True)
        self._ignored &= sizes.keys()
        writers: dict[str, bool] = {}
        for file in sorted(sizes):
            name = parse_name(file)
            if name is None or file in self._by_file or file in self._scans or file in self._ignored:
                continue
            if name.sealed:
                if name.fingerprint == mine:
                    self._scans[file] = Scan(name, file, sizes[file], self._pages)
            elif name.writer != self._writer_id and self._is_gone(name.writer, writers):
                self._scans[file] = Scan(name, file, sizes[file], self._pages)
        self._release_gone(writers)

    def _is_gone(self, writer: str, known: dict[str, bool]) -> bool:
        """Whether a writer ended without sealing its segments; then its lock is ours until they are."""
        if writer not in known:
            try:
                known[writer] = not self.disk.read_only and self.disk.lock(lock_name(writer))
            except OSError as problem:
                self._count_fault("folder", problem)
                known[writer] = False
        return known[writer]

    def _release_gone(self, writers: dict[str, bool]) -> None:
        """Writers that left open segments are released when these are sealed; the locks of others that are gone, too,
        would stay for ever, and are removed here."""
        pending = {scan.name.writer for scan in self._scans.values() if not scan.name.sealed}
        for writer, gone in writers.items():
            if gone and writer not in pending:
                self.disk.unlock(lock_name(writer), remove=True)

    def _start_scans(self, ops: list[DiskOp], max_ops: int) -> None:
        for scan in list(self._scans.values())[:_SCANS]:
            if scan.done:
                self._end_scan(scan)
                continue
            for position, page in scan.wanted(max_ops - len(ops)):

                def ended(result: int, scan: Scan = scan, position: int = position, page: memoryview = page) -> None:
                    scan.give(position, page, result)

                ops.append(self.transfer(ended, False, scan.file, position, (page,)))

    def _end_scan(self, scan: Scan) -> None:
        del self._scans[scan.file]
        name, num_bytes = scan.name, scan.num_bytes
        if scan.fault is not None and (name.sealed or scan.fault not in ("magic", "length")):
            self.counts.faults[scan.fault] += 1
        if scan.end < num_bytes:
            self.counts.cuts += 1
        if not name.sealed:
            sealed = self._seal_left(scan)
            if sealed is None:
                return
            name, num_bytes = sealed, scan.end
        if name.fingerprint != short(self.plan.fingerprint):
            return
        segment: Segment | None = None
        for header in scan.headers:
            if header.fingerprint != self.plan.fingerprint:
                self.counts.faults["fingerprint"] += 1
                continue
            if segment is None:
                segment = self.add_segment(name, num_bytes)
            self._adopt(segment, header)
        if segment is None:
            self._ignored.add(name.file)

    def _adopt(self, segment: Segment, header: RecordHeader) -> None:
        """A record that was found in a segment. The newest copy counts: an older one may soon be reclaimed."""
        name = name_of(header.group, header.key)
        parent = None if header.parent is None else name_of(header.group, header.parent)
        record = Record(
            segment.id, header.position, header.stored_bytes, header.num_bytes, header.flags & ~FIRST, parent
        )
        segment.records.append(name)
        there = self.index.records.get(name)
        if there is None:
            self.list_record(name, record)
        elif there.parent == parent and self._segments[there.segment].name.number < segment.name.number:
            hit = name in self.index.hit
            self.index.move(name, record)
            if hit:
                self.index.hit.add(name)

    def _seal_left(self, scan: Scan) -> SegmentName | None:
        """Seal what a writer that is gone left open."""
        name = scan.name._replace(sealed=True)
        lock = lock_name(scan.name.writer)
        try:
            if scan.headers:
                self.disk.seal(scan.file, name.file, scan.end)
            else:
                self.disk.remove(scan.file)
            if not any(s.name.writer == scan.name.writer and not s.name.sealed for s in self._scans.values()):
                self.disk.unlock(lock, remove=True)
        except OSError as problem:
            self._count_fault("recovery", problem)
            return None
        return name if scan.headers else None

    def _remove_checkpoint(self) -> None:
        file = checkpoint_name(self.plan.fingerprint)
        if file in self.disk.names():
            self.disk.remove(file)

    def _count_fault(self, what: str, problem: OSError) -> None:
        name = errno.errorcode.get(problem.errno or 0, "EIO")
        self.counts.faults[f"{what} {name}"] += 1
        if not self._told_error:
            self._told_error = True
            logger.warning("disk tier: %s failed (%s); blocks that cannot be read are computed again", what, problem)
