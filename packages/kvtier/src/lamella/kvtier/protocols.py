"""What kvtier's data plane needs from others. Implementers do not inherit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol


class ExternalManager(Protocol):
    """A store beyond this machine's memory and disk: a class that is made once per node, by name and JSON options.

    Calls may block and may raise: they come from a thread of their own, one at a time. Names are opaque bytes, equal
    for equal content under one layout, and say nothing about the content. What is stored may be forgotten at any time.
    The bytes carry kvtier's own frame (identity and checksum): a wrong answer costs time and never correctness.

    `lamella.kvtier.testing.contract.check_manager` holds any implementation to this.
    """

    def lookup(self, names: Sequence[bytes]) -> int:
        """How many of these, from the first on, are there: the first that is missing ends the count."""

    def load(self, items: Sequence[tuple[bytes, memoryview]]) -> Sequence[bool]:
        """Fill the buffer of each (name, buffer) with what was stored under the name, which is exactly as long. True
        for each that was filled; a buffer is not written after the call has returned."""

    def store(self, items: Sequence[tuple[bytes, bytes | None, memoryview]]) -> Sequence[bool]:
        """Keep the bytes of each (name, name of the block before it or None, bytes). True for each that was kept;
        declining is allowed. The bytes are valid during the call only."""

    def close(self) -> None:
        """No call comes later."""


class BlockCopier(Protocol):
    """Copies many pieces of memory between a device and pinned host memory, on the current stream."""

    name: str
    """What figures call it."""

    def copy(self, sources: Any, targets: Any, num_bytes: int, device: Any, *, loads: bool, beside: bool) -> None:
        """num_bytes from each source to its target. sources, targets: numpy [n] int64, addresses that the device can
        reach; no two targets overlap. loads: to the device. beside: others compute meanwhile, and nobody waits for
        this. RuntimeError or ValueError if it cannot."""


# ---- disk ----------------------------------------------------------------------------------------------------------


class Clock(Protocol):
    def now(self) -> float:
        """Seconds, never backwards."""


class DiskOp(NamedTuple):
    """Read or write one range of one file: the buffers lie behind one another in the file, from offset on."""

    op_id: int
    write: bool
    name: str
    offset: int
    buffers: tuple[memoryview, ...]
    """Address, length and offset are multiples of the disk's alignment. They must stay until the op is done."""


class DiskDone(NamedTuple):
    """The end of an op; each has exactly one."""

    op_id: int
    result: int
    """Bytes transferred, fewer than asked at the end of a file or device; or the negative errno."""


class Disk(Protocol):
    """One private folder of flat files. All calls come from one thread, but wake() from any.

    Transfers are submitted and polled and never raise; what concerns whole files is done at once and raises OSError.
    """

    @property
    def engine_name(self) -> str: ...

    @property
    def alignment(self) -> int:
        """1: any address and length will do."""

    @property
    def read_only(self) -> bool: ...

    def submit(self, ops: Sequence[DiskOp]) -> None:
        """Start these. A file that cannot be opened is told by poll()."""

    def poll(self, min_done: int, timeout_s: float) -> list[DiskDone]:
        """What is done, in any order: waits until min_done ops are, timeout_s is over or wake() was called."""

    def wake(self) -> None:
        """Let a poll() that waits return."""

    def names(self) -> dict[str, int]:
        """Every file -> its bytes."""

    def size(self, name: str) -> int: ...

    def create(self, name: str, num_bytes: int) -> None:
        """A new, empty file with room for num_bytes, readable by its owner only. FileExistsError if there is one."""

    def seal(self, name: str, new_name: str, num_bytes: int) -> None:
        """Cut the file to num_bytes and give it its new name."""

    def remove(self, name: str) -> None:
        """Ops in flight on it end as if it were there."""

    def get(self, name: str) -> bytes:
        """A whole small file."""

    def put(self, name: str, data: bytes) -> None:
        """A whole small file, in place of the one with this name: readers see the old one or the new one."""

    def lock(self, name: str) -> bool:
        """Take a file's lock, making the file: True, or False if another holds it. Dies with its holder."""

    def unlock(self, name: str, remove: bool = False) -> None: ...

    def close(self) -> None:
        """Waits for the ops in flight; locks are released."""


# ---- end of disk ---------------------------------------------------------------------------------------------------
