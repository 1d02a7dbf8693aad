"""Builds the batch of a step.

    Work ──layout()──> BatchLayout    what the host knows: who, how many tokens, where in the batch; kept while it holds
         ──build()───> StepBatch      what only the device knows: ids, positions, lengths, slots; every step

A row's tokens lie together, in the order of Work; for a device, rows of one token come first (BatchLayout.order):

    row i:   [ query_start[i] ........ query_start[i + 1] )        the last verify_lens[i] of them are drafts
                               [ 1 + verify_lens[i]       )        have logits, if the row samples in this step
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lamella.runner_v2.block_tables import BlockTables
from lamella.runner_v2.inputs import InputBatch
from lamella.runner_v2.sampling.rows import LogitsRows
from lamella.runner_v2.state import NO_DRAFT, Ints, SequenceState
from lamella.runner_v2.step import Work
from lamella.runner_v2.writes import DirectWrites, Writes


class BatchLayout(NamedTuple):
    """The part of a batch that stays while the same rows compute the same numbers of tokens. work is in batch order.

    R rows, T tokens, S rows that sample (all but unfinished prompt chunks), L logits rows.
    """

    work: Work
    num_tokens: int
    num_rows: int
    max_query_len: int
    max_verify_len: int
    num_single: int
    """The first so many rows have one token, and it is no draft."""
    order: Ints | None
    """[R] place in the step's Work of each batch row; None: the same."""
    # on the host
    rows: Ints  # [R] device rows
    query_lens: Ints  # [R]
    verify_lens: Ints  # [R]
    sampled: Ints  # [S] index into rows
    samples: npt.NDArray[np.bool_]  # [R] the row samples
    logits_owner: Ints  # [L] index into rows
    logits_offset: Ints  # [L] place of the logits row's token in its row's query
    draft_idx: Ints  # [L] drafts before the token that the logits row chooses
    sampled_start: Ints  # [S + 1] logits rows of each sampling row
    # on the device
    device_rows: torch.Tensor  # [R] int64, to index with
    narrow_rows: torch.Tensor  # [R] int32, the same
    device_query_lens: torch.Tensor  # [R] int32
    device_verify_lens: torch.Tensor  # [R] int32
    query_start: torch.Tensor  # [R + 1] int32
    owner: torch.Tensor | None  # [T] int64 index into rows; None: one token a row
    offset: torch.Tensor  # [T] int32 place of each token in its row's query
    ids_base: torch.Tensor  # [T] int64 where the token's row begins in the flattened ids
    table_base: torch.Tensor  # [T] int64 likewise in a flattened block table
    logits_idx: torch.Tensor  # [L] int32
    logits_start: torch.Tensor  # [R + 1] int32
    logits_rows: torch.Tensor  # [L] int32 device row of each logits row
    device_sampled: torch.Tensor  # [S] int64 index into rows
    device_sampled_start: torch.Tensor  # [S + 1] int32
    draft_tokens: torch.Tensor  # [S, max_verify_len] int64 index of each draft's token
    is_draft: torch.Tensor  # [S, max_verify_len] bool


class StepBatch(NamedTuple):
    """A batch, and what is needed to judge its drafts."""

    inputs: InputBatch
    drafts: torch.Tensor  # [S, max_verify_len] int32, -1: none


class BatchBuilder:
    """Lays steps out. Reads the rows' state and tables, changes neither."""

    def __init__(
        self,
        state: SequenceState,
        tables: BlockTables,
        max_num_tokens: int,
        device: str,
        writes: Writes | None = None,
        singles_first: bool = False,
    ) -> None:
        """writes: how arrays reach the device; None: directly. singles_first: rows of one token to the front."""
        self._state = state
        self._tables = tables
        self._max_num_tokens = max_num_tokens
        self._device = device
        self._writes = DirectWrites() if writes is None else writes
        self._singles_first = singles_first
        self._given: Work | None = None
        self._last: BatchLayout | None = None

    def layout(self, work: Work | None) -> BatchLayout:
        """The layout of a step; None: the work of the step before. Constant time while nothing changes."""
        last = self._last
        if work is None:
            assert self._given is not None, "the first step must say what to compute"
            work = self._given
        if last is None or not (work is self._given or work == self._given) or self._samples_change(last):
            self._given = work
            last = self._last = self._lay_out(work)
        reach = self._state.planned_len[last.rows] + last.query_lens
        assert (reach <= self._tables.capacity[:, last.rows]).all(), "a row lacks blocks for its tokens"
        return last

    def build(self, layout: BatchLayout) -> StepBatch:
        """Ids, positions, lengths and slots, all derived on the device from the rows."""
        state, tables = self._state, self._tables
        start = state.computed_len.index_select(0, layout.device_rows)
        positions = (start if layout.owner is None else start.index_select(0, layout.owner)) + layout.offset
        wide = positions.long()
        ids = state.all_token_ids.view(-1).index_select(0, wide + layout.ids_base)
        max_seq_len = int((state.planned_len[layout.rows] + layout.query_lens).max()) if layout.num_rows else 0
        columns = torch.div(wide, tables.block_size, rounding_mode="floor")
        offsets = wide - columns * tables.block_size
        entries = columns + layout.table_base
        groups = range(len(tables))
        inputs = InputBatch(
            num_tokens=layout.num_tokens,
            num_rows=layout.num_rows,
            max_query_len=layout.max_query_len,
            max_seq_len=max_seq_len,
            rows=layout.narrow_rows,
            token_ids=ids.clamp(min=0) if layout.max_verify_len else ids,  # a missing draft needs some id
            positions=positions,
            query_start=layout.query_start,
            seq_lens=start + layout.device_query_lens,
            block_tables=tuple(tables.gather(g, layout.device_rows, max_seq_len) for g in groups),
            slot_mapping=tuple(tables.slots(g, entries, offsets) for g in groups),
            logits_idx=layout.logits_idx,
            logits_start=layout.logits_start,
            num_single=layout.num_single,
        )
        drafts = layout.draft_tokens
        if layout.max_verify_len:
            drafts = torch.where(layout.is_draft, ids[layout.draft_tokens], NO_DRAFT)
        return StepBatch(inputs, drafts)

    def logits_rows(self, layout: BatchLayout, drafts: torch.Tensor) -> LogitsRows:
        """The logits rows as the sampler wants them. Reads the drafts back if there are any."""
        start = self._state.planned_len[layout.rows]
        positions = (start[layout.logits_owner] + layout.logits_offset + 1).astype(np.int32)
        rows = layout.rows[layout.logits_owner].astype(np.int32)
        draft_idx = layout.draft_idx.astype(np.int32)
        width = layout.max_verify_len
        if width == 0:
            return LogitsRows(rows, positions, draft_idx, draft_idx, np.empty(0, np.int32))
        place = np.repeat(np.arange(len(layout.sampled)), np.diff(layout.sampled_start))
        flat = np.maximum(drafts.cpu().numpy().reshape(-1), 0)  # what follows a missing draft is discarded
        return LogitsRows(rows, positions, draft_idx, (place * width).astype(np.int32), flat)

    def _samples_change(self, layout: BatchLayout) -> bool:
        """Would other rows sample now? A prompt's last chunk may be as long as the one before."""
        reach = self._state.planned_len[layout.rows] + layout.query_lens
        return not np.array_equal(reach >= self._state.known_len[layout.rows], layout.samples)

    def _lay_out(self, work: Work) -> BatchLayout:
        state = self._state
        order = self._order(work)
        if order is not None:
            work = Work(*(tuple(column[i] for i in order) for column in work))
        rows = np.asarray(work.rows, np.int64)
        query_lens = np.asarray(work.query_lens, np.int32)
        verify_lens = np.asarray(work.verify_lens, np.int32)
        num_rows, num_tokens = len(rows), int(query_lens.sum())
        assert num_tokens <= self._max_num_tokens, f"{num_tokens} tokens in a step, {self._max_num_tokens} at most"
        assert (state.generations[rows] > 0).all(), "work on a free row"
        reach = state.planned_len[rows] + query_lens
        samples = reach >= state.known_len[rows]
        assert (reach <= state.width - 1).all(), "a row outgrows the context"
        query_start = _starts(query_lens)
        owner = np.repeat(np.arange(num_rows), query_lens)
        offset = np.arange(num_tokens) - query_start[owner]

        logits_lens = np.where(samples, verify_lens + 1, 0)
        logits_start = _starts(logits_lens)
        logits_owner = np.repeat(np.arange(num_rows), logits_lens)
        draft_idx = np.arange(logits_start[-1]) - logits_start[logits_owner]
        logits_offset = (query_lens - 1 - verify_lens)[logits_owner] + draft_idx

        sampled = np.flatnonzero(samples)
        max_verify_len = int(verify_lens.max(initial=0))
        first_draft = (query_start[:-1] + query_lens - verify_lens)[sampled]
        draft_columns = np.arange(max_verify_len)
        is_draft = draft_columns < verify_lens[sampled][:, None]
        draft_tokens = np.where(is_draft, first_draft[:, None] + draft_columns, 0)
        sampled_start = _starts(logits_lens[sampled])

        is_single = (query_lens == 1) & (verify_lens == 0)
        on_device = self._upload(
            device_rows=(rows, np.int64),
            narrow_rows=(rows, np.int32),
            device_query_lens=(query_lens, np.int32),
            device_verify_lens=(verify_lens, np.int32),
            query_start=(query_start, np.int32),
            owner=(owner, np.int64),
            offset=(offset, np.int32),
            ids_base=(rows[owner] * state.width, np.int64),
            table_base=(rows[owner] * self._tables.max_blocks, np.int64),
            logits_idx=(query_start[:-1][logits_owner] + logits_offset, np.int32),
            logits_start=(logits_start, np.int32),
            logits_rows=(rows[logits_owner], np.int32),
            device_sampled=(sampled, np.int64),
            device_sampled_start=(sampled_start, np.int32),
            draft_tokens=(draft_tokens, np.int64),
            is_draft=(is_draft, np.bool_),
        )
        if num_tokens == num_rows:
            on_device["owner"] = None
        return BatchLayout(
            work=work,
            num_tokens=num_tokens,
            num_rows=num_rows,
            max_query_len=int(query_lens.max(initial=0)),
            max_verify_len=max_verify_len,
            num_single=num_rows if is_single.all() else int(np.argmin(is_single)),
            order=order,
            rows=rows,
            query_lens=query_lens,
            verify_lens=verify_lens,
            sampled=sampled,
            samples=samples,
            logits_owner=logits_owner,
            logits_offset=logits_offset,
            draft_idx=draft_idx,
            sampled_start=sampled_start,
            **on_device,
        )

    def _order(self, work: Work) -> Ints | None:
        """Rows of one token before the others; None: they are, or it does not matter."""
        if not self._singles_first:
            return None
        later = (np.asarray(work.query_lens) != 1) | (np.asarray(work.verify_lens) != 0)
        if (later[:-1] <= later[1:]).all():
            return None
        return np.argsort(later, kind="stable")

    def _upload(self, **arrays: tuple[Ints | npt.NDArray[np.bool_], type[np.generic]]) -> dict[str, Any]:
        """The arrays on the device, in the given types."""
        cast = [np.ascontiguousarray(array, dtype) for array, dtype in arrays.values()]
        return dict(zip(arrays, self._writes.upload(cast)))


def _starts(lens: Ints) -> Ints:
    """[0, lens[0], lens[0] + lens[1], ...]"""
    starts = np.zeros(len(lens) + 1, np.int64)
    np.cumsum(lens, out=starts[1:])
    return starts
