"""Socket files of one run: a private folder, named after the process that made it.

    <temporary folder>/lamella-<pid>-<random>/to_core, to_client

A process that is killed leaves its folder behind; the next run removes folders whose process is gone. Names never
repeat, so a leftover can not be mistaken for a live core.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import weakref
from pathlib import Path

PREFIX = "lamella-"
MAX_PATH_BYTES = 100
"""A Unix socket's path holds 103 bytes on the strictest system."""


class Endpoint:
    """The two socket addresses of one run."""

    def __init__(self) -> None:
        """Make the folder, readable by this user only, and sweep those of dead processes."""
        base = tempfile.gettempdir()
        if len(os.fsencode(base)) > MAX_PATH_BYTES - 40:
            base = "/tmp"
        sweep(Path(base))
        self.folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=base))
        self._finalizer = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    @property
    def to_core(self) -> str:
        return f"ipc://{self.folder}/to_core"

    @property
    def to_client(self) -> str:
        return f"ipc://{self.folder}/to_client"

    def remove(self) -> None:
        """Delete the socket files; safe to repeat, and done at the end of the process if not before."""
        self._finalizer()


def sweep(base: Path) -> list[Path]:
    """Remove folders of this user whose process does not exist any more; returns them."""
    removed = []
    for folder in base.glob(f"{PREFIX}*-*"):
        match = re.fullmatch(rf"{PREFIX}(\d+)-\w+", folder.name)
        if match is None or not _mine(folder) or _alive(int(match.group(1))):
            continue
        shutil.rmtree(folder, ignore_errors=True)
        removed.append(folder)
    return removed


def _mine(folder: Path) -> bool:
    try:
        return folder.is_dir() and not folder.is_symlink() and folder.lstat().st_uid == os.getuid()
    except OSError:
        return False


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
