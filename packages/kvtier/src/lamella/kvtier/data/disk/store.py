"""The disk tier: blocks in the segments of a folder, read and written on a thread of its own.

    store = DiskStore("/data/kv", fingerprint=layout.fingerprint(), capacity_bytes=200 << 30)
    store.write(1, group, key, parent, data)     nothing of these blocks
    store.read(2, group, key, into)              or raises for what a disk may do
    store.wait(0.1); store.poll()                [TicketResult(1, True), TicketResult(2, True)]

Several processes may open one folder at the same time. Files are private to the user; they are not encrypted.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from lamella.kvtier.data.disk.checksum import native
from lamella.kvtier.data.disk.plan import SEGMENT_BYTES, StorePlan
from lamella.kvtier.data.disk.posix_disk import ENGINES, PosixDisk
from lamella.kvtier.data.disk.python_disk import PythonDisk
from lamella.kvtier.data.disk.record_store import RecordStore
from lamella.kvtier.errors import KvTierError
from lamella.kvtier.jobs import Presence, TicketId, TicketResult
from lamella.kvtier.keys import KEY_BYTES, Key
from lamella.kvtier.protocols import Clock, Disk

logger = logging.getLogger("lamella.kvtier")

_IDLE_S = 0.5
_CLOSE_S = 8.0

_warned = False


class MonotonicClock:
    """Satisfies `Clock`."""

    def now(self) -> float:
        return time.monotonic()


def open_disk(folder: str, engine: str = "auto", depth: int = 32) -> Disk:
    """The native disk, or the Python one after one warning. Raises KvTierError for a folder or an engine that cannot
    be used."""
    global _warned
    if engine not in ENGINES:
        raise KvTierError(f"engine {engine!r} is not known; known: {', '.join(ENGINES)}")
    if native is not None and engine != "python":
        return PosixDisk(folder, engine, depth)
    if engine == "io_uring":
        raise KvTierError("engine io_uring needs the native module; take auto")
    if native is None and not _warned:
        _warned = True
        warnings.warn(
            "lamella.kvtier was built without its native module: the disk tier runs in Python, with the same records "
            "and fewer bytes per second",
            RuntimeWarning,
            stacklevel=3,
        )
    return PythonDisk(folder, depth)


class DiskStore:
    """Methods are safe from any thread and never wait for the disk, but wait() and close()."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        fingerprint: bytes,
        capacity_bytes: int,
        engine: str = "auto",
        depth: int = 32,
        segment_bytes: int = SEGMENT_BYTES,
        max_writes: int = 1024,
        standalone: Collection[int] = (),
        compress: str = "none",
        rescan_s: float = 1.0,
        stall_s: float = 10.0,
        clock: Clock | None = None,
        disk: Disk | None = None,
    ) -> None:
        """Opens the folder, made with mode 0700 if it is not there, and reads what it holds.

        standalone: groups whose blocks are of use without the one before (sliding windows, states). compress: "none"
        or "zstd". disk: another one than the folder. Raises KvTierError for what the user can mend.
        """
        if compress not in ("none", "zstd"):
            raise KvTierError(f"compress={compress} is not known; take none or zstd")
        plan = StorePlan(
            fingerprint,
            capacity_bytes,
            segment_bytes,
            depth,
            max_writes=max_writes,
            standalone=frozenset(standalone),
            compress=compress == "zstd",
            rescan_s=rescan_s,
            stall_s=stall_s,
        )
        self.folder = os.fspath(folder)
        self._disk = open_disk(self.folder, engine, depth) if disk is None else disk
        try:
            self._store = RecordStore(self._disk, clock or MonotonicClock(), plan, os.urandom(4).hex())
        except BaseException:
            self._disk.close()
            raise
        self.engine_name = self._disk.engine_name
        if self._disk.read_only:
            logger.warning("disk tier: the folder %s cannot be written to; what it holds is read", self.folder)
        self._commands: deque[tuple[Any, ...]] = deque()
        self._num_writes = 0
        """Commands that are writes and have not reached the store."""
        self._events: list[TicketResult | Presence] = list(self._store.events)
        self._store.events.clear()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvtier-disk-store", daemon=True)
        self._thread.start()

    def content(self) -> Iterator[tuple[int, Key, Key | None]]:
        """(group, key, parent) of every record that can be found, parents first: as it is when it is asked."""
        answer = threading.Event()
        found: list[tuple[int, Key, Key | None]] = []
        if self._send(("content", found, answer)):
            while not answer.wait(0.1):
                if not self._thread.is_alive():
                    break
        return iter(found)

    def write(self, ticket: TicketId, group: int, key: Key, parent: Key | None, data: memoryview) -> None:
        """Keep a block. parent: key of the block before it, None for a sequence's first. data must stay as it is until
        the ticket ends. The ticket fails with "busy" if too many writes wait, and at once while writing is off."""
        self._check(key, parent)
        block = memoryview(data).cast("B")
        reason = self._store.writer.refusal(len(block))
        if reason is None and self._num_writes + len(self._store.writer.waiting) >= self._store.plan.max_writes:
            reason = "busy"
        if reason is not None:
            with self._changed:
                self._store.counts.refused[reason] += 1
                self._events.append(TicketResult(ticket, False, reason))
                self._changed.notify_all()
            return
        self._send(("write", ticket, group, key, parent, block))

    def read(self, ticket: TicketId, group: int, key: Key, into: memoryview) -> None:
        """Fill `into`, whose length must be the block's, and which is undefined if the ticket fails."""
        self._check(key, None)
        self._send(("read", ticket, group, key, memoryview(into).cast("B")))

    def delete(self, group: int, keys: Sequence[Key]) -> None:
        """Forget these blocks and what hangs on them; a restart may find them again."""
        self._send(("delete", group, tuple(keys)))

    def clear(self) -> None:
        """Forget all blocks and remove their files; what other processes write from now on is found."""
        self._send(("clear",))

    def poll(self) -> list[TicketResult | Presence]:
        """What ended or changed since the last call."""
        with self._changed:
            events, self._events = self._events, []
        return events

    def wait(self, timeout_s: float) -> bool:
        """Whether poll() has something to say, after at most timeout_s."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._events), timeout_s)

    def close(self) -> None:
        """End what is in flight, seal the segment, write the checkpoint. Tickets that are still open fail. A disk that
        does not answer is left alone after some seconds."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
        self._disk.wake()
        self._thread.join(_CLOSE_S)

    def stats(self) -> dict[str, Any]:
        """Counts since the store was opened, and what it holds."""
        store = self._store
        counts = asdict(store.counts)
        counts["faults"], counts["refused"] = dict(store.counts.faults), dict(store.counts.refused)
        return {
            **counts,
            "num_blocks": len(store.index) - len(store.index.waiting),
            "num_waiting_blocks": len(store.index.waiting),
            "capacity_bytes": store.plan.capacity_bytes,
            "queue_depth": store.num_waiting + len(self._commands),
            "engine": self.engine_name,
        }

    def _check(self, key: Key, parent: Key | None) -> None:
        for name in (key, parent):
            if name is not None and len(name) != KEY_BYTES:
                raise ValueError(f"a key has {KEY_BYTES} bytes, got {len(name)}")

    def _send(self, command: tuple[Any, ...]) -> bool:
        with self._changed:
            if self._closing:
                if command[0] in ("read", "write"):
                    self._events.append(TicketResult(command[1], False, "closed"))
                    self._changed.notify_all()
                return False
            first = not self._commands
            self._commands.append(command)
            self._num_writes += command[0] == "write"
        if first:  # else the thread has not come to the last one yet
            self._disk.wake()
        return True

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        error = "closed"
        try:
            while not self._closing:
                self._obey()
                self._store.step(_IDLE_S if not self._commands else 0.0)
                self._publish()
            self._obey()
            self._store.close()
        except Exception as problem:
            logger.exception("the disk tier is off: its store broke")
            error = f"the disk store broke: {problem!r}"
        with self._changed:
            self._closing = True
            for command in self._commands:
                if command[0] in ("read", "write"):
                    self._events.append(TicketResult(command[1], False, error))
            self._commands.clear()
        self._publish()

    def _obey(self) -> None:
        while self._commands:
            with self._changed:
                name, *arguments = self._commands.popleft()
                self._num_writes -= name == "write"
            if name == "content":
                found, answer = arguments
                found.extend(self._store.content())
                answer.set()
            else:
                getattr(self._store, name)(*arguments)

    def _publish(self) -> None:
        if self._store.events:
            with self._changed:
                self._events += self._store.events
                self._store.events.clear()
                self._changed.notify_all()
