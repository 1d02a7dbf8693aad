from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from lamella.engine.adapters import block_copier
from lamella.engine.adapters.block_copier import AWAITED_BLOCKS, BESIDE_BLOCKS, KernelCopier, block_copiers
from lamella.runner_v2.testing import cuda_kernels


class Kernels:
    """copy_blocks on the memory of this process."""

    def __init__(self) -> None:
        self.max_blocks: list[int] = []

    def copy_blocks(self, sources: torch.Tensor, targets: torch.Tensor, num_bytes: int, *, max_blocks: int) -> None:
        assert sources.is_contiguous()
        assert targets.is_contiguous()
        assert sources.dtype == targets.dtype == torch.int64
        self.max_blocks.append(max_blocks)
        for source, target in zip(sources.tolist(), targets.tolist()):
            ctypes.memmove(target, source, num_bytes)


def test_pieces_are_copied_by_their_addresses() -> None:
    kernels = Kernels()
    copier = KernelCopier(kernels)
    source, target = torch.arange(40, dtype=torch.int64).view(5, 8), torch.zeros(7, 4, dtype=torch.int64)
    for beside in (False, True):
        addresses = [
            np.array([tensor[row].data_ptr() for row in rows]) for tensor, rows in ((source, (4, 1)), (target, (0, 6)))
        ]
        copier.copy(*addresses, 32, torch.device("cpu"), loads=True, beside=beside)
    assert torch.equal(target[[0, 6]], source[[4, 1], :4])
    assert int(target[1:6].sum()) == 0
    assert kernels.max_blocks == [AWAITED_BLOCKS, BESIDE_BLOCKS]
    assert BESIDE_BLOCKS < AWAITED_BLOCKS


def test_the_copy_engines_come_before_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert block_copiers("cpu") == []
    monkeypatch.setattr(block_copier, "driver_copier", lambda: None)
    assert block_copiers("cuda") == []  # neither driver nor kernels here
    with cuda_kernels.using(Kernels(), "cuda"):
        assert [copier.name for copier in block_copiers("cuda")] == ["kernel"]
        engines = Kernels()
        monkeypatch.setattr(block_copier, "driver_copier", lambda: engines)
        assert block_copiers("cuda")[0] is engines
