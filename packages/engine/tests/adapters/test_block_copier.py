from __future__ import annotations

import pytest
import torch

from lamella.engine.adapters import block_copier
from lamella.engine.adapters.block_copier import LOAD_BLOCKS, STORE_BLOCKS, KernelCopier, block_copiers
from lamella.runner_v2.testing import cuda_kernels


class Kernels:
    def __init__(self) -> None:
        self.max_blocks: list[int] = []

    def copy_block_pairs(
        self, source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor, *, max_blocks: int
    ) -> None:
        self.max_blocks.append(max_blocks)
        cuda_kernels.copy_block_pairs(source, target, pairs)


def test_blocks_are_copied_by_pairs() -> None:
    kernels = Kernels()
    copier = KernelCopier(kernels)
    source, target = torch.arange(40, dtype=torch.int64).view(5, 8)[:, 2:6], torch.zeros(7, 4, dtype=torch.int64)
    copier.copy(source, target, copier.prepare(torch.tensor([[4, 0], [1, 6]]), torch.device("cpu")))
    assert torch.equal(target[[0, 6]], source[[4, 1]])
    assert int(target[1:6].sum()) == 0
    assert kernels.max_blocks == [STORE_BLOCKS]
    assert STORE_BLOCKS < LOAD_BLOCKS


def test_the_copy_engines_come_before_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert block_copiers("cpu") == []
    monkeypatch.setattr(block_copier, "driver_copier", lambda: None)
    assert block_copiers("cuda") == []  # neither driver nor kernels here
    with cuda_kernels.using(Kernels(), "cuda"):
        assert [copier.name for copier in block_copiers("cuda")] == ["kernel"]
        engines = Kernels()
        monkeypatch.setattr(block_copier, "driver_copier", lambda: engines)
        assert block_copiers("cuda")[0] is engines
