"""The sampling kernels of a CUDA device behind the SamplingKernels protocol: for rows whose logits are edited first,
or that want log-probabilities. Parameters come from the host, step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lamella.runner_v2.sampling.choice import Choice
from lamella.runner_v2.sampling.kernels import Logprobs, TorchKernels
from lamella.runner_v2.sampling.masks import RowMasks
from lamella.runner_v2.sampling.penalties import PenaltyEntries, penalise

_MAX_BEST = 1024
"""Best tokens that the kernel lists; beyond, the reference sorts."""


class CudaKernels:
    """Over the namespace of lamella.kernels_cuda, which is handed in."""

    name = "cuda"

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        self._reference = TorchKernels()

    def greedy(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = self._kernels.sample(logits)
        return chosen.ids, chosen.status

    def choose(self, logits: torch.Tensor, choice: Choice) -> tuple[torch.Tensor, torch.Tensor]:
        device = logits.device

        def on_device(values: npt.NDArray[Any]) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).to(device)

        chosen = self._kernels.sample(
            logits,
            on_device(choice.temperature),
            on_device(choice.top_k),
            on_device(choice.top_p),
            on_device(np.exp(choice.log_min_p)),
            on_device(choice.keys.view(np.int64)),
            on_device(choice.positions),
            salt=choice.salt,
        )
        return chosen.ids, chosen.status

    def logprobs(self, logits: torch.Tensor, rows: npt.NDArray[np.int32], token_ids: torch.Tensor, k: int) -> Logprobs:
        if k > _MAX_BEST:
            return self._reference.logprobs(logits, rows, token_ids, k)
        chosen_rows = logits[torch.from_numpy(rows.astype(np.int64)).to(logits.device)]
        found = self._kernels.top_logprobs(chosen_rows, k, token_ids.to(logits.device, torch.int32))
        return Logprobs(found.chosen, found.ranks, found.ids, found.logprobs)

    def penalise(self, logits: torch.Tensor, entries: PenaltyEntries) -> None:
        penalise(logits, entries)

    def mask(self, logits: torch.Tensor, masks: RowMasks) -> None:
        words = torch.from_numpy(np.ascontiguousarray(masks.words)).to(logits.device)
        rows = torch.from_numpy(np.ascontiguousarray(masks.logits_rows)).to(logits.device)
        self._kernels.apply_bitmask(logits, words, rows=rows)
