"""The copy kernel of the runner's device as kvtier's `BlockCopier`.

    kvtier (on a side stream)              this adapter                                        kernels
    copy(addresses on the host)       →    addresses on the device, how many thread blocks →   copy_blocks

One kernel for all pieces, however scattered they are. It takes thread blocks from what computes meanwhile: as few as
fill the link, and a quarter of that where nobody waits for the copy.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import torch

from lamella.kvtier.data.driver_copier import driver_copier
from lamella.kvtier.protocols import BlockCopier
from lamella.runner_v2.errors import UnsupportedError
from lamella.runner_v2.ops.providers.cuda_kernels import load_kernels

AWAITED_BLOCKS, BESIDE_BLOCKS = 32, 8
"""Thread blocks, 16 KiB in flight each: 32 fill a link of PCIe 5, and 8 most of it."""


class KernelCopier:
    """Copies by copy_block_pairs. Satisfies `BlockCopier`."""

    name = "kernel"

    def __init__(self, kernels: Any) -> None:
        """kernels: the namespace of lamella.kernels_cuda."""
        self._copy = kernels.copy_blocks

    def copy(
        self, sources: Any, targets: Any, num_bytes: int, device: torch.device, *, loads: bool, beside: bool
    ) -> None:
        addresses = torch.from_numpy(np.stack((sources, targets)))
        if device.type == "cuda":
            addresses = addresses.pin_memory().to(device, non_blocking=True)
        self._copy(addresses[0], addresses[1], num_bytes, max_blocks=BESIDE_BLOCKS if beside else AWAITED_BLOCKS)


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
