"""A folder on a real disk, past the page cache where the system allows it, by the native engines."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from lamella.kvtier.data.disk.checksum import native
from lamella.kvtier.data.disk.folder import Folder
from lamella.kvtier.errors import KvTierError
from lamella.kvtier.protocols import DiskDone, DiskOp

ENGINES = ("auto", "io_uring", "threads", "python")

_MAX_OPEN = 256
"""Files kept open: far fewer than a process may have, however many segments there are."""
_MAX_THREADS = 32


class OpenFile(Protocol):
    """What the disks keep of an open file."""

    @property
    def fd(self) -> int: ...
    def close(self) -> None: ...


class OpenFiles:
    """Open files by name. A file with ops in flight is not closed before they have ended."""

    def __init__(self) -> None:
        self._files: OrderedDict[str, tuple[OpenFile, list[int]]] = OrderedDict()
        self._users: dict[int, tuple[OpenFile, list[int]]] = {}

    def find(self, name: str) -> OpenFile | None:
        entry = self._files.get(name)
        if entry is None:
            return None
        self._files.move_to_end(name)
        return entry[0]

    def add(self, name: str, file: OpenFile) -> None:
        self._files[name] = (file, [0, 0])  # [ops in flight, dropped]
        if len(self._files) > _MAX_OPEN:
            self.drop(next(iter(self._files)))

    def begin(self, op_id: int, name: str) -> None:
        """An op on a file that is open."""
        entry = self._users[op_id] = self._files[name]
        entry[1][0] += 1

    def end(self, op_id: int) -> None:
        file, state = self._users.pop(op_id)
        state[0] -= 1
        if state == [0, 1]:
            file.close()

    def rename(self, name: str, new_name: str) -> None:
        entry = self._files.pop(name, None)
        if entry is not None:
            self._files[new_name] = entry

    def drop(self, name: str) -> None:
        """Close it as soon as nothing is in flight on it."""
        entry = self._files.pop(name, None)
        if entry is not None:
            entry[1][1] = 1
            if not entry[1][0]:
                entry[0].close()

    def close(self) -> None:
        for name in list(self._files):
            self.drop(name)


class PosixDisk:
    """Satisfies `Disk`. engine: "auto" takes io_uring where the kernel grants it, else threads."""

    def __init__(self, path: str, engine: str = "auto", depth: int = 32) -> None:
        """Raises KvTierError if the folder cannot be used, or the engine that was asked for by name."""
        assert native is not None, "PosixDisk needs the native module; PythonDisk does not"
        self._folder = Folder(path)
        try:
            self._engine = native.IoEngine(engine, depth, min(depth, _MAX_THREADS))
        except OSError as problem:
            self._folder.close()
            raise KvTierError(f"engine {engine}: {problem.strerror}; take auto or threads") from problem
        self._files = OpenFiles()
        self._refused: list[DiskDone] = []
        self._direct = True
        self.alignment = 4096
        self.read_only = self._folder.read_only

    @property
    def engine_name(self) -> str:
        """With how the files are opened."""
        return self._engine.name + ("" if self._direct else ", buffered")

    @property
    def direct(self) -> bool:
        """Whether the page cache is passed by, as far as files were opened."""
        return self._direct

    def submit(self, ops: Sequence[DiskOp]) -> None:
        batch = []
        for op in ops:
            try:
                file = self._open(op.name)
            except OSError as problem:
                self._refused.append(DiskDone(op.op_id, -(problem.errno or 5)))
                continue
            self._files.begin(op.op_id, op.name)
            batch.append((op.op_id, file.fd, op.write, op.offset, op.buffers))
        if batch:
            self._engine.submit(batch)

    def poll(self, min_done: int, timeout_s: float) -> list[DiskDone]:
        done, self._refused = self._refused, []
        wanted = max(min_done - len(done), 0)
        for op_id, result in self._engine.wait(wanted, timeout_s if wanted else 0.0):
            self._files.end(op_id)
            done.append(DiskDone(op_id, result))
        return done

    def wake(self) -> None:
        self._engine.wake()

    def names(self) -> dict[str, int]:
        return self._folder.names()

    def size(self, name: str) -> int:
        return self._folder.size(name)

    def create(self, name: str, num_bytes: int) -> None:
        assert native is not None
        file = native.AlignedFile(self._folder.fd, name, True, True, True)
        self._direct = file.direct
        error = file.preallocate(num_bytes)
        if error:
            file.close()
            self._folder.remove(name)
            raise OSError(error, os.strerror(error), name)
        self._files.add(name, file)

    def seal(self, name: str, new_name: str, num_bytes: int) -> None:
        self._folder.cut(name, num_bytes)
        self._open(name).drop_cache()
        self._folder.rename(name, new_name)
        self._files.drop(name)  # readers open it anew

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
        self._engine.close()
        self._files.close()
        self._folder.close()

    def _open(self, name: str) -> native.AlignedFile:
        assert native is not None
        file = self._files.find(name)
        if file is None:
            file = native.AlignedFile(self._folder.fd, name, False, False, True)
            self._direct = file.direct
            self._files.add(name, file)
        assert isinstance(file, native.AlignedFile)
        return file
