"""The sampling kernels of the native module: torch CPU tensors in place, no copy of the logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lamella.runner_v2.sampling.choice import Choice
from lamella.runner_v2.sampling.kernels import Logprobs, SamplingKernels, TorchKernels
from lamella.runner_v2.sampling.masks import RowMasks
from lamella.runner_v2.sampling.penalties import PenaltyEntries

try:
    from lamella.runner_v2 import _C
except ImportError:  # built without a compiler
    _native: Any = None
else:
    _native = _C


class HostKernels:
    """csrc/host/sampling.cpp behind the SamplingKernels protocol. native: the module, for tests another build."""

    name = "host"

    def __init__(self, native: Any = None) -> None:
        self._native = native if native is not None else _native
        assert self._native is not None, "the native module is not built"

    def greedy(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids, status = _outputs(logits)
        self._native.sampling_greedy(logits, ids, status)
        return ids, status

    def choose(self, logits: torch.Tensor, choice: Choice) -> tuple[torch.Tensor, torch.Tensor]:
        ids, status = _outputs(logits)
        self._native.sampling_choose(logits, *choice, ids, status)
        return ids, status

    def logprobs(self, logits: torch.Tensor, rows: npt.NDArray[np.int32], token_ids: torch.Tensor, k: int) -> Logprobs:
        n = len(rows)
        result = Logprobs(
            torch.empty(n, dtype=torch.float32),
            torch.empty(n, dtype=torch.int32),
            torch.empty((n, k), dtype=torch.int32),
            torch.empty((n, k), dtype=torch.float32),
        )
        self._native.sampling_logprobs(logits, rows, token_ids, k, *result)
        return result

    def penalise(self, logits: torch.Tensor, entries: PenaltyEntries) -> None:
        self._native.sampling_penalise(logits, *entries)

    def mask(self, logits: torch.Tensor, masks: RowMasks) -> None:
        self._native.sampling_mask(logits, *masks)


def pick_kernels(device: torch.device | str, providers: tuple[str, ...] | None = None) -> SamplingKernels:
    """The fastest kernels for a device among the named providers (None: all): "host" on a CPU if the native module is
    built, else the torch reference, which is there whether it is named or not."""
    if torch.device(device).type == "cpu" and _native is not None and (providers is None or "host" in providers):
        return HostKernels()
    return TorchKernels()


def _outputs(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows = logits.shape[0]
    return torch.empty(num_rows, dtype=torch.int32), torch.empty(num_rows, dtype=torch.uint8)
