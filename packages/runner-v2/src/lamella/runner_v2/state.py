"""Persistent rows of the device: ids and lengths of every running sequence, changed by deltas only.

    all_token_ids[row]:   [ prompt | output ... last | d1 .. dk | -1 .. ]
                            ^ 0                 ^ computed_len         d: drafts that the row holds for its next step
                          [0, computed_len)     in the KV cache

A decoding row knows one id more than it has computed; its next step computes [last, d1 .. dk]. The true computed_len is
on the device; planned_len is the host's upper bound, exact once the last step's result has been read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lamella.runner_v2.step import NewRow
from lamella.runner_v2.writes import DirectWrites, Writes

NO_DRAFT = -1
Ints = npt.NDArray[np.integer[Any]]


class SequenceState:
    """Rows [0, max_num_rows), and on the device a spare one behind them, which pads batches: it never gets an owner,
    its length stays 0, and whatever is written to its ids is of no meaning."""

    def __init__(
        self,
        max_num_rows: int,
        max_len: int,
        max_num_drafts: int,
        device: str,
        keep_host_ids: bool,
        writes: Writes | None = None,
    ) -> None:
        """keep_host_ids: keep every row's ids as a list too, for drafters that read them. writes: how changes reach the
        device; None: directly, in the host's memory."""
        self.max_num_drafts = max_num_drafts
        self.width = max_len + max_num_drafts + 1
        """Of a row of all_token_ids."""
        self.spare_row = max_num_rows
        self.all_token_ids = torch.full((max_num_rows + 1, self.width), NO_DRAFT, dtype=torch.int32, device=device)
        self.computed_len = torch.zeros(max_num_rows + 1, dtype=torch.int32, device=device)
        self._writes = DirectWrites() if writes is None else writes
        self.planned_len = np.zeros(max_num_rows, dtype=np.int32)
        self.known_len = np.zeros(max_num_rows, dtype=np.int32)
        """Ids given when the row got its owner: up to there a step computes a chunk of the prompt."""
        self.prompt_len = np.zeros(max_num_rows, dtype=np.int32)
        self.generations = np.zeros(max_num_rows, dtype=np.int64)
        """0: free."""
        self.host_ids: list[list[int]] | None = [[] for _ in range(max_num_rows)] if keep_host_ids else None
        self._draft_columns = torch.arange(max_num_drafts, dtype=torch.int64, device=device)

    def add(self, new: NewRow) -> None:
        """The row gets an owner. Asserts that it is free and that the ids fit."""
        row, num_ids = new.row, len(new.token_ids)
        assert self.generations[row] == 0, f"row {row} is taken"
        assert new.generation > 0, "generations start at 1"
        assert new.computed_len < num_ids < self.width, f"row {row}: {new.computed_len} of {num_ids} ids computed"
        self.generations[row] = new.generation
        if self.max_num_drafts:  # else nothing is read behind the last id
            self.all_token_ids[row].fill_(NO_DRAFT)
        self._writes.put(self.all_token_ids, row * self.width, new.token_ids)
        self._writes.put(self.computed_len, row, [new.computed_len])
        self.planned_len[row] = new.computed_len
        self.known_len[row] = num_ids
        self.prompt_len[row] = new.prompt_len
        if self.host_ids is not None:
            self.host_ids[row] = list(new.token_ids)

    def remove(self, row: int, generation: int) -> bool:
        """The row becomes free; False, and no effect, if its owner is another one by now."""
        if self.generations[row] != generation:
            return False
        self.generations[row] = 0
        return True

    def advance(
        self,
        rows: torch.Tensor,  # [R] int64 device rows
        steps: torch.Tensor,  # [R] int32 tokens of the step that count as computed
        sampled: torch.Tensor,  # [S] int64 index into rows of those that sampled
        next_ids: torch.Tensor,  # [S] int32
    ) -> None:
        """computed_len grows by steps, and the next id takes its place behind; accepted drafts lie there already."""
        computed = self.computed_len.index_select(0, rows) + steps
        self.computed_len[rows] = computed
        self.all_token_ids[rows[sampled], computed[sampled].long()] = next_ids

    def put_drafts(self, rows: torch.Tensor, drafts: torch.Tensor) -> None:  # [S] int64, [S, <= max_num_drafts] int32
        """The rows now hold these drafts (-1: none) behind their last id, in place of older ones."""
        assert drafts.shape[1] <= self.max_num_drafts, f"{drafts.shape[1]} drafts, {self.max_num_drafts} at most"
        if self.all_token_ids.device.type == "cpu":  # numpy begins such small work several times as fast
            ids, computed, places = (t.numpy() for t in (self.all_token_ids, self.computed_len, rows))
            for row, start, held_ids in zip(places, computed[places] + 1, drafts.numpy()):
                ids[row, start : start + self.max_num_drafts] = NO_DRAFT
                ids[row, start : start + len(held_ids)] = held_ids
            return
        columns = self.computed_len.index_select(0, rows).long().unsqueeze(1) + 1 + self._draft_columns
        held = torch.full((len(rows), self.max_num_drafts), NO_DRAFT, dtype=torch.int32, device=drafts.device)
        held[:, : drafts.shape[1]] = drafts
        self.all_token_ids[rows.unsqueeze(1), columns] = held

    def plan_ahead(self, rows: Ints, query_lens: Ints) -> None:  # [R] device rows, [R]
        """A step is launched: every draft in it counts as accepted until its result is read."""
        self.planned_len[rows] += query_lens

    def commit(self, rows: Ints, num_rejected: Ints) -> None:  # [R] device rows, [R]
        """The result of a step has been read."""
        self.planned_len[rows] -= num_rejected

    def append_host_ids(self, rows: Sequence[int], counts: Sequence[int], token_ids: Sequence[int]) -> None:
        """Emitted ids, one row's after another's."""
        assert self.host_ids is not None
        end = 0
        for row, count in zip(rows, counts, strict=True):
            start, end = end, end + count
            self.host_ids[row].extend(token_ids[start:end])
