"""Choosing tokens on a device by parameters that lie there: no host value of a step is needed to sample it."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

from lamella.runner_v2.sampling.params import RowParams
from lamella.runner_v2.sampling.seeds import SALT_TARGET, key_of
from lamella.runner_v2.writes import Writes


class ChoiceKernel(Protocol):
    """The functions of lamella.kernels_cuda that are needed here."""

    def sample(self, *args: Any, **options: Any) -> Any: ...
    def sampling_workspace_bytes(self, num_rows: int, vocab_size: int) -> int: ...


class DeviceChoice:
    """Temperature, top-k, top-p, min-p and seed of every device row. Spare rows are greedy."""

    def __init__(
        self, kernels: ChoiceKernel, vocab_size: int, num_rows: int, max_logits_rows: int, device: str, writes: Writes
    ) -> None:
        """num_rows: spare ones included. max_logits_rows: most rows of logits of one step."""
        self._kernels = kernels
        self._vocab_size = vocab_size
        self._writes = writes

        def table(dtype: torch.dtype, value: float) -> tuple[torch.Tensor, torch.Tensor]:
            typed = torch.full((num_rows,), value, dtype=dtype, device=device)
            return typed, typed.view(torch.int32)

        self._temperature, self._temperature_raw = table(torch.float32, 0.0)
        self._top_k, self._top_k_raw = table(torch.int32, 0)
        self._top_p, self._top_p_raw = table(torch.float64, 1.0)
        self._min_p, self._min_p_raw = table(torch.float64, 0.0)
        self._seeds, self._seeds_raw = table(torch.int64, 0)
        size = kernels.sampling_workspace_bytes(max_logits_rows, vocab_size)
        self._workspace = torch.empty(size, dtype=torch.uint8, device=device)

    def add(self, row: int, params: RowParams) -> None:
        """The row samples by these parameters from the next flush of writes on."""
        greedy = params.greedy
        top_k = params.top_k if 0 < params.top_k < self._vocab_size and not greedy else 0
        for raw, words, value in (
            (self._temperature_raw, 1, np.float32(0.0 if greedy else params.temperature)),
            (self._top_k_raw, 1, np.int32(top_k)),
            (self._top_p_raw, 2, np.float64(1.0 if greedy else params.top_p)),
            (self._min_p_raw, 2, np.float64(0.0 if greedy else params.min_p)),
            (self._seeds_raw, 2, np.uint64(key_of(params.seed))),
        ):
            self._writes.put(raw, row * words, np.atleast_1d(value).view(np.int32))

    def sample(
        self,
        logits: torch.Tensor,  # [L, V]
        rows: torch.Tensor,  # [L] int32 device rows
        positions: torch.Tensor,  # [L] int32 of the chosen tokens
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids [L] int32, status [L] uint8), see rows.py."""
        chosen = self._kernels.sample(
            logits,
            self._temperature,
            self._top_k,
            self._top_p,
            self._min_p,
            self._seeds,
            positions,
            rows=rows,
            salt=SALT_TARGET,
            workspace=self._workspace,
        )
        return chosen.ids, chosen.status
