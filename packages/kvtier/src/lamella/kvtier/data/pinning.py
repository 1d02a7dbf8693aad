"""Pins the host tier's memory for CUDA, in the background: pinning costs about a third of a second per GiB.

    group 0  [ slab: pinned ][ slab: pinned ][ slab ] …     ready: slots [0, ready[group]) are pinned
    group 1  [ slab: pinned ][ slab ] …

The groups take turns. The system makes a slab's pages before the driver sees them, and the driver rests between slabs:
whoever launches kernels meanwhile waits for the driver no longer than for one slab. Slots that are not pinned yet
work, through a copy in between.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import time
from collections.abc import Callable

import torch

from lamella.kvtier.data.host_buffer import HostBuffer

logger = logging.getLogger("lamella.kvtier")

SLAB_BYTES = 32 << 20
DRIVER_SHARE = 0.5
"""Of the time, that the driver is asked to pin."""
_PORTABLE_AND_MAPPED = 3
"""cudaHostRegisterPortable | cudaHostRegisterMapped."""
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14; an older system refuses it, and the driver makes the pages."""


class SlabPinner:
    """Registers the slots of a buffer, slab by slab, on a thread."""

    def __init__(
        self,
        buffer: HostBuffer,
        register: Callable[[int, int], int] | None = None,
        unregister: Callable[[int], int] | None = None,
        slab_bytes: int = SLAB_BYTES,
        device: torch.device | None = None,
    ) -> None:
        """register(address, num_bytes) and unregister(address) return 0 when it worked; None: those of the CUDA
        runtime. device: whose context asks for it; None: that of the first one."""
        self.ready = [0] * len(buffer.num_slots)
        """Per group: leading slots that are pinned."""
        self.error = 0
        """Why pinning ended early; 0: it has not."""
        self._buffer = buffer
        self._device = device
        self._register = register or _cuda_register
        self._unregister = unregister or _cuda_unregister
        self._slots_per_slab = [max(1, slab_bytes // size) for size in buffer.slot_bytes]
        self._pinned: list[int] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtier-pinning", daemon=True)
        self._thread.start()

    def covers(self, group: int, slot: int) -> bool:
        """Whether this slot and all before it are pinned."""
        return slot < self.ready[group]

    @property
    def ended(self) -> bool:
        """No more slots will be pinned."""
        return not self._thread.is_alive()

    @property
    def num_bytes(self) -> int:
        """Pinned so far."""
        return sum(count * size for count, size in zip(self.ready, self._buffer.slot_bytes))

    def wait(self, timeout_s: float) -> bool:
        """Whether the thread has ended, after at most timeout_s."""
        self._thread.join(timeout_s)
        return self.ended

    def wait_for(self, group: int, num_slots: int, timeout_s: float) -> bool:
        """Whether so many leading slots of a group are pinned, after at most timeout_s."""
        end = time.monotonic() + timeout_s
        while self.ready[group] < num_slots and not self.ended and time.monotonic() < end:
            time.sleep(1e-3)
        return self.ready[group] >= num_slots

    def close(self) -> None:
        """Unpin. No copy may be running."""
        self._closed.set()
        self._thread.join()
        self.ready = [0] * len(self.ready)
        for address in self._pinned:
            self._unregister(address)
        self._pinned.clear()

    def _run(self) -> None:
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        bases = [
            torch.frombuffer(self._buffer.region(group), dtype=torch.uint8).data_ptr()
            for group in range(len(self.ready))
        ]
        total = sum(count * size for count, size in zip(self._buffer.num_slots, self._buffer.slot_bytes))
        while any(done < count for done, count in zip(self.ready, self._buffer.num_slots)):
            for group, done in enumerate(self.ready):
                count = min(self._slots_per_slab[group], self._buffer.num_slots[group] - done)
                if not count:
                    continue
                if self._closed.is_set():
                    return
                size = self._buffer.slot_bytes[group]
                address = bases[group] + done * size
                _populate(address, count * size)
                start = time.perf_counter()
                self.error = self._register(address, count * size)
                if self.error:
                    logger.warning(
                        "%.2f of %.2f GiB of the KV tier's host memory are pinned: CUDA error %d. Blocks beyond are "
                        "copied through a staging buffer, at a fraction of the link's speed: make the tier smaller "
                        "(ram=…), or let the process lock more memory",
                        self.num_bytes / 2**30,
                        total / 2**30,
                        self.error,
                    )
                    return
                self._pinned.append(address)
                self.ready[group] = done + count
                self._closed.wait((time.perf_counter() - start) * (1 / DRIVER_SHARE - 1))


def _populate(address: int, num_bytes: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # no such call here: pages are made as they are pinned
        madvise = ctypes.CDLL(None).madvise
        madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_int(_POPULATE_WRITE))


def _cuda_register(address: int, num_bytes: int) -> int:
    return int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, _PORTABLE_AND_MAPPED))  # type: ignore[no-untyped-call]


def _cuda_unregister(address: int) -> int:
    return int(torch.cuda.cudart().cudaHostUnregister(address))  # type: ignore[no-untyped-call]
