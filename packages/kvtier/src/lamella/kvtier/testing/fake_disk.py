"""A folder in memory with the faults of a real one: latency and reordering, torn writes, flipped bits, no space, EIO,
a folder that vanishes. Everything follows from the seed.

    folder = FakeFolder()
    disk = FakeDisk(folder, clock, seed=1)     one process's view of the folder; several may share it
    after = disk.crash()                       the process is killed; what the next one finds
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Sequence

from lamella.kvtier.protocols import DiskDone, DiskOp
from lamella.kvtier.testing.fake_clock import FakeClock

_SECTOR = 512


class FakeFile:
    def __init__(self, reserved: int = 0) -> None:
        self.data = bytearray()
        self.reserved = reserved

    @property
    def taken(self) -> int:
        return max(len(self.data), self.reserved)


class FakeFolder:
    """The files, and who holds which lock. limit: bytes that all files may take."""

    def __init__(self, limit: int = 1 << 60) -> None:
        self.limit = limit
        self.files: dict[str, FakeFile] = {}
        self.locks: dict[str, FakeDisk] = {}
        self.vanished = False

    @property
    def taken(self) -> int:
        return sum(file.taken for file in self.files.values())

    def flip(self, name: str, offset: int, bit: int = 0) -> None:
        """Turn one bit over."""
        self.files[name].data[offset] ^= 1 << bit


class FakeDisk:
    """Satisfies `Disk`. poll() lets the clock run to the next completion."""

    engine_name = "fake"

    def __init__(
        self,
        folder: FakeFolder,
        clock: FakeClock,
        seed: int = 0,
        *,
        latency_s: float = 0.001,
        alignment: int = 4096,
        read_only: bool = False,
        eio_reads: float = 0.0,
        eio_writes: float = 0.0,
    ) -> None:
        """latency_s: transfers take up to this long. eio_…: share of transfers that fail."""
        self.folder = folder
        self.alignment = alignment
        self.read_only = read_only
        self.eio_reads = eio_reads
        self.eio_writes = eio_writes
        self.hung = False
        """Nothing ends any more."""
        self.crashed = False
        self._clock = clock
        self._rng = random.Random(seed)
        self._latency_s = latency_s
        self._pending: list[tuple[float, int, DiskOp, FakeFile | None]] = []
        self._woken = False

    def submit(self, ops: Sequence[DiskOp]) -> None:
        for op in ops:
            length = sum(len(buffer) for buffer in op.buffers)
            assert op.offset % self.alignment == 0, "an offset is not aligned"
            assert length % self.alignment == 0, "a length is not aligned"
            file = None if self.folder.vanished else self.folder.files.get(op.name)
            due_s = self._clock.now() + self._rng.random() * self._latency_s
            self._pending.append((due_s, op.op_id, op, file))

    def poll(self, min_done: int, timeout_s: float) -> list[DiskDone]:
        assert not self.crashed
        end_s = self._clock.now() + timeout_s
        done: list[DiskDone] = []
        while not self.hung and self._pending:
            first = min(self._pending, key=lambda entry: entry[:2])
            if first[0] > self._clock.now():
                if len(done) >= min_done or first[0] > end_s:
                    break
                self._clock.advance(first[0] - self._clock.now())
            self._pending.remove(first)
            done.append(DiskDone(first[1], self._run(first[2], first[3])))
        if len(done) < min_done and self._clock.now() < end_s and not self._woken:
            self._clock.advance(end_s - self._clock.now())
        self._woken = False
        return done

    def wake(self) -> None:
        self._woken = True

    def names(self) -> dict[str, int]:
        return {name: file.taken for name, file in self._files().items()}

    def size(self, name: str) -> int:
        return self._file(name).taken

    def create(self, name: str, num_bytes: int) -> None:
        self._change()
        if name in self._files():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
        if self.folder.taken + num_bytes > self.folder.limit:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
        self.folder.files[name] = FakeFile(num_bytes)

    def seal(self, name: str, new_name: str, num_bytes: int) -> None:
        self._change()
        file = self._file(name)
        del file.data[num_bytes:]
        file.data.extend(bytes(num_bytes - len(file.data)))
        file.reserved = 0
        self.folder.files[new_name] = self.folder.files.pop(name)

    def remove(self, name: str) -> None:
        self._change()
        self._file(name)
        del self.folder.files[name]

    def get(self, name: str) -> bytes:
        return bytes(self._file(name).data)

    def put(self, name: str, data: bytes) -> None:
        self._change()
        self._files()
        if self.folder.taken + len(data) > self.folder.limit:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
        file = self.folder.files[name] = FakeFile()
        file.data[:] = data

    def lock(self, name: str) -> bool:
        self._change()
        self._files().setdefault(name, FakeFile())
        return self.folder.locks.setdefault(name, self) is self

    def unlock(self, name: str, remove: bool = False) -> None:
        assert self.folder.locks.pop(name) is self, "a lock that is not held is released"
        if remove:
            self.folder.files.pop(name, None)

    def close(self) -> None:
        self._end()

    def crash(self, *, power_loss: bool = False) -> FakeDisk:
        """The process dies: writes in flight are done, not done or torn. With power_loss, sectors of any file that is
        not sealed may be lost, too."""
        for _, _, op, file in self._pending:
            if op.write and file is not None and self._rng.random() < 0.7:
                self._write(file, op, torn=self._rng.random() < 0.7)
        if power_loss:
            for name, file in self.folder.files.items():
                if name.endswith(".open") and self._rng.random() < 0.5:
                    self._lose(file)
        self._pending.clear()
        self._end()
        self.crashed = True
        return FakeDisk(
            self.folder, self._clock, self._rng.randrange(1 << 30), latency_s=self._latency_s, alignment=self.alignment
        )

    # ---- private ---------------------------------------------------------------------------------------------------

    def _run(self, op: DiskOp, file: FakeFile | None) -> int:
        if self.folder.vanished or file is None:
            return -errno.ENOENT
        if self._rng.random() < (self.eio_writes if op.write else self.eio_reads):
            if op.write and self._rng.random() < 0.5:
                self._write(file, op, torn=True)
            return -errno.EIO
        if op.write:
            length = sum(len(buffer) for buffer in op.buffers)
            if self.folder.taken - file.taken + max(file.taken, op.offset + length) > self.folder.limit:
                return -errno.ENOSPC
            self._write(file, op, torn=False)
            return length
        position = op.offset
        for buffer in op.buffers:
            part = file.data[position : position + len(buffer)]
            zeros = min(len(buffer), max(file.taken - position, 0)) - len(part)
            part += bytes(max(zeros, 0))
            buffer[: len(part)] = part
            position += len(part)
            if len(part) < len(buffer):
                break
        return position - op.offset

    def _write(self, file: FakeFile, op: DiskOp, torn: bool) -> None:
        data = b"".join(bytes(buffer) for buffer in op.buffers)
        end = op.offset + len(data)
        if len(file.data) < end:
            file.data.extend(bytes(end - len(file.data)))
        if not torn:
            file.data[op.offset : end] = data
            return
        in_order = self._rng.random() < 0.5
        cut = self._rng.randrange(0, len(data) + 1, _SECTOR)
        for at in range(0, len(data), _SECTOR):
            if at < cut if in_order else self._rng.random() < 0.5:
                file.data[op.offset + at : op.offset + at + _SECTOR] = data[at : at + _SECTOR]

    def _lose(self, file: FakeFile) -> None:
        for at in range(0, len(file.data), _SECTOR):
            if self._rng.random() < 0.02:
                file.data[at : at + _SECTOR] = bytes(len(file.data[at : at + _SECTOR]))

    def _files(self) -> dict[str, FakeFile]:
        if self.folder.vanished:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "folder")
        return self.folder.files

    def _file(self, name: str) -> FakeFile:
        file = self._files().get(name)
        if file is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return file

    def _change(self) -> None:
        if self.read_only:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), "folder")

    def _end(self) -> None:
        for name in [name for name, owner in self.folder.locks.items() if owner is self]:
            del self.folder.locks[name]
