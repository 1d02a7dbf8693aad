"""Copies between the host tier and the disk store, on a thread of their own.

    submit ──▶ writes (bounded: what is too much is dropped) ┐
               reads  (never dropped, go first)              ┴▶ DiskStore, non-blocking ──▶ EventQueue

The store is used by this one thread only. Source and target in the host buffer stay pinned until the ticket ends,
however long the disk takes: a transfer that hangs keeps its slot and nothing else.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from lamella.kvtier.data.host_buffer import HostBuffer
from lamella.kvtier.data.queue import EventQueue
from lamella.kvtier.jobs import CopyJob, Presence, TicketId, TicketResult, TierEvent
from lamella.kvtier.keys import Key

logger = logging.getLogger("lamella.kvtier")

CONTENT_CHUNK = 4096
"""Records told in one Presence: the reader must not be busy with them for long."""
LOOK_S = 0.001
"""How long the store may be waited for before the queue is looked at again."""

IDLE_S = 0.25
"""How often an idle store is asked what other processes wrote."""


class BlockStore(Protocol):
    """What a disk store is to the mover: `lamella.kvtier.data.disk.DiskStore`."""

    @property
    def engine_name(self) -> str: ...
    def content(self) -> Iterator[tuple[int, Key, Key | None]]: ...
    def write(self, ticket: TicketId, group: int, key: Key, parent: Key | None, data: memoryview) -> None: ...
    def read(self, ticket: TicketId, group: int, key: Key, into: memoryview) -> None: ...
    def clear(self) -> None: ...
    def poll(self) -> Sequence[TicketResult | Presence]: ...
    def wait(self, timeout_s: float) -> bool: ...
    def close(self) -> None: ...
    def stats(self) -> Any: ...


class RecordCodec(Protocol):
    """Another form of blocks on disk, such as `lamella.kvtier.data.fp8.Fp8Codec`."""

    def take(self, group: int) -> int | None: ...
    def give_back(self, group: int, place: int) -> None: ...
    def view(self, group: int, place: int) -> memoryview: ...
    def pack(self, group: int, slot: memoryview, record: memoryview) -> None: ...
    def unpack(self, group: int, record: memoryview, slot: memoryview) -> None: ...


class Running(NamedTuple):
    """A job that the store works at."""

    job: CopyJob
    slot: memoryview
    """Kept here: a store need not hold it."""
    place: int | None
    """Of the codec's: where the record is on its way."""


class DiskMover:
    """host ⇄ disk."""

    def __init__(
        self,
        buffer: HostBuffer,
        store: BlockStore,
        events: EventQueue,
        *,
        max_writes: int = 256,
        codec: RecordCodec | None = None,
    ) -> None:
        """max_writes: how many writes may be queued or running; further ones fail at once. codec: changes the form of
        what is stored; None: bytes as they are in the slots."""
        self._buffer = buffer
        self._store = store
        self._events = events
        self._max_writes = max_writes
        self._changed = threading.Condition()
        self._reads: deque[CopyJob] = deque()
        self._writes: deque[CopyJob] = deque()
        self._clears = 0
        self._codec = codec
        self._running: dict[TicketId, Running] = {}
        self._abandoned: list[Running] = []
        """Transfers that had not ended at close(): their memory stays mapped as long as the mover lives."""
        self._num_writing = 0
        self._closed = False
        self.bytes_in = 0
        """Disk to host, of jobs that ended well."""
        self.bytes_out = 0
        self.num_dropped = 0
        self.num_failed = 0
        self.told = threading.Event()
        """Set once the Presence of all that the store held when it was opened is in the queue."""
        self._thread = threading.Thread(target=self._run, name="kvtier-disk", daemon=True)
        self._thread.start()

    def submit(self, jobs: Sequence[CopyJob]) -> None:
        """Start these copies. A write beyond max_writes, or one after close(), ends as failed at once."""
        refused: list[TicketResult] = []
        with self._changed:
            for job in jobs:
                if self._closed:
                    refused.append(TicketResult(job.ticket, False, "the mover is closed"))
                elif job.source.tier == "disk":
                    self._reads.append(job)
                elif len(self._writes) + self._num_writing >= self._max_writes:
                    self.num_dropped += 1
                    refused.append(TicketResult(job.ticket, False, "queue full"))
                else:
                    self._writes.append(job)
            self._changed.notify_all()
        self._events.put(refused)

    def clear(self) -> None:
        """Nothing that was written so far is found any more; writes that wait are dropped."""
        with self._changed:
            self._clears += 1
            dropped = [TicketResult(job.ticket, False, "cleared") for job in self._writes]
            self._writes.clear()
            self._changed.notify_all()
        self._events.put(dropped)

    @property
    def queue_depth(self) -> int:
        """Jobs that have not ended."""
        return len(self._reads) + len(self._writes) + len(self._running)

    def close(self, timeout_s: float = 5.0) -> None:
        """End the thread and the store. What has not ended by then is told as failed; a disk that hangs is left alone
        after timeout_s."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._end_all("the disk does not answer")

    def stats(self) -> dict[str, Any]:
        """Bytes disk → host in, host → disk out; jobs, drops, failures; and what the store says of itself."""
        return {
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "queue_depth": self.queue_depth,
            "dropped": self.num_dropped,
            "failures": self.num_failed,
            "engine": self._store.engine_name,
            "store": self._store.stats(),
        }

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        error = "the mover is closed"
        try:
            self._tell_content()
            self.told.set()
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or self._has_work() or bool(self._running), IDLE_S)
                    if self._closed:
                        break
                    clears, self._clears = self._clears, 0
                if clears:
                    while self._num_writing and not self._closed:  # or they would outlive the clearing
                        self._store.wait(LOOK_S)
                        self._collect()
                    self._store.clear()
                for queue in (self._reads, self._writes):
                    while self._begin_next(queue):
                        pass
                if self._running:
                    self._store.wait(LOOK_S)
                self._collect()
            self._drain()
        except Exception as problem:
            error = f"the disk store broke: {problem!r}"
            logger.exception("the disk tier is off: its store broke")
        finally:
            self.told.set()
            self._end_all(error)
            self._store.close()

    def _has_work(self) -> bool:
        return bool(self._reads or self._writes or self._clears)

    def _tell_content(self) -> None:
        """What the store held when it was opened."""
        chunk: list[tuple[int, Key, Key | None]] = []
        for record in self._store.content():
            chunk.append(record)
            if len(chunk) == CONTENT_CHUNK:
                self._events.put([Presence("disk", "", tuple(chunk), ())])
                chunk.clear()
            if self._closed:
                return
        if chunk:
            self._events.put([Presence("disk", "", tuple(chunk), ())])

    def _begin_next(self, queue: deque[CopyJob]) -> bool:
        """Hand the oldest job to the store. False: there is none, or no room for it now."""
        with self._changed:
            if not queue:
                return False
            job = queue[0]
            reads = job.source.tier == "disk"
            host = job.target if reads else job.source
            place: int | None = None
            if self._codec is not None:
                place = self._codec.take(host.group)
                if place is None:
                    return False
            queue.popleft()
            if not reads:
                self._num_writing += 1
        try:
            slot = self._buffer.view(host.group, host.slot)
            running = self._running[job.ticket] = Running(job, slot, place)
            record = slot
            if self._codec is not None and place is not None:
                record = self._codec.view(host.group, place)
                if not reads:
                    self._codec.pack(host.group, slot, record)
            if reads:
                self._store.read(job.ticket, host.group, job.key, record)
            else:
                self._store.write(job.ticket, host.group, job.key, job.parent, record)
        except (OSError, ValueError, IndexError) as problem:
            running = self._running.pop(job.ticket, Running(job, memoryview(b""), place))
            self._events.put([self._end(running, TicketResult(job.ticket, False, f"disk: {problem}"))])
        return True

    def _collect(self) -> None:
        told: list[TierEvent] = []
        for event in self._store.poll():
            if isinstance(event, Presence):
                told.append(event)
                continue
            running = self._running.pop(event.ticket, None)
            if running is not None:  # None: it was told as failed already
                told.append(self._end(running, event))
        self._events.put(told)

    def _end(self, running: Running, result: TicketResult) -> TicketResult:
        """Put the books of a job in order; the result as it is to be told."""
        job, slot, place = running
        reads = job.source.tier == "disk"
        group = job.target.group if reads else job.source.group
        if self._codec is not None and place is not None:
            if reads and result.ok:
                self._codec.unpack(group, self._codec.view(group, place), slot)
            self._codec.give_back(group, place)
        self._account(job, result.ok)
        return result

    def _account(self, job: CopyJob, ok: bool) -> None:
        reads = job.source.tier == "disk"
        if not reads:
            self._num_writing -= 1
        if not ok:
            self.num_failed += 1
        elif reads:
            self.bytes_in += job.num_bytes
        else:
            self.bytes_out += job.num_bytes

    def _drain(self) -> None:
        """What runs may still end: its memory is in use until then."""
        end = time.monotonic() + 2.0
        while self._running and time.monotonic() < end:
            self._store.wait(0.05)
            self._collect()

    def _end_all(self, error: str) -> None:
        with self._changed:
            self._closed = True
            left = [*self._reads, *self._writes, *(running.job for running in self._running.values())]
            self._reads.clear()
            self._writes.clear()
            self._abandoned = list(self._running.values())
            self._running.clear()
            self._num_writing = 0
        self.num_failed += len(left)
        self._events.put([TicketResult(job.ticket, False, error) for job in left])
