"""Pins the host tier's memory for CUDA, in the background: pinning costs about a third of a second per GiB.

    group 0  [ slab: pinned ][ slab: pinned ][ slab ] …     ready: slots [0, ready[group]) are pinned
    group 1  [ slab: pinned ][ slab ] …

The groups take turns. Slots that are not pinned yet work, through a copy in between.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import torch

from lamella.kvtier.data.host_buffer import HostBuffer

logger = logging.getLogger("lamella.kvtier")

SLAB_BYTES = 256 << 20


class SlabPinner:
    """Registers the slots of a buffer, slab by slab, on a thread."""

    def __init__(
        self,
        buffer: HostBuffer,
        register: Callable[[int, int], int] | None = None,
        unregister: Callable[[int], int] | None = None,
        slab_bytes: int = SLAB_BYTES,
    ) -> None:
        """register(address, num_bytes) and unregister(address) return 0 when it worked; None: those of the CUDA
        runtime."""
        self.ready = [0] * len(buffer.num_slots)
        """Per group: leading slots that are pinned."""
        self._buffer = buffer
        self._register = register or _cuda_register
        self._unregister = unregister or _cuda_unregister
        self._slots_per_slab = [max(1, slab_bytes // size) for size in buffer.slot_bytes]
        self._pinned: list[int] = []
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvtier-pinning", daemon=True)
        self._thread.start()

    def covers(self, group: int, slot: int) -> bool:
        """Whether this slot and all before it are pinned."""
        return slot < self.ready[group]

    def wait(self, timeout_s: float) -> bool:
        """Whether the thread has ended, after at most timeout_s."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Unpin. No copy may be running."""
        self._closed = True
        self._thread.join()
        self.ready = [0] * len(self.ready)
        for address in self._pinned:
            self._unregister(address)
        self._pinned.clear()

    def _run(self) -> None:
        bases = [
            torch.frombuffer(self._buffer.region(group), dtype=torch.uint8).data_ptr()
            for group in range(len(self.ready))
        ]
        while not self._closed and any(done < total for done, total in zip(self.ready, self._buffer.num_slots)):
            for group, done in enumerate(self.ready):
                count = min(self._slots_per_slab[group], self._buffer.num_slots[group] - done)
                if not count or self._closed:
                    continue
                size = self._buffer.slot_bytes[group]
                error = self._register(bases[group] + done * size, count * size)
                if error:
                    logger.warning("host memory of the KV tier is not pinned beyond %d slots: error %d", done, error)
                    return
                self._pinned.append(bases[group] + done * size)
                self.ready[group] = done + count


def _cuda_register(address: int, num_bytes: int) -> int:
    return int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))  # type: ignore[no-untyped-call]


def _cuda_unregister(address: int) -> int:
    return int(torch.cuda.cudart().cudaHostUnregister(address))  # type: ignore[no-untyped-call]
