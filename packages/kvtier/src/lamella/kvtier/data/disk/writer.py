"""The writing half of a store: one open segment, batches of records at its end, room made before it is needed.

    waiting writes ──▶ [ batch in flight ][ batch in flight ]──▶ indexed, ticket ok
                       open segment                             never indexed before the batch has completed

A failed write ends its segment, and writing stops for a while: reads go on. Space is kept by reclaiming the oldest
segment of the folder while the newest is being filled.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from lamella.kvtier.data.disk import checkpoint
from lamella.kvtier.data.disk.counts import StoreCounts
from lamella.kvtier.data.disk.header import MOVED, ZSTD, record_bytes
from lamella.kvtier.data.disk.index import Name, Record, RecordIndex
from lamella.kvtier.data.disk.plan import StorePlan
from lamella.kvtier.data.disk.reclaim import survivors
from lamella.kvtier.data.disk.segment import FOLDER_LOCK, Segment, SegmentName, lock_name, parse_name, short
from lamella.kvtier.data.disk.transfers import Ended, Framing, Parts
from lamella.kvtier.jobs import TicketId
from lamella.kvtier.protocols import Clock, Disk, DiskOp

logger = logging.getLogger("lamella.kvtier")

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_MAX_BACK_OFF_S = 60.0
_MAX_BATCH = 256
"""Records: a system call takes at most 1024 parts."""
_BUSY_S = 0.01
"""Until the folder's lock is tried again."""


class Write(NamedTuple):
    """A block that is to be written."""

    tickets: list[TicketId]
    """More than one: the same block was given again meanwhile."""
    name: Name
    parent: Name | None
    data: memoryview
    num_bytes: int
    flags: int
    generation: int
    source: Record | None = None
    """Copied forward: where it lay."""
    parts: Parts | None = None
    """Copied forward: the memory that holds it."""


class Books(Protocol):
    """What the writer needs of the store that owns it."""

    disk: Disk
    clock: Clock
    plan: StorePlan
    counts: StoreCounts
    index: RecordIndex
    framing: Framing
    generation: int

    def transfer(
        self, ended: Ended, write: bool, file: str, position: int, buffers: tuple[memoryview, ...]
    ) -> DiskOp: ...
    def finish(self, tickets: Sequence[TicketId], error: str | None) -> None: ...
    def list_record(self, name: Name, record: Record, told: bool = False) -> None: ...
    def drop(self, name: Name) -> None: ...
    def lies_in(self, name: Name, segment: Segment) -> bool: ...
    def add_segment(self, name: SegmentName, num_bytes: int, room: int = 0) -> Segment: ...
    def find_segment(self, name: SegmentName) -> Segment | None: ...
    def rename_segment(self, segment: Segment, name: SegmentName) -> None: ...
    def forget_segment(self, name: SegmentName, copied: bool = False) -> None: ...
    def is_scanning(self, file: str) -> bool: ...


class SegmentWriter:
    """Owned by a RecordStore and used on its thread."""

    def __init__(self, store: Books, writer: str) -> None:
        self._store = store
        self._writer = writer
        self.waiting: deque[Write] = deque()
        self._moves: deque[Write] = deque()
        self._current: Segment | None = None
        self._sealing: list[Segment] = []
        self._by_name: dict[Name, Write] = {}
        """Waiting or in flight, of this generation."""
        self._bytes_in_flight = 0
        self._in_order: dict[int, deque[list[Any]]] = {}
        """Per segment [segment, batch, bytes, result or None] of batches in flight or waiting for earlier ones."""
        self._off_until_s = 0.0
        self._off_reason = ""
        self._told = False
        """Whether the log has this outage."""
        self._back_off_s = store.plan.retry_s
        self._retry_s = 0.0
        self._holds_folder = False
        self._victim: SegmentName | None = None
        self._to_move: deque[tuple[Name, Record]] = deque()
        self._moving = 0
        self._moving_bytes = 0
        self.sealed_bytes = 0
        """Since the last checkpoint."""

    @property
    def busy(self) -> bool:
        """Whether something will happen by itself."""
        return bool(self.waiting or self._by_name or self._moves or self._to_move or self._moving or self._sealing)

    @property
    def reclaiming(self) -> bool:
        return self._victim is not None

    @property
    def retry_in_s(self) -> float | None:
        """When waiting writes should be tried again; None: nothing waits for time."""
        if not (self.waiting or self._moves):
            return None
        return max(self._retry_s - self._store.clock.now(), 0.0) if self._retry_s else None

    def refusal(self, num_bytes: int) -> str | None:
        """Why a write is not taken; None: it may wait here. Called from any thread."""
        store = self._store
        if store.disk.read_only:
            return "read-only"
        if record_bytes(num_bytes) > store.plan.segment_bytes:
            return "too large"
        if store.clock.now() < self._off_until_s:
            return self._off_reason
        return None

    def add(self, write: Write) -> None:
        """Queue a block, or answer at once if it is there or under way."""
        known = self._by_name.get(write.name)
        if known is not None:
            known.tickets.extend(write.tickets)
            return
        there = self._store.index.records.get(write.name)
        if there is not None and there.num_bytes == write.num_bytes:
            self._store.counts.duplicates += 1
            self._store.finish(write.tickets, None)
            return
        self._by_name[write.name] = write
        self.waiting.append(write)

    def fail_waiting(self, reason: str) -> None:
        for write in self.waiting:
            self._by_name.pop(write.name, None)
            self._refuse(write, reason)
        self.waiting.clear()

    # ---- every step ------------------------------------------------------------------------------------------------

    def start(self, ops: list[DiskOp], max_ops: int) -> None:
        """Append what can be started now."""
        self._seal_full()
        store = self._store
        if store.clock.now() < self._off_until_s:
            self.fail_waiting(self._off_reason)
        self._start_moves(ops, max_ops)
        while (self._moves or self.waiting) and len(ops) < max_ops:
            if self._bytes_in_flight and self._bytes_in_flight >= store.plan.writing_bytes:
                return
            segment = self._segment()
            if segment is None or not self._start_batch(segment, ops):
                return

    def _start_batch(self, segment: Segment, ops: list[DiskOp]) -> bool:
        """One batch at the segment's end. False: it takes none, now or any more."""
        store = self._store
        buffers: list[memoryview] = []
        batch: list[tuple[Write, int, int, int, Parts]] = []  # (write, position, stored bytes, flags, parts)
        start = position = segment.num_bytes
        while len(batch) < _MAX_BATCH and position - start < store.plan.batch_bytes:
            queue = self._moves or self.waiting
            if not queue:
                break
            write = queue[0]
            room = segment.room - position
            if write.source is None:
                room -= self._moving_bytes
            if record_bytes(len(write.data)) > room:
                if not self._moving_bytes or write.source is not None:
                    segment.full = True
                break
            queue.popleft()
            if write.source is None:
                stored, flags = store.framing.pack(write.data)
            else:
                stored, flags = write.data, write.flags & (ZSTD | MOVED)
            parts = store.framing.to_write(write.name, write.parent, position, stored, write.num_bytes, flags)
            batch.append((write, position, len(stored), flags, parts))
            buffers += parts.buffers
            position += record_bytes(len(stored))
        if not batch:
            self._seal_full()
            return segment.full and self._current is None
        segment.num_bytes = position
        segment.num_writing += 1
        self._bytes_in_flight += position - start

        in_order = self._in_order.setdefault(segment.id, deque())
        place = [segment, batch, position - start, None]
        in_order.append(place)

        def ended(result: int) -> None:
            place[3] = result
            # told in the order of the file: behind a hole, a scan after a crash would find nothing
            while in_order and in_order[0][3] is not None:
                self._end_batch(*in_order.popleft())

        ops.append(store.transfer(ended, True, segment.name.file, start, tuple(buffers)))
        return True

    def _end_batch(
        self, segment: Segment, batch: list[tuple[Write, int, int, int, Parts]], num_bytes: int, result: int
    ) -> None:
        segment.num_writing -= 1
        self._bytes_in_flight -= num_bytes
        ok = result == num_bytes
        for write, position, stored_bytes, flags, parts in batch:
            self._store.framing.release(parts)
            record = Record(segment.id, position, stored_bytes, write.num_bytes, flags, write.parent)
            if write.source is not None:
                self._end_move(write, record, segment, ok)
            else:
                self._end_write(write, record, segment, ok)
        if not ok:
            segment.full = True
            self.fault(-result if result < 0 else errno.ENOSPC)
        else:
            self._written_again()

    def _end_write(self, write: Write, record: Record, segment: Segment, ok: bool) -> None:
        store = self._store
        if write.generation != store.generation:
            store.finish(write.tickets, "cleared")
            return
        del self._by_name[write.name]
        if not ok:
            self._refuse(write, "failed")
            return
        if write.name in store.index:
            store.drop(write.name)  # of another length
        store.counts.writes += 1
        store.counts.bytes_written += write.num_bytes
        segment.records.append(write.name)
        store.list_record(write.name, record, told=True)
        store.finish(write.tickets, None)

    def _refuse(self, write: Write, reason: str) -> None:
        self._store.counts.refused[reason] += len(write.tickets)
        self._store.finish(write.tickets, reason)

    # ---- segments --------------------------------------------------------------------------------------------------

    def _segment(self) -> Segment | None:
        """The segment to append to, made if there is none; None: not now."""
        if self._current is not None:
            return self._current
        store = self._store
        now = store.clock.now()
        if self._victim is not None:
            if not (self._to_move or self._moving or self._moves):
                return None
            self._abandon_reclaim()  # the segment that was to take the survivors has failed
        if now < self._retry_s or now < self._off_until_s:
            return None
        try:
            if not store.disk.lock(lock_name(self._writer)) or not store.disk.lock(FOLDER_LOCK):
                self._retry_s = now + _BUSY_S
                return None
            self._retry_s = 0.0
            self._holds_folder = True
            try:
                return self._make_segment()
            finally:
                if self._victim is None:
                    self._unlock_folder()
        except OSError as problem:
            self.fault(problem.errno or errno.EIO)
            return None

    def _make_segment(self) -> Segment | None:
        store = self._store
        room = store.plan.segment_bytes
        sizes = store.disk.names()
        oldest = self._oldest_first(sizes)
        # the next checkpoint lies beside the last one for a moment
        limit = store.plan.capacity_bytes - checkpoint.RECORD_BYTES * (len(store.index) + 1) - (64 << 10)
        used = sum(sizes.values())
        while used + room > limit:
            if not oldest:
                self._switch_off("full", quiet=True)
                return None
            victim = oldest.pop(0)
            store.forget_segment(victim)
            store.disk.remove(victim.file)
            store.counts.reclaimed += 1
            used -= sizes.pop(victim.file)
        numbers = [segment.number for segment in map(parse_name, sizes) if segment is not None]
        name = SegmentName(max([0, *numbers]) + 1, short(store.plan.fingerprint), self._writer, False)
        store.disk.create(name.file, room)
        self._current = store.add_segment(name, 0, room)
        if used + 2 * room > limit and oldest:
            self._begin_reclaim(oldest[0])
        return self._current

    def _oldest_first(self, sizes: dict[str, int]) -> list[SegmentName]:
        """Sealed segments that nothing is done with at the moment."""
        names = [name for name in map(parse_name, sizes) if name is not None and name.sealed]
        return sorted(name for name in names if not self._store.is_scanning(name.file))

    def _seal_full(self) -> None:
        if self._current is not None and self._current.full:
            self._sealing.append(self._current)
            self._current = None
        for segment in [segment for segment in self._sealing if not segment.num_writing]:
            self._sealing.remove(segment)
            self._in_order.pop(segment.id, None)
            self.seal(segment)

    def seal(self, segment: Segment) -> None:
        """Give the segment its final name and length, or remove it if nothing in it is of use."""
        store = self._store
        sealed = segment.name._replace(sealed=True)
        try:
            if not any(store.lies_in(name, segment) for name in segment.records):
                store.forget_segment(segment.name)
                store.disk.remove(segment.name.file)
            else:
                store.disk.seal(segment.name.file, sealed.file, segment.num_bytes)
                store.rename_segment(segment, sealed)
                self.sealed_bytes += segment.num_bytes
        except OSError as problem:
            self.fault(problem.errno or errno.EIO)

    def close(self) -> None:
        """Nothing is in flight any more."""
        if self._victim is not None:
            self._abandon_reclaim()
        if self._current is not None:
            self._current.full = True
        self._seal_full()

    def clear(self) -> None:
        """What waits or is under way does not count any more; the open segment goes."""
        self.fail_waiting("cleared")
        self._by_name.clear()
        if self._victim is not None:
            self._abandon_reclaim()
        if self._current is not None:
            self._current.full = True
        self._seal_full()

    # ---- faults ----------------------------------------------------------------------------------------------------

    def fault(self, error: int) -> None:
        """A write or a change of files failed: no more of them for a while."""
        name = errno.errorcode.get(error, "EIO")
        self._store.counts.faults[f"write {name}"] += 1
        self._switch_off("no space" if error in _NO_SPACE else f"disk error {name}", quiet=False, error=error)
        if self._current is not None:
            self._current.full = True

    def _switch_off(self, reason: str, quiet: bool, error: int = 0) -> None:
        now = self._store.clock.now()
        if now < self._off_until_s:
            return
        if not (quiet or self._told):
            self._told = True
            logger.warning(
                "disk tier: writing is off (%s: %s); reads go on, tried again in %g s and then more rarely",
                reason,
                os.strerror(error),
                self._back_off_s,
            )
        self._off_reason = reason
        self._off_until_s = now + self._back_off_s
        self._back_off_s = min(2 * self._back_off_s, _MAX_BACK_OFF_S)
        self.fail_waiting(reason)

    def _written_again(self) -> None:
        """A write succeeded; one that was in flight when others failed says nothing."""
        if self._store.clock.now() >= self._off_until_s:
            self._back_off_s = self._store.plan.retry_s
            self._told = False

    # ---- reclaim ---------------------------------------------------------------------------------------------------

    def _begin_reclaim(self, victim: SegmentName) -> None:
        self._victim = victim
        store = self._store
        segment = store.find_segment(victim)
        if segment is not None:
            chosen = survivors(segment, store.index, store.plan.segment_bytes // 2)
            self._to_move.extend((name, store.index.records[name]) for name in chosen)
        self._moving_bytes = sum(record_bytes(record.stored_bytes) for _, record in self._to_move)
        if not self._to_move:
            self._end_reclaim()

    def _start_moves(self, ops: list[DiskOp], max_ops: int) -> None:
        """Read survivors; few at a time, they are in no hurry."""
        store = self._store
        while self._to_move and self._victim is not None and self._moving < 4 and len(ops) < max_ops:
            name, record = self._to_move.popleft()
            if store.index.records.get(name) is not record:
                self._moving_bytes -= record_bytes(record.stored_bytes)
                continue
            parts = store.framing.to_read(record, None)
            self._moving += 1
            generation = store.generation

            def ended(
                result: int, name: Name = name, record: Record = record, parts: Parts = parts, gen: int = generation
            ) -> None:
                wrong = store.framing.check(name, record, parts, result)
                if gen != store.generation or self._victim is None:
                    self._drop_move(parts, record)
                elif wrong is not None:
                    store.counts.faults[wrong] += 1
                    if store.index.records.get(name) is record:
                        store.drop(name)
                    self._drop_move(parts, record)
                else:
                    data = parts.buffers[1][: record.stored_bytes]
                    flags = record.flags | MOVED
                    write = Write([], name, record.parent, data, record.num_bytes, flags, gen, record, parts)
                    self._moves.append(write)

            ops.append(store.transfer(ended, False, self._victim.file, record.position, parts.buffers))
        if not (self._to_move or self._moving or self._moves) and self._victim is not None:
            self._end_reclaim()

    def _drop_move(self, parts: Parts, record: Record) -> None:
        self._store.framing.release(parts)
        self._moving -= 1
        self._moving_bytes = max(self._moving_bytes - record_bytes(record.stored_bytes), 0)

    def _end_move(self, write: Write, record: Record, segment: Segment, ok: bool) -> None:
        store = self._store
        assert write.source is not None
        assert write.parts is not None
        self._drop_move(write.parts, write.source)
        if ok and store.index.records.get(write.name) is write.source:
            segment.records.append(write.name)
            store.index.move(write.name, record)
            store.counts.moved += 1

    def _end_reclaim(self) -> None:
        """What was not copied forward goes, and the file with it."""
        victim, self._victim = self._victim, None
        assert victim is not None
        store = self._store
        self._moving_bytes = 0
        store.forget_segment(victim)
        try:
            store.disk.remove(victim.file)
            store.counts.reclaimed += 1
        except FileNotFoundError:
            pass  # another process cleared the folder
        except OSError as problem:
            self.fault(problem.errno or errno.EIO)
        self._unlock_folder()

    def _abandon_reclaim(self) -> None:
        """The segment stays, and what was read of it for copying goes back."""
        self._victim = None
        self._to_move.clear()
        for move in self._moves:
            assert move.parts is not None
            self._store.framing.release(move.parts)
            self._moving -= 1
        self._moves.clear()
        self._moving_bytes = 0
        self._unlock_folder()

    def _unlock_folder(self) -> None:
        if self._holds_folder:
            self._holds_folder = False
            self._store.disk.unlock(FOLDER_LOCK)
