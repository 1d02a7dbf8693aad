"""Where the bytes of a block lie: in the caches of its group's layers, and in a slot of the host tier.

    slot of group g, one rank   [ layer a: k block | v block ][ layer b: k block | v block ] …
    layers in the order that bind() names them, the tensors of a layer in their order

A block's part of a tensor is copied as words, the widest that divide it, whatever the dtype is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from lamella.kvtier.data.host_buffer import HostBuffer
from lamella.kvtier.errors import LayoutError
from lamella.kvtier.jobs import CopyJob, TicketResult

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class Piece(NamedTuple):
    """One tensor of one layer, and its place in the slots."""

    cache: torch.Tensor  # [num_blocks, num_words]
    host: torch.Tensor  # [num_slots, num_words], rows slot_bytes apart
    start: int
    """Its first byte in a slot."""


class BlockMap:
    """The pieces of every layer, as views of caches and host memory."""

    def __init__(
        self,
        buffer: HostBuffer,
        layers: Sequence[Sequence[int]],
        caches: Sequence[Sequence[torch.Tensor]],
        rank: int,
    ) -> None:
        """layers: per group, indices into caches. caches: per layer its tensors, each [num_blocks, ...] with contiguous
        blocks.

        Raises LayoutError when blocks and slots differ in size.
        """
        self.pieces: dict[int, tuple[Piece, ...]] = {}
        self.order: list[tuple[int, int]] = []
        """(layer, group) by layer: the order in which a step needs them."""
        self.slots: list[torch.Tensor] = []  # per group [num_slots, slot_bytes] uint8
        self.num_blocks: list[int] = []
        """Per group."""
        if len(layers) != len(buffer.num_slots):
            raise LayoutError(f"{len(layers)} groups of layers, but the host buffer has {len(buffer.num_slots)} groups")
        for group, members in enumerate(layers):
            region = torch.frombuffer(buffer.region(group), dtype=torch.uint8)
            slots = region.view(buffer.num_slots[group], buffer.slot_bytes[group])
            self.slots.append(slots)
            size = buffer.bytes_per_block[group]
            start = rank * size
            end = start
            for layer in members:
                pieces: list[Piece] = []
                for tensor in caches[layer]:
                    num_bytes = tensor[0].numel() * tensor.element_size()
                    pieces.append(_piece(tensor, slots[:, end : end + num_bytes], end, layer))
                    end += num_bytes
                self.pieces[layer] = tuple(pieces)
                self.order.append((layer, group))
            if end - start != size:
                raise LayoutError(f"group {group}: a block of its layers has {end - start} bytes, a slot holds {size}")
            counts = {tensor.shape[0] for layer in members for tensor in caches[layer]}
            if len(counts) != 1:
                raise LayoutError(f"group {group}: its layers differ in their numbers of blocks: {sorted(counts)}")
            self.num_blocks.append(counts.pop())
        self.order.sort()

    def sort_out(self, jobs: Sequence[CopyJob], error: str | None) -> tuple[list[CopyJob], list[TicketResult]]:
        """(jobs that can be copied, ends of those that make no sense). error: why none can be."""
        good: list[CopyJob] = []
        failed: list[TicketResult] = []
        for job in jobs:
            fault = error or self.fault(job)
            if fault is None:
                good.append(job)
            else:
                failed.append(TicketResult(job.ticket, False, fault))
        return good, failed

    def fault(self, job: CopyJob) -> str | None:
        """Why this is no copy between a block and a slot of one group; None: it is."""
        tiers = (job.source.tier, job.target.tier)
        if tiers not in (("host", "device"), ("device", "host")):
            return f"a device mover does not copy from {tiers[0]} to {tiers[1]}"
        host, device = (job.source, job.target) if tiers[0] == "host" else (job.target, job.source)
        group = host.group
        if group != device.group or not 0 <= group < len(self.num_blocks):
            return f"group {host.group} on the host and {device.group} on the device do not go together"
        if not 0 <= host.slot < len(self.slots[group]):
            return f"host slot {host.slot} of group {group}, which has {len(self.slots[group])}"
        if not 1 <= device.slot < self.num_blocks[group]:
            return f"block {device.slot} of group {group}, which has blocks 1 to {self.num_blocks[group] - 1}"
        return None

    def max_words(self) -> int:
        """Words of the largest piece."""
        return max(piece.cache.shape[1] for pieces in self.pieces.values() for piece in pieces)


def _piece(tensor: torch.Tensor, slots: torch.Tensor, offset: int, layer: int) -> Piece:
    # views only: a copy here would be copied to ever after, and nobody would read it
    try:
        rows = tensor.view(tensor.shape[0], -1)
    except RuntimeError as error:
        raise LayoutError(f"layer {layer}: the blocks of a cache are not contiguous: {error}") from None
    num_bytes = slots.shape[1]
    stride = rows.stride(0) * rows.element_size()
    starts = (num_bytes, offset, stride, rows.data_ptr(), slots.stride(0))
    word = next(word for word in _WORDS if all(number % word.itemsize == 0 for number in starts))
    return Piece(rows.view(torch.uint8).view(word), slots.view(word), offset)


def pairs_by_group(jobs: Iterable[CopyJob]) -> dict[int, tuple[list[int], list[int]]]:
    """Group -> (slots, blocks) that its jobs copy between, whichever way."""
    pairs: dict[int, tuple[list[int], list[int]]] = {}
    for job in jobs:
        host, device = (job.source, job.target) if job.source.tier == "host" else (job.target, job.source)
        slots, blocks = pairs.setdefault(host.group, ([], []))
        slots.append(host.slot)
        blocks.append(device.slot)
    return pairs
