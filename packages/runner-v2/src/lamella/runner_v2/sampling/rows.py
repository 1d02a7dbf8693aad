"""Rows of logits: which sequence each belongs to, what lies before it, and what came of it.

A sequence that checks K drafts d1 .. dK has K + 1 logits rows in one step. Row i chooses the token behind the prefix

    prompt | output | d1 .. di

so every transform sees output + drafts before the row as the row's output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from lamella.runner_v2.sampling.params import RowParams
from lamella.runner_v2.step import TokenLogprobs

IntArray = npt.NDArray[np.int32]

OK = 0
NOT_A_NUMBER = 1
INFINITE = 2
NONE_ALLOWED = 3

REASONS = {
    NOT_A_NUMBER: "the logits contain NaN",
    INFINITE: "the logits contain +inf",
    NONE_ALLOWED: "no token is allowed: every logit is -inf",
}


class LogitsRows(NamedTuple):
    """The L logits rows of a step, on the host. The rows of one sequence follow one another, by draft index.

    The drafts before logits row i are draft_ids[draft_start[i] : draft_start[i] + draft_idx[i]].
    """

    rows: IntArray  # [L] device row
    positions: IntArray  # [L] absolute position of the token that the row chooses
    draft_idx: IntArray  # [L] how many drafts of this step lie before the chosen token
    draft_start: IntArray  # [L] where the drafts of the row's sequence begin in draft_ids
    draft_ids: IntArray  # [D]

    @classmethod
    def of(
        cls,
        rows: Sequence[int] | IntArray,
        first_positions: Sequence[int] | IntArray,
        drafts: Sequence[Sequence[int]] | None = None,
    ) -> LogitsRows:
        """Rows of sequences in batch order: sequence i has 1 + len(drafts[i]) of them, and the first one chooses the
        token at first_positions[i]."""
        rows = np.asarray(rows, np.int32)
        first = np.asarray(first_positions, np.int32)
        if drafts is None or not any(drafts):
            zeros = np.zeros(len(rows), np.int32)
            return cls(rows, first, zeros, zeros, np.empty(0, np.int32))
        lens = np.fromiter((len(d) for d in drafts), np.int32, len(rows))
        owner = np.repeat(np.arange(len(rows), dtype=np.int32), lens + 1)
        start = np.concatenate(([0], np.cumsum(lens[:-1]))).astype(np.int32)
        first_row = np.concatenate(([0], np.cumsum(lens[:-1] + 1))).astype(np.int32)
        draft_idx = np.arange(len(owner), dtype=np.int32) - first_row[owner]
        flat = np.fromiter((x for d in drafts for x in d), np.int32, int(lens.sum()))
        return cls(rows[owner], first[owner] + draft_idx, draft_idx, start[owner], flat)

    def prefix(self, i: int) -> list[int]:
        """Drafts before logits row i."""
        start = int(self.draft_start[i])
        return [int(x) for x in self.draft_ids[start : start + int(self.draft_idx[i])]]


class SampleResult(NamedTuple):
    """What was chosen at each logits row."""

    ids: torch.Tensor  # [L] int32; 0 where the row failed
    status: torch.Tensor  # [L] uint8: OK or a key of REASONS
    logprobs: list[TokenLogprobs | None] | None = None
    """Per logits row; None where the row did not ask. Of the raw logits."""

    @property
    def statuses(self) -> list[tuple[int, int]]:
        """(index of the logits row, status) of those that failed, to be read on the host."""
        if not self.status.any():
            return []
        return [(i, s) for i, s in enumerate(self.status.tolist()) if s != OK]

    @property
    def failed(self) -> list[tuple[int, str]]:
        """The same with reasons."""
        return [(i, REASONS[s]) for i, s in self.statuses]


class RowTransform(Protocol):
    """Changes the logits of the rows that asked for it, in place, and no others."""

    num_active: int
    """Device rows that use it; apply and advance are not called while it is 0."""

    def add(self, row: int, params: RowParams, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """The device row got a new owner."""

    def remove(self, row: int) -> None:
        """The device row is free; no effect where it was not added."""

    def touches(self, layout: LogitsRows) -> npt.NDArray[np.bool_]:
        """[L] which logits rows it may change."""

    def apply(self, logits: torch.Tensor, layout: LogitsRows) -> None:
        """Change logits [L, V] float32 in place."""

    def advance(self, row: int, token_ids: Sequence[int]) -> None:
        """The row's output grew by these ids (accepted ones only)."""
