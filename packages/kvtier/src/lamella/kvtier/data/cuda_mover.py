"""Copies between caches in the memory of a CUDA device and the host tier, on side streams."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from lamella.kvtier.data.block_map import Piece
from lamella.kvtier.data.device_mover import DeviceMover, Rows
from lamella.kvtier.data.host_buffer import HostBuffer
from lamella.kvtier.data.pinning import SlabPinner
from lamella.kvtier.data.queue import EventQueue
from lamella.kvtier.jobs import CopyJob
from lamella.kvtier.protocols import BlockCopier


class CudaDeviceMover(DeviceMover):
    """Same order and rules as DeviceMover; the thread only enqueues.

    wait_layer(l) makes the caller's current stream wait for the event behind layer l on the load stream. A store waits
    for the event that after_step() left on the caller's stream. Slots that are pinned already are copied from and to
    directly; the others go through torch's own pinned memory, in one copy more. Without a BlockCopier whole slots
    travel, one copy of the driver per block, and are cut into layers on the device: the layers of one batch then arrive
    together.
    """

    def __init__(
        self,
        buffer: HostBuffer,
        layers: Sequence[Sequence[int]],
        caches: Sequence[Sequence[torch.Tensor]],
        events: EventQueue,
        *,
        rank: int = 0,
        copier: BlockCopier | None = None,
    ) -> None:
        """copier: a kernel that reads and writes pinned slots; None: copies by the driver, block by block."""
        device = caches[layers[0][0]][0].device
        self._device = device
        self._copier = copier
        self._load_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._store_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._layer_events: dict[int, torch.cuda.Event] = {
            layer: torch.cuda.Event()  # type: ignore[no-untyped-call]
            for members in layers
            for layer in members
        }
        self._step_event: torch.cuda.Event | None = None
        self._pinner = SlabPinner(buffer)
        self._ranges = [slice(rank * size, (rank + 1) * size) for size in buffer.bytes_per_block]
        super().__init__(buffer, layers, caches, events, rank=rank)

    def wait_layer(self, layer_idx: int) -> None:
        if not self._awaiting or layer_idx not in self._layer_events:
            return
        super().wait_layer(layer_idx)  # until the copies are enqueued
        torch.cuda.current_stream(self._device).wait_event(self._layer_events[layer_idx])

    def close(self) -> None:
        super().close()
        self._pinner.close()

    def _note_step(self, step_id: int) -> None:
        super()._note_step(step_id)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._step_event = event

    def _rows(self, jobs: Sequence[CopyJob]) -> dict[int, Rows]:
        loads = jobs[0].target.tier == "device"
        stream = self._load_stream if loads else self._store_stream
        if self._step_event is not None:
            stream.wait_event(self._step_event)
        made: dict[int, Rows] = {}
        with torch.cuda.stream(stream):
            for group, rows in super()._rows(jobs).items():
                pairs = torch.stack((rows.slots, rows.blocks) if loads else (rows.blocks, rows.slots), 1)
                on_device = pairs.pin_memory().to(self._device, non_blocking=True)
                staging: torch.Tensor | None = None
                if self._copier is None or not self._is_pinned(rows):
                    size = self.map.slots[group].shape[1]
                    staging = torch.empty(len(rows.slots), size, dtype=torch.uint8, device=self._device)
                    if loads:
                        self._stage(rows, staging)
                made[group] = rows._replace(pairs=on_device, staging=staging)
        return made

    def _stage(self, rows: Rows, staging: torch.Tensor) -> None:
        """Whole slots to the device: one copy of the driver per block."""
        slots = self.map.slots[rows.group]
        if not self._is_pinned(rows):
            staging.copy_(slots[rows.slots].pin_memory(), non_blocking=True)
            return
        for row, slot in enumerate(rows.slots.tolist()):
            staging[row].copy_(slots[slot], non_blocking=True)

    def _unstage(self, rows: Rows, staging: torch.Tensor) -> None:
        """Only this rank's bytes of a slot: other ranks write theirs."""
        slots = self.map.slots[rows.group][:, self._ranges[rows.group]]
        staging = staging[:, self._ranges[rows.group]]
        if not self._is_pinned(rows):
            slots.index_copy_(0, rows.slots, staging.cpu())
            return
        for row, slot in enumerate(rows.slots.tolist()):
            slots[slot].copy_(staging[row], non_blocking=True)

    def _load_layer(self, layer: int, rows: Rows) -> None:
        assert rows.pairs is not None
        with torch.cuda.stream(self._load_stream):
            for piece in self.map.pieces[layer]:
                if rows.staging is not None:
                    piece.cache.index_copy_(0, rows.pairs[:, 1], _part(rows.staging, piece))
                elif self._copier is not None:
                    self._copier.copy(piece.host, piece.cache, rows.pairs)
        self._layer_events[layer].record(self._load_stream)

    def _store_layer(self, layer: int, rows: Rows) -> None:
        assert rows.pairs is not None
        with torch.cuda.stream(self._store_stream):
            for piece in self.map.pieces[layer]:
                if rows.staging is not None:
                    _part(rows.staging, piece).copy_(piece.cache.index_select(0, rows.pairs[:, 0]))
                elif self._copier is not None:
                    self._copier.copy(piece.cache, piece.host, rows.pairs)

    def _rest(self, seconds: float) -> None:
        """The link is not the step's."""

    def _finish(self, rows: Sequence[Rows], *, loads: bool) -> None:
        """Waits on this thread; loads that come while a store runs go first."""
        stream = self._load_stream if loads else self._store_stream
        with torch.cuda.stream(stream):
            for part in rows:
                if part.staging is not None and not loads:
                    self._unstage(part, part.staging)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        while not event.query():  # type: ignore[no-untyped-call]
            if not loads and self._loads:
                self._run_loads()
            time.sleep(20e-6)

    def _is_pinned(self, rows: Rows) -> bool:
        return self._pinner.covers(rows.group, int(rows.slots.max()))


def _part(staging: torch.Tensor, piece: Piece) -> torch.Tensor:
    """[n, num_words]: the bytes of a piece in slots on the device."""
    num_bytes = piece.cache.shape[1] * piece.cache.element_size()
    return staging[:, piece.start : piece.start + num_bytes].view(piece.cache.dtype)
