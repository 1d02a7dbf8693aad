"""Choosing tokens on a device by parameters that lie there: no host value of a step is needed to sample it."""

from __future__ import annotations

import struct
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch

from lamella.runner_v2.sampling.params import RowParams
from lamella.runner_v2.sampling.seeds import SALT_TARGET, key_of
from lamella.runner_v2.writes import Writes

_RECORD = struct.Struct("=ddQfi")
"""Of a row: top-p, min-p, seed, temperature, top-k."""
_ENDS = (0, 2, 4, 6, 7, 8)
"""Where its fields end, in words of 32 bits."""
_PLAIN = _RECORD.pack(1.0, 0.0, 0, 0.0, 0)
"""Greedy: nothing is drawn, so the seed does not matter."""


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

        # one tensor for all, so that a flush writes them with one kernel; columns begin at multiples of 16 bytes
        column = -(-num_rows // 4) * 4
        self._raw = torch.zeros(8 * column, dtype=torch.int32, device=device)
        self._starts = (0, 2 * column, 4 * column, 6 * column, 7 * column)
        types = (torch.float64, torch.float64, torch.int64, torch.float32, torch.int32)
        self._top_p, self._min_p, self._seeds, self._temperature, self._top_k = (
            self._raw.narrow(0, start, num_rows * dtype.itemsize // 4).view(dtype)
            for start, dtype in zip(self._starts, types)
        )
        self._top_p.fill_(1.0)
        self._held = [_PLAIN] * num_rows
        """What the rows have, or will after the next flush."""
        size = kernels.sampling_workspace_bytes(max_logits_rows, vocab_size)
        self._workspace = torch.empty(size, dtype=torch.uint8, device=device)

    def add(self, row: int, params: RowParams) -> None:
        """The row samples by these parameters from the next flush of writes on."""
        top_k = params.top_k if 0 < params.top_k < self._vocab_size else 0
        wanted = _PLAIN
        if not params.greedy:
            wanted = _RECORD.pack(params.top_p, params.min_p, key_of(params.seed), params.temperature, top_k)
        if wanted == self._held[row]:
            return
        self._held[row] = wanted
        words = np.frombuffer(wanted, np.int32)
        for (start, end), column in zip(pairwise(_ENDS), self._starts):
            self._writes.put(self._raw, column + row * (end - start), words[start:end])

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
