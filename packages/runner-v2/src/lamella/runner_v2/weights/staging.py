"""Brings tensors of the host to a device through a few pinned buffers.

    mapped file ──host copies──▶ buffer 0 │ buffer 1 ──device copies──▶ device memory
                                 filled    on its way

While the device fetches one buffer the host fills the other, so that reading the file, copying and packing on the
device go on at once. Pinning costs time, which is why the buffers are small and used again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

BUFFER_BYTES = 64 << 20
NUM_BUFFERS = 2
_ALIGNMENT = 64


class Event(Protocol):
    """A point in the device's work: torch.cuda.Event and its fakes."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...


Move = Callable[[torch.Tensor], torch.Tensor]


def open_staging(device: str | torch.device) -> Move | None:
    """What brings a tensor to the device; None where that is the host."""
    device = torch.device(device)
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        return lambda tensor: tensor.to(device)
    return Staging(device, _pinned, torch.cuda.Event).move


class Staging:
    """Copies on the current stream. A buffer is written again once the device has fetched what was in it."""

    def __init__(
        self,
        device: torch.device,
        make_buffer: Callable[[int], torch.Tensor],
        make_event: Callable[[], Event],
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        """make_buffer: uint8 memory of the host that the device can fetch from by itself. Made when first needed:
        weights that are made on the device need none."""
        assert buffer_bytes % _ALIGNMENT == 0
        self._device = device
        self._make_buffer, self._make_event = make_buffer, make_event
        self._buffer_bytes = buffer_bytes
        self._buffers: list[tuple[torch.Tensor, Event]] = []
        self._current = -1
        self._used = buffer_bytes
        """Of the current buffer."""

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the device, once the current stream has come so far. One that is no host tensor stays where it
        is. The host's copy may be given up at once."""
        if tensor.device.type != "cpu":
            return tensor
        moved = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        source, target = _as_bytes(tensor.contiguous()), _as_bytes(moved)
        start = 0
        while start < len(source):
            piece = self._take(len(source) - start)
            stop = start + len(piece)
            piece.copy_(source[start:stop])
            target[start:stop].copy_(piece, non_blocking=True)
            start = stop
        return moved

    def _take(self, wanted: int) -> torch.Tensor:
        """Up to so many bytes of a buffer that nobody reads any more."""
        if self._used >= self._buffer_bytes:
            self._turn()
        start = self._used
        stop = min(self._buffer_bytes, start + wanted)
        self._used = -(-stop // _ALIGNMENT) * _ALIGNMENT
        return self._buffers[self._current][0][start:stop]

    def _turn(self) -> None:
        if self._buffers:
            self._buffers[self._current][1].record()
        if len(self._buffers) < NUM_BUFFERS:
            self._buffers.append((self._make_buffer(self._buffer_bytes), self._make_event()))
            self._current = len(self._buffers) - 1
        else:
            self._current = (self._current + 1) % NUM_BUFFERS
            self._buffers[self._current][1].synchronize()
        self._used = 0


def _pinned(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
