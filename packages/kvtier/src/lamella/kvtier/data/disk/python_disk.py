"""The same folder without the native module: threads that call preadv and pwritev through the page cache."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Sequence

from lamella.kvtier.data.disk.folder import Folder
from lamella.kvtier.data.disk.posix_disk import OpenFiles
from lamella.kvtier.protocols import DiskDone, DiskOp

_MAX_PARTS = 1024


class BufferedFile:
    def __init__(self, fd: int) -> None:
        self.fd = fd

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


class PythonDisk:
    """Satisfies `Disk`. The reference of PosixDisk."""

    engine_name = "python threads, buffered"
    alignment = 1
    direct = False

    def __init__(self, path: str, depth: int = 32) -> None:
        """Raises KvTierError if the folder cannot be used."""
        self._folder = Folder(path)
        self.read_only = self._folder.read_only
        self._files = OpenFiles()
        self._changed = threading.Condition()
        self._queue: deque[tuple[DiskOp, int]] = deque()
        self._done: list[DiskDone] = []
        self._woken = False
        self._closing = False
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(min(depth, 8))]
        for thread in self._threads:
            thread.start()

    def submit(self, ops: Sequence[DiskOp]) -> None:
        started = []
        refused = []
        for op in ops:
            try:
                file = self._open(op.name)
            except OSError as problem:
                refused.append(DiskDone(op.op_id, -(problem.errno or 5)))
                continue
            self._files.begin(op.op_id, op.name)
            started.append((op, file.fd))
        with self._changed:
            self._queue.extend(started)
            self._done += refused
            self._changed.notify_all()

    def poll(self, min_done: int, timeout_s: float) -> list[DiskDone]:
        with self._changed:
            self._changed.wait_for(
                lambda: len(self._done) >= min_done or self._woken, None if timeout_s < 0 else timeout_s
            )
            self._woken = False
            done, self._done = self._done, []
        for op_id, _ in done:
            with contextlib.suppress(KeyError):  # refused: its file was never opened
                self._files.end(op_id)
        return done

    def wake(self) -> None:
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def names(self) -> dict[str, int]:
        return self._folder.names()

    def size(self, name: str) -> int:
        return self._folder.size(name)

    def create(self, name: str, num_bytes: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._files.add(name, BufferedFile(os.open(name, flags, 0o600, dir_fd=self._folder.fd)))

    def seal(self, name: str, new_name: str, num_bytes: int) -> None:
        self._folder.cut(name, num_bytes)
        self._folder.rename(name, new_name)
        self._files.rename(name, new_name)

    def remove(self, name: str) -> None:
        self._files.drop(name)
        self._folder.remove(name)

    def get(self, name: str) -> bytes:
        return self._folder.get(name)

    def put(self, name: str, data: bytes) -> None:
        self._folder.put(name, data)

    def lock(self, name: str) -> bool:
        return self._folder.lock(name)

    def unlock(self, name: str, remove: bool = False) -> None:
        self._folder.unlock(name, remove)

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self.poll(0, 0.0)
        self._files.close()
        self._folder.close()

    def _open(self, name: str) -> BufferedFile:
        file = self._files.find(name)
        if file is None:
            file = BufferedFile(os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._folder.fd))
            self._files.add(name, file)
        assert isinstance(file, BufferedFile)
        return file

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or bool(self._queue))
                if not self._queue:
                    return
                op, fd = self._queue.popleft()
            result = _transfer(op, fd)
            with self._changed:
                self._done.append(DiskDone(op.op_id, result))
                self._changed.notify_all()


def _transfer(op: DiskOp, fd: int) -> int:
    """Bytes transferred, or the negative errno."""
    left = [memoryview(buffer).cast("B") for buffer in op.buffers if len(buffer)]
    total = 0
    try:
        while left:
            parts = left[:_MAX_PARTS]
            at = op.offset + total
            count = os.pwritev(fd, parts, at) if op.write else os.preadv(fd, parts, at)
            if count == 0:
                break
            total += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]
    except OSError as problem:
        return -(problem.errno or 5)
    return total
