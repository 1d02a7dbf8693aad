"""Allowed ids, logit bias and min_tokens: edits of single tokens that do not depend on which tokens came before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lamella.runner_v2.sampling.params import RowParams
from lamella.runner_v2.sampling.rows import LogitsRows


class _Edits(NamedTuple):
    allowed_ids: torch.Tensor | None  # [A] int64
    bias_ids: torch.Tensor | None  # [B] int64, each id once
    bias: torch.Tensor | None  # [B] float32
    stop_ids: torch.Tensor | None  # [S] int64
    min_len: int
    """Position of the first token that may be a stop id."""


class Bias:
    """All ids but the allowed ones to -inf, then bias added, then stop ids to -inf where the row chooses one of the
    first min_tokens output tokens (drafts before the row count, because the position counts them).

    A row that has emitted min_tokens forgets its stop ids, and is left alone from then on if it had nothing else.
    """

    def __init__(self, vocab_size: int, max_num_rows: int, device: torch.device) -> None:
        self.num_active = 0
        self._vocab_size = vocab_size
        self._device = device
        self._active = np.zeros(max_num_rows, bool)
        self._edits: dict[int, _Edits] = {}
        self._len: dict[int, int] = {}
        """Tokens of the rows that hold stop ids back: the position of their next one."""

    def add(self, row: int, params: RowParams, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        self.remove(row)
        # an end id outside the vocabulary cannot be chosen anyway
        held_back = params.min_tokens > len(output_ids)
        stop_ids = [i for i in params.stop_ids if i < self._vocab_size] if held_back else []
        if params.allowed_ids is None and not params.logit_bias and not stop_ids:
            return
        bias: dict[int, float] = {}
        for token_id, value in params.logit_bias:
            bias[token_id] = bias.get(token_id, 0.0) + value
        for name, ids in (("logit_bias", tuple(bias)), ("allowed_ids", params.allowed_ids or ())):
            assert all(0 <= i < self._vocab_size for i in ids), f"{name} has ids outside [0, {self._vocab_size})"
        self._edits[row] = _Edits(
            self._ids(params.allowed_ids) if params.allowed_ids is not None else None,
            self._ids(tuple(bias)) if bias else None,
            torch.tensor(list(bias.values()), dtype=torch.float32, device=self._device) if bias else None,
            self._ids(stop_ids) if stop_ids else None,
            len(prompt_ids) + params.min_tokens,
        )
        if stop_ids:
            self._len[row] = len(prompt_ids) + len(output_ids)
        self._active[row] = True
        self.num_active += 1

    def remove(self, row: int) -> None:
        self._len.pop(row, None)
        if self._edits.pop(row, None) is not None:
            self._active[row] = False
            self.num_active -= 1

    def touches(self, layout: LogitsRows) -> npt.NDArray[np.bool_]:
        return self._active[layout.rows]

    def apply(self, logits: torch.Tensor, layout: LogitsRows) -> None:
        for i in np.flatnonzero(self._active[layout.rows]).tolist():
            edits = self._edits[int(layout.rows[i])]
            row = logits[i]
            if edits.allowed_ids is not None:
                kept = row[edits.allowed_ids]
                row.fill_(-torch.inf)
                row[edits.allowed_ids] = kept
            if edits.bias_ids is not None and edits.bias is not None:
                row[edits.bias_ids] += edits.bias
            if edits.stop_ids is not None and int(layout.positions[i]) < edits.min_len:
                row[edits.stop_ids] = -torch.inf

    def advance(self, row: int, token_ids: Sequence[int]) -> None:
        if row not in self._len:
            return
        self._len[row] += len(token_ids)
        edits = self._edits[row]
        if self._len[row] < edits.min_len:
            return
        if edits.allowed_ids is None and edits.bias_ids is None:
            self.remove(row)
        else:
            del self._len[row]
            self._edits[row] = edits._replace(stop_ids=None)

    def _ids(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=self._device)
