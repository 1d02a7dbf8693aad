"""All movers of one process behind one face: what the engine's runner and core see.

core:    submit(jobs)   poll() → events   wait(timeout_s)
runner:  before_step(step_id)   wait_layer(layer_idx) …   after_step(step_id)

submit ─┬ device ⇄ host            DeviceMover, or CudaDeviceMover by where the caches are
        ├ host ⇄ disk              DiskMover
        └ host ⇄ external, lookups ExternalMover, one per manager
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lamella.kvtier.data.cuda_mover import CudaDeviceMover
from lamella.kvtier.data.device_mover import DeviceMover
from lamella.kvtier.data.disk_mover import BlockStore, DiskMover, RecordCodec
from lamella.kvtier.data.driver_copier import driver_copier
from lamella.kvtier.data.external_mover import ExternalMover
from lamella.kvtier.data.host_buffer import HostBuffer
from lamella.kvtier.data.queue import EventQueue
from lamella.kvtier.data.store_mover import StoreMover
from lamella.kvtier.jobs import ClearJob, CopyJob, Job, Location, LookupJob, LookupResult, TicketResult, TierEvent
from lamella.kvtier.protocols import BlockCopier, ExternalManager

MEASURED_BYTES, MEASURED_BYTES_ON_CUDA = 32 << 20, 64 << 20
"""A start measures the link over so much."""
POLL_S = 50e-6
"""A device is asked so often while somebody waits for it."""

MakeDevice = Callable[..., "DeviceMover | CudaDeviceMover"]


class TierMover:
    """Moves blocks between all tiers. Every method may be called from any thread."""

    def __init__(
        self,
        buffer: HostBuffer,
        *,
        fingerprint: bytes = bytes(16),
        store: BlockStore | None = None,
        externals: Sequence[tuple[str, Callable[[], ExternalManager]]] = (),
        max_disk_writes: int = 256,
        codec: RecordCodec | None = None,
        external_options: dict[str, Any] | None = None,
        copiers: Sequence[BlockCopier] | None = None,
        make_device: MakeDevice | None = None,
        on_event: Callable[[], None] | None = None,
    ) -> None:
        """fingerprint: 16 bytes, of the layout; names and frames of external managers carry it (the disk store has its
        own). store: a DiskStore, which this mover closes. externals: (name, what makes the manager). codec: another
        form of records on disk, such as Fp8Codec. external_options: of ExternalMover (time-outs, limits). copiers: ways
        to copy blocks on CUDA, what is least in others' way first; None: the driver's. make_device: what bind() makes
        in place of the mover that suits the caches, with the same arguments. on_event: called on a mover's thread when
        something ended after all had been polled.
        """
        self.buffer = buffer
        self._events = EventQueue(on_event)
        disk = (
            None if store is None else DiskMover(buffer, store, self._events, max_writes=max_disk_writes, codec=codec)
        )
        movers = [
            ExternalMover(name, make, buffer, fingerprint, self._events, **(external_options or {}))
            for name, make in externals
        ]
        self._stores = StoreMover(self._events, disk, movers)
        self._copiers = copiers
        self._make_device = make_device
        self._device: DeviceMover | CudaDeviceMover | None = None
        self._closed = False

    def bind(self, layers: Sequence[Sequence[int]], caches: Sequence[Sequence[torch.Tensor]], *, rank: int = 0) -> None:
        """The device's caches, once they exist. layers: per group, indices into caches. caches: per layer its tensors,
        each [num_blocks, ...] with contiguous blocks.

        Raises LayoutError when a block of the layers is not what a slot of the buffer holds.
        """
        assert self._device is None, "bind() comes once"
        make: MakeDevice = self._make_device or (self._cuda_mover if caches[layers[0][0]][0].is_cuda else DeviceMover)
        self._device = make(self.buffer, layers, caches, self._events, rank=rank)

    def measure_link(self, max_bytes: int | None = None) -> float | None:
        """Bytes per second from host to device, of blocks of the group that has the largest. On CUDA it also finds the
        best way to copy.

        Before anything was submitted: what its first slots and blocks hold is undefined afterwards. None: nothing is
        bound, or it cannot be copied.
        """
        if self._device is None:
            return None
        if max_bytes is None:
            max_bytes = MEASURED_BYTES_ON_CUDA if isinstance(self._device, CudaDeviceMover) else MEASURED_BYTES
        sizes = self.buffer.bytes_per_block
        group = max(range(len(sizes)), key=lambda n: sizes[n])
        count = min(self.buffer.num_slots[group], self._device.map.num_blocks[group] - 1, max_bytes // sizes[group])
        if isinstance(self._device, CudaDeviceMover):
            return self._device.measure(group, count) if count > 0 else None
        seconds: list[float] = []
        failed = False
        for _ in range(2 if count > 0 else 0):  # memory that was never touched is slow the first time
            self._device.submit(
                [
                    CopyJob(-1 - n, b"", Location("host", group, n), Location("device", group, 1 + n), sizes[group])
                    for n in range(count)
                ]
            )
            seconds = []
            others: list[TierEvent] = []
            while len(seconds) < count:
                self._events.wait(1.0)
                for event in self._events.take():
                    if isinstance(event, TicketResult) and event.ticket < 0:
                        failed = failed or not event.ok
                        seconds.append(event.seconds)
                    else:
                        others.append(event)
            self._events.put(others)
        return None if failed or not sum(seconds) else count * sizes[group] / sum(seconds)

    # ---- for the core ----------------------------------------------------------------------------------------------

    def submit(self, jobs: Sequence[Job]) -> None:
        """Start these. Each CopyJob and LookupJob ends in exactly one event; what cannot be done ends as failed."""
        device: list[CopyJob] = []
        below: list[Job] = []
        for job in jobs:
            if isinstance(job, CopyJob) and "device" in (job.source.tier, job.target.tier):
                device.append(job)
            else:
                below.append(job)
        if self._closed:
            self._events.put(failed for job in jobs if (failed := _refused(job, "the mover is closed")) is not None)
            return
        if device:
            if self._device is None:
                self._events.put([TicketResult(job.ticket, False, "no caches are bound") for job in device])
            else:
                self._device.submit(device)
        if below:
            self._stores.submit(below)

    def poll(self) -> list[TierEvent]:
        """What ended since the last call."""
        if self._device is not None and self._device.busy:
            self._device.poll()
        return self._events.take()

    def wait(self, timeout_s: float) -> bool:
        """Wait until poll() has something to say; False: it has not after timeout_s."""
        device = self._device
        if device is None or not device.polls:
            return self._events.wait(timeout_s)
        end = time.monotonic() + timeout_s
        while True:
            if device.busy:
                device.poll()
            left = end - time.monotonic()
            if self._events.wait(max(0.0, min(left, POLL_S) if device.busy else left)):
                return True
            if left <= 0.0:
                return False

    def wait_told(self, timeout_s: float) -> bool:
        """Wait until poll() has, or had, the Presence of everything that the disk held when it was opened; False: not
        after timeout_s. Nobody has to: what was told already can be read."""
        return self._stores.wait_told(timeout_s)

    # ---- for the runner --------------------------------------------------------------------------------------------

    def before_step(self, step_id: int, waits: bool = True) -> None:
        """waits: the step waits, layer by layer, for all host → device jobs submitted so far."""
        if self._device is not None:
            self._device.before_step(step_id, waits)

    def wait_layer(self, layer_idx: int) -> None:
        """Return once this layer of those jobs is there (on CUDA: once the current stream will wait for it)."""
        if self._device is not None:
            self._device.wait_layer(layer_idx)

    def after_step(self, step_id: int) -> None:
        """What the step wrote may be copied."""
        if self._device is not None:
            self._device.after_step(step_id)

    # ---- all -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End all threads within seconds, whatever hangs. What has not ended is told as failed by a last poll()."""
        if self._closed:
            return
        self._closed = True
        if self._device is not None:
            self._device.close()
        self._stores.close()

    def _cuda_mover(self, *args: Any, **options: Any) -> CudaDeviceMover:
        copiers = self._copiers
        if copiers is None:
            engines = driver_copier()
            copiers = () if engines is None else (engines,)
        return CudaDeviceMover(*args, **options, copiers=copiers)

    def stats(self) -> dict[str, dict[str, Any]]:
        """Per tier ("host" is device ⇄ host, "disk", the managers by name): bytes, queue depth, failures."""
        told = self._stores.stats()
        if self._device is not None:
            told["host"] = self._device.stats()
        return told


def _refused(job: Job, error: str) -> TierEvent | None:
    if isinstance(job, ClearJob):
        return None
    if isinstance(job, LookupJob):
        return LookupResult(job.ticket, 0)
    return TicketResult(job.ticket, False, error)
