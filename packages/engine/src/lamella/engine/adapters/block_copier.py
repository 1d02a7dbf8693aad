"""The copy kernel of the runner's device as kvtier's `BlockCopier`.

    kvtier (on a side stream)         this adapter                          kernels
    prepare(pairs on the host)   →    pairs on the device
    copy(source, target, pairs)  →    how many thread blocks           →    copy_block_pairs

One kernel for all blocks of a tensor, however scattered they are. It takes thread blocks from what computes meanwhile:
as few as fill the link, and half of that where nobody waits for the copy.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from lamella.kvtier.data.driver_copier import driver_copier
from lamella.kvtier.protocols import BlockCopier
from lamella.runner_v2.errors import UnsupportedError
from lamella.runner_v2.ops.providers.cuda_kernels import load_kernels

LOAD_BLOCKS, STORE_BLOCKS = 16, 8
"""Thread blocks, 16 KiB in flight each: 16 fill a link of PCIe 5."""


class KernelCopier:
    """Copies by copy_block_pairs. Satisfies `BlockCopier`."""

    name = "kernel"

    def __init__(self, kernels: Any) -> None:
        """kernels: the namespace of lamella.kernels_cuda."""
        self._copy = kernels.copy_block_pairs

    def prepare(self, pairs: torch.Tensor, device: torch.device) -> torch.Tensor:
        return pairs.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else pairs

    def copy(self, source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
        self._copy(source, target, pairs, max_blocks=LOAD_BLOCKS if target.is_cuda else STORE_BLOCKS)


def block_copiers(device: str) -> list[BlockCopier]:
    """Ways to copy blocks to and from this device, what takes least from its kernels first; none on a CPU."""
    if torch.device(device).type == "cpu":
        return []
    found: list[BlockCopier] = []
    engines = driver_copier()
    if engines is not None:
        found.append(engines)
    with contextlib.suppress(UnsupportedError):  # the op table has said so
        found.append(KernelCopier(load_kernels(device)))
    return found
