"""What the choice of a token depends on besides its logits: a handful of numbers per device row."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lamella.runner_v2.sampling.params import RowParams
from lamella.runner_v2.sampling.rows import LogitsRows
from lamella.runner_v2.sampling.seeds import SALT_TARGET, key_of


class Choice(NamedTuple):
    """Parameters of L logits rows, ready for a kernel. Off values: temperature 0 (greedy), log_min_p -inf, top_k 0,
    top_p 1."""

    temperature: npt.NDArray[np.float32]  # [L]
    inverse_temperature: npt.NDArray[np.float32]  # [L] 1 / temperature, rounded once
    log_min_p: npt.NDArray[np.float64]  # [L]
    top_k: npt.NDArray[np.int32]  # [L]
    top_p: npt.NDArray[np.float64]  # [L]
    keys: npt.NDArray[np.uint64]  # [L] of the noise
    positions: npt.NDArray[np.int32]  # [L]
    salt: int = SALT_TARGET


class ChoiceTable:
    """The numbers of every device row. Temperature is not divided into the logits: the order of tokens is that of the
    logits at any temperature, so only masses and scores need it, and no logit overflows or ties by rounding."""

    def __init__(self, max_num_rows: int) -> None:
        self.num_random = 0
        """Device rows that are not greedy."""
        self._random = np.zeros(max_num_rows, bool)
        self._temperature = np.zeros(max_num_rows, np.float32)
        self._inverse = np.zeros(max_num_rows, np.float32)
        self._log_min_p = np.full(max_num_rows, -np.inf, np.float64)
        self._top_k = np.zeros(max_num_rows, np.int32)
        self._top_p = np.ones(max_num_rows, np.float64)
        self._keys = np.zeros(max_num_rows, np.uint64)

    def add(self, row: int, params: RowParams, vocab_size: int) -> None:
        """The row samples by these parameters from now on."""
        self.remove(row)
        if params.greedy:
            return
        self.num_random += 1
        self._random[row] = True
        temperature = np.float32(params.temperature)
        self._temperature[row] = temperature
        self._inverse[row] = np.float32(1.0) / temperature
        self._log_min_p[row] = math.log(params.min_p) if params.min_p > 0.0 else -math.inf
        self._top_k[row] = params.top_k if 0 < params.top_k < vocab_size else 0
        self._top_p[row] = params.top_p
        self._keys[row] = key_of(params.seed)

    def remove(self, row: int) -> None:
        """The row is greedy from now on."""
        if self._random[row]:
            self.num_random -= 1
            self._random[row] = False
            self._temperature[row] = 0.0

    def any_random(self, layout: LogitsRows) -> bool:
        """Whether any of these rows is not greedy."""
        return self.num_random > 0 and bool(self._random[layout.rows].any())

    def gather(self, layout: LogitsRows) -> Choice:
        """The parameters of each logits row."""
        rows = layout.rows
        return Choice(
            self._temperature[rows],
            self._inverse[rows],
            self._log_min_p[rows],
            self._top_k[rows],
            self._top_p[rows],
            self._keys[rows],
            np.ascontiguousarray(layout.positions, np.int32),
        )
