"""Files of one private folder: everything about a disk that is not reading and writing ranges.

The folder is opened once and files are named relative to it. If it vanishes (deleted, or something mounted over its
path) every call fails from then on; it is never made again behind the user's back.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os

from lamella.kvtier.errors import KvTierError


class Folder:
    """mode 0700, files 0600. Raises KvTierError if the folder cannot be made or read at all."""

    def __init__(self, path: str) -> None:
        try:
            os.makedirs(path, mode=0o700, exist_ok=True)
            self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as problem:
            raise KvTierError(
                f"the folder of the disk tier {path} cannot be used: {problem.strerror}; give one that this user may "
                "read and write"
            ) from problem
        self.path = path
        self.read_only = not os.access(path, os.W_OK | os.X_OK) or bool(os.fstatvfs(self.fd).f_flag & os.ST_RDONLY)
        self._locks: dict[str, int] = {}
        info = os.fstat(self.fd)
        if not self.read_only and info.st_uid == os.geteuid() and info.st_mode & 0o077:
            os.fchmod(self.fd, 0o700)  # it was there, and others could read it

    def names(self) -> dict[str, int]:
        """Every file -> its bytes."""
        found = {}
        for name in os.listdir(self.fd):
            with contextlib.suppress(FileNotFoundError):
                found[name] = os.stat(name, dir_fd=self.fd).st_size
        return found

    def size(self, name: str) -> int:
        return os.stat(name, dir_fd=self.fd).st_size

    def cut(self, name: str, num_bytes: int) -> None:
        fd = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=self.fd)
        try:
            os.ftruncate(fd, num_bytes)
        finally:
            os.close(fd)

    def rename(self, name: str, new_name: str) -> None:
        os.rename(name, new_name, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def remove(self, name: str) -> None:
        os.unlink(name, dir_fd=self.fd)

    def get(self, name: str) -> bytes:
        with open(name, "rb", opener=self._opener) as file:
            return file.read()

    def put(self, name: str, data: bytes) -> None:
        """Written beside it and renamed."""
        draft = f"{name}.{os.getpid()}.tmp"
        try:
            with open(draft, "wb", opener=self._opener) as file:
                file.write(data)
            self.rename(draft, name)
        except OSError:
            with contextlib.suppress(OSError):
                self.remove(draft)
            raise

    def lock(self, name: str) -> bool:
        """True if it is ours now, or was."""
        if name in self._locks:
            return True
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=self.fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            os.write(fd, f"{os.getpid()}\n".encode())
        except OSError as problem:
            os.close(fd)
            if problem.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            raise
        self._locks[name] = fd
        return True

    def unlock(self, name: str, remove: bool = False) -> None:
        fd = self._locks.pop(name)
        if remove:
            with contextlib.suppress(OSError):
                self.remove(name)
        os.close(fd)

    def close(self) -> None:
        for name in list(self._locks):
            self.unlock(name)
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def _opener(self, name: str, flags: int) -> int:
        return os.open(name, flags | os.O_CLOEXEC, 0o600, dir_fd=self.fd)
