"""What a folder's disk gives, through the store and without it: the same blocks, the same depth, in turns.

The peer is fio where it is installed, else a loop over the bare engine: aligned transfers of whole blocks past the page
cache, without headers, checksums and index. Peers write as a log does, new files in place of old ones: a disk may take
bytes that replace others much faster than it takes new ones (a virtual one absorbs them in its host's memory), and who
compared with that would compare two different things. They read the store's own files. Who comes first changes from
round to round, because a disk that is given a budget is faster at first; and each round has memory of its own, because
where that lies makes a device faster or slower, too.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from lamella.kvtier.data.disk.header import PAGE, record_bytes
from lamella.kvtier.data.disk.plan import SEGMENT_BYTES
from lamella.kvtier.data.disk.store import DiskStore, open_disk
from lamella.kvtier.errors import KvTierError
from lamella.kvtier.jobs import TicketResult
from lamella.kvtier.protocols import Disk, DiskOp

_PROBE_BYTES = 32 << 20
_ROUNDS = 5
_MIN_BLOCKS = 64
_FINGERPRINT = b"lamella measures"


@dataclass(frozen=True, slots=True)
class Speed:
    """Of one direction."""

    bytes_per_s: float
    p50_s: float
    p99_s: float
    """Latency of a block with `depth` of them under way; 0 where the peer does not tell."""


@dataclass(frozen=True, slots=True)
class FolderSpeed:
    engine: str
    block_bytes: int
    depth: int
    write: Speed
    read: Speed
    peer: str
    """"fio", "raw loop" or "none"."""
    peer_write: Speed | None
    peer_read: Speed | None

    @property
    def write_ratio(self) -> float | None:
        return None if self.peer_write is None else self.write.bytes_per_s / self.peer_write.bytes_per_s

    @property
    def read_ratio(self) -> float | None:
        return None if self.peer_read is None else self.read.bytes_per_s / self.peer_read.bytes_per_s


def measure_folder(
    folder: str | os.PathLike[str],
    block_bytes: int = 1 << 20,
    depth: int = 32,
    seconds: float = 4.0,
    raw: bool = True,
    engine: str = "auto",
    max_bytes: int = 1 << 30,
) -> FolderSpeed:
    """seconds: about how long each of the measurements takes. Uses up to twice max_bytes of the folder's disk for that
    time, in a folder of its own. Raises KvTierError for a folder that cannot be used."""
    if block_bytes < 1 or depth < 1:
        raise KvTierError(f"block_bytes {block_bytes} and depth {depth} must be at least 1")
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        place = tempfile.mkdtemp(prefix="measure-", dir=folder)
    except OSError as problem:
        raise KvTierError(f"the folder {os.fspath(folder)} cannot be written to: {problem.strerror}") from problem
    try:
        num_blocks = max(_MIN_BLOCKS, min(max_bytes, shutil.disk_usage(place).free // 4) // record_bytes(block_bytes))
        bench = _StoreBench(os.path.join(place, "store"), block_bytes, depth, num_blocks, engine)
        peer = _peer(place, block_bytes, depth, num_blocks, engine) if raw else None
        try:
            writes: list[Speed] = []
            reads: list[Speed] = []
            peer_writes: list[Speed] = []
            peer_reads: list[Speed] = []
            slot = seconds / _ROUNDS
            sides = [(bench, writes, reads), *([(peer, peer_writes, peer_reads)] if peer is not None else [])]
            for number in range(_ROUNDS):
                memory = _blocks(block_bytes, 2 * depth)
                for side, told, _ in sides if number % 2 else sides[::-1]:
                    told.append(side.write(slot, memory))
            if peer is not None:
                peer.files = bench.files()
            for number in range(_ROUNDS):
                memory = _blocks(block_bytes, 2 * depth)
                for side, _, told in sides if number % 2 else sides[::-1]:
                    told.append(side.read(slot, memory))
            name = bench.engine_name
        finally:
            bench.close()
            if peer is not None:
                peer.close()
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return FolderSpeed(
        name,
        block_bytes,
        depth,
        _middle(writes),
        _middle(reads),
        "none" if peer is None else peer.name,
        _middle(peer_writes) if peer_writes else None,
        _middle(peer_reads) if peer_reads else None,
    )


class Probe(NamedTuple):
    """What reading costs, roughly."""

    bytes_per_s: float
    """With many blocks under way."""
    latency_s: float
    """Of one block alone, beyond what its bytes take at that speed."""


def probe_reads(
    folder: str | os.PathLike[str],
    block_bytes: int,
    depth: int = 32,
    seconds: float = 0.1,
    engine: str = "auto",
    max_bytes: int = _PROBE_BYTES,
) -> Probe | None:
    """What the cost model needs to know of a folder before anything was read from it, within about three times
    `seconds`: some blocks are written to a file of their own and read again, past the page cache. None if the folder
    cannot be written to."""
    num_blocks = max(1, max_bytes // record_bytes(block_bytes))
    try:
        with tempfile.TemporaryDirectory(prefix="measure-", dir=folder) as place:
            loop = _RawLoop(place, block_bytes, min(depth, num_blocks), num_blocks, engine, num_blocks)
            memory = _blocks(block_bytes, min(depth, num_blocks))
            try:
                loop.write(seconds, memory, num_blocks)
                speed = loop.read(seconds, memory)
                alone = loop.read(seconds / 4, memory[:1])
            finally:
                loop.close()
    except (KvTierError, OSError):
        return None
    return Probe(speed.bytes_per_s, max(0.0, alone.p50_s - block_bytes / speed.bytes_per_s))


def _middle(speeds: list[Speed]) -> Speed:
    return Speed(*(median(values) for values in zip(*((s.bytes_per_s, s.p50_s, s.p99_s) for s in speeds))))


def _speed(num_bytes: int, seconds: float, latencies: list[float]) -> Speed:
    ordered = sorted(latencies) or [0.0]
    return Speed(
        num_bytes / seconds, ordered[len(ordered) // 2], ordered[min(len(ordered) * 99 // 100, len(ordered) - 1)]
    )


class _StoreBench:
    def __init__(self, folder: str, block_bytes: int, depth: int, num_blocks: int, engine: str) -> None:
        self._block_bytes = block_bytes
        self._depth = depth
        capacity = max(16 << 20, 2 * num_blocks * record_bytes(block_bytes))
        self._folder = folder
        self._store = DiskStore(folder, fingerprint=_FINGERPRINT, capacity_bytes=capacity, engine=engine, depth=depth)
        self._num_written = 0
        self._max_blocks = num_blocks
        self.engine_name = self._store.engine_name

    def write(self, seconds: float, memory: Sequence[memoryview]) -> Speed:
        def begin(ticket: int, memory: memoryview) -> None:
            self._store.write(ticket, 0, _key(self._num_written), None, memory)
            self._num_written += 1

        speed = self._drive(begin, seconds, memory)
        self.engine_name = self._store.engine_name
        return speed

    def read(self, seconds: float, memory: Sequence[memoryview]) -> Speed:
        rng = random.Random(0)
        first = max(self._num_written - self._max_blocks, 0)

        def begin(ticket: int, memory: memoryview) -> None:
            self._store.read(ticket, 0, _key(rng.randrange(first, self._num_written)), memory)

        return self._drive(begin, seconds, memory[: self._depth])

    def files(self) -> list[str]:
        """The newest sealed ones, as many as read() reads from; all, if that is none."""
        count = max(1, self._max_blocks * record_bytes(self._block_bytes) // SEGMENT_BYTES)
        names = sorted(os.listdir(self._folder))
        sealed = [name for name in names if name.endswith(".kv")][-count:]
        found = sealed or [name for name in names if name.endswith(".open")]
        return [os.path.join(self._folder, name) for name in found]

    def close(self) -> None:
        self._store.close()

    def _drive(self, begin: Callable[[int, memoryview], None], seconds: float, blocks: Sequence[memoryview]) -> Speed:
        """Keep all blocks under way: writes are batched, so more of them are offered than are in flight."""
        free = deque(block[: self._block_bytes] for block in blocks)
        started: dict[int, tuple[float, memoryview]] = {}
        latencies: list[float] = []
        ticket = failed = 0
        begun_s = time.perf_counter()
        while True:
            now = time.perf_counter()
            over = now - begun_s > seconds
            while free and not over:
                memory = free.popleft()
                started[ticket] = (time.perf_counter(), memory)
                begin(ticket, memory)
                ticket += 1
            if not started:
                break
            self._store.wait(1.0)
            now = time.perf_counter()
            for event in self._store.poll():
                if isinstance(event, TicketResult):
                    begun, memory = started.pop(event.ticket)
                    free.append(memory)
                    failed += not event.ok
                    if event.ok:
                        latencies.append(now - begun)
            if now - begun_s > seconds + 60:
                raise KvTierError("the disk does not answer")
        if failed > ticket // 10:
            raise KvTierError(f"{failed} of {ticket} blocks failed: {self._store.stats()['refused']}")
        return _speed(len(latencies) * self._block_bytes, time.perf_counter() - begun_s, latencies)


class _RawLoop:
    name = "raw loop"

    def __init__(
        self, folder: str, block_bytes: int, depth: int, num_blocks: int, engine: str, per_file: int = 0
    ) -> None:
        """per_file: blocks of one file; 0: as many as a segment has."""
        self._padded = -(-block_bytes // PAGE) * PAGE
        self._folder = folder
        self._disk: Disk = open_disk(folder, engine, depth)
        self._per_file = per_file or max(1, SEGMENT_BYTES // self._padded)
        self._max_files = max(2, num_blocks // self._per_file)
        self.files: list[str] = []
        """What read() reads; empty: what write() wrote."""
        self._written: deque[str] = deque()
        self._num_files = 0
        self._next = self._per_file
        self._depth = depth

    def write(self, seconds: float, memory: Sequence[memoryview], max_count: int | None = None) -> Speed:
        def place() -> tuple[str, int]:
            if self._next == self._per_file:
                if len(self._written) == self._max_files:
                    self._disk.remove(self._written.popleft())
                self._written.append(f"raw{self._num_files}")
                self._num_files += 1
                self._disk.create(self._written[-1], self._per_file * self._padded)
                self._next = 0
            self._next += 1
            return self._written[-1], (self._next - 1) * self._padded

        return self._drive(True, place, seconds, memory[: self._depth], max_count)

    def read(self, seconds: float, memory: Sequence[memoryview]) -> Speed:
        rng = random.Random(0)
        if self.files:
            places = [
                (os.path.relpath(file, self._folder), at)
                for file in self.files
                for at in range(0, os.path.getsize(file) - self._padded + 1, self._padded)
            ]
        else:
            places = [(file, n * self._padded) for file in self._written for n in range(self._per_file)]
            del places[len(places) - (self._per_file - self._next) :]
        return self._drive(False, lambda: rng.choice(places), seconds, memory[: self._depth])

    def close(self) -> None:
        self._disk.close()

    def _drive(
        self,
        write: bool,
        place: Callable[[], tuple[str, int]],
        seconds: float,
        blocks: Sequence[memoryview],
        max_count: int | None = None,
    ) -> Speed:
        free = deque(blocks)
        started: dict[int, tuple[float, memoryview]] = {}
        latencies: list[float] = []
        op_id = 0
        begun_s = time.perf_counter()
        while True:
            over = time.perf_counter() - begun_s > seconds
            ops = []
            while free and not over and op_id != max_count:
                memory = free.popleft()
                started[op_id] = (time.perf_counter(), memory)
                ops.append(DiskOp(op_id, write, *place(), (memory,)))
                op_id += 1
            if ops:
                self._disk.submit(ops)
            if not started:
                break
            for done_id, result in self._disk.poll(1, 1.0):
                begun, memory = started.pop(done_id)
                free.append(memory)
                if result != self._padded:
                    raise KvTierError(f"a transfer of the raw loop failed: {result}")
                latencies.append(time.perf_counter() - begun)
        return _speed(len(latencies) * self._padded, time.perf_counter() - begun_s, latencies)


class _Fio:
    name = "fio"

    def __init__(self, folder: str, block_bytes: int, depth: int, num_blocks: int) -> None:
        self._folder = folder
        self._padded = -(-block_bytes // PAGE) * PAGE
        self._depth = depth
        self._num_files = max(1, num_blocks * self._padded // SEGMENT_BYTES)
        self.files: list[str] = []
        """What read() reads."""

    def write(self, seconds: float, memory: Sequence[memoryview]) -> Speed:
        options: dict[str, int | str] = {
            "directory": self._folder,
            "nrfiles": self._num_files,
            "filesize": max(1, SEGMENT_BYTES // self._padded) * self._padded,
            "file_service_type": "sequential",
            "create_on_open": 1,
            "unlink": 1,
            "unlink_each_loop": 1,
        }
        return self._run("write", seconds, options)

    def read(self, seconds: float, memory: Sequence[memoryview]) -> Speed:
        return self._run("randread", seconds, {"filename": ":".join(name.replace(":", r"\:") for name in self.files)})

    def close(self) -> None:
        pass

    def _run(self, mode: str, seconds: float, more: dict[str, int | str]) -> Speed:
        options = {
            "name": mode,
            "rw": mode,
            "bs": self._padded,
            "iodepth": self._depth,
            "ioengine": "io_uring",
            "direct": 1,
            "time_based": 1,
            "runtime": max(1, round(seconds)),
            "output-format": "json",
            **more,
        }
        command = ["fio", *(f"--{name}={value}" for name, value in options.items())]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise KvTierError(f"fio failed: {done.stderr.strip()}")
        side = json.loads(done.stdout)["jobs"][0]["write" if mode == "write" else "read"]
        percentiles = side.get("clat_ns", {}).get("percentile", {})
        p50, p99 = (percentiles.get(f"{p}.000000", 0) / 1e9 for p in (50, 99))
        return Speed(side["bw_bytes"], p50, p99)


def _peer(folder: str, block_bytes: int, depth: int, num_blocks: int, engine: str) -> _Fio | _RawLoop:
    if shutil.which("fio") is not None and engine in ("auto", "io_uring"):
        return _Fio(folder, block_bytes, depth, num_blocks)
    return _RawLoop(folder, block_bytes, depth, num_blocks, engine)


def _blocks(block_bytes: int, count: int) -> list[memoryview]:
    """Whole pages, of content that does not compress. In huge pages where there are some, as a host tier's slots are:
    a device is given as many pieces as a block has pages."""
    padded = -(-block_bytes // PAGE) * PAGE
    mapping = mmap.mmap(-1, padded * count)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = memoryview(mapping)
    pattern = random.Random(0).randbytes(padded)
    for n in range(count):
        memory[n * padded : (n + 1) * padded] = pattern
    return [memory[n * padded : (n + 1) * padded] for n in range(count)]


def _key(number: int) -> bytes:
    return number.to_bytes(32, "little")
