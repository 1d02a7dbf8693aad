"""Batches in which every row computes one token, at addresses that do not change: what recorded steps read.

    sizes      1 | 2 | 4 | 8 | 16 ...      a batch of 5 rows runs as one of 8: spare rows fill it up
    rows       [ 7 | 0 | 3 | 12 | 5 | spare | spare | spare ]      changed by staged writes when a step has other rows

Ids, positions, lengths and slots are derived on the device from the rows' state, so that a step in which no row
changes moves nothing over the link.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from lamella.runner_v2.block_tables import BlockTables
from lamella.runner_v2.inputs import InputBatch
from lamella.runner_v2.kv_cache import NULL_BLOCK
from lamella.runner_v2.state import Ints, SequenceState
from lamella.runner_v2.writes import Writes


class DecodeStep(NamedTuple):
    """A batch of one token a row, spare rows included."""

    inputs: InputBatch
    next_positions: torch.Tensor  # [size] int32 of the tokens that are chosen


class DecodeBatches:
    """Builds such batches, and advances their rows, in a few kernels that can be recorded."""

    def __init__(
        self,
        state: SequenceState,
        tables: BlockTables,
        writes: Writes,
        sizes: Sequence[int],
        max_model_len: int,
        kernels: Any | None = None,
    ) -> None:
        """kernels: a namespace with prepare_decode and advance_decode; None: torch's operations do it."""
        self.sizes = tuple(sorted(sizes))
        self._state = state
        self._tables = tables
        self._writes = writes
        self._max_model_len = max_model_len
        self._kernels = kernels
        device, most = state.computed_len.device, max(self.sizes)
        self._rows = torch.full((most,), state.spare_row, dtype=torch.int32, device=device)
        self._placed = np.full(most, state.spare_row, np.int32)
        """What _rows holds, or will after the next flush."""
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._tables_of_step = [
            torch.full((most, tables.max_blocks), NULL_BLOCK, dtype=torch.int32, device=device)
            for _ in range(len(tables))
        ]

    def size_for(self, num_rows: int) -> int | None:
        """The smallest batch that holds so many rows; None: there is none."""
        return next((size for size in self.sizes if size >= num_rows), None)

    def place(self, rows: Ints, size: int) -> None:  # [R] device rows
        """The next batch of this size consists of these rows; takes effect with the next flush of writes."""
        wanted = np.full(size, self._state.spare_row, np.int32)
        wanted[: len(rows)] = rows
        if not np.array_equal(wanted, self._placed[:size]):
            self._placed[:size] = wanted
            self._writes.put(self._rows, 0, wanted)

    def build(self, size: int) -> DecodeStep:
        """The batch of the rows that were placed."""
        rows = self._rows[:size]
        if self._kernels is not None:
            ids, positions, seq_lens, slots, block_tables = self._prepare(rows)
        else:
            ids, positions, seq_lens, slots, block_tables = self._derive(rows)
        inputs = InputBatch(
            num_tokens=size,
            num_rows=size,
            max_query_len=1,
            max_seq_len=self._max_model_len,
            rows=rows,
            token_ids=ids,
            positions=positions,
            query_start=self._starts[: size + 1],
            seq_lens=seq_lens,
            block_tables=tuple(block_tables),
            slot_mapping=tuple(slots),
            logits_idx=self._starts[:size],
            logits_start=self._starts[: size + 1],
            num_single=size,
        )
        return DecodeStep(inputs, seq_lens)  # the next token's position is the length now

    def advance(self, rows: torch.Tensor, next_ids: torch.Tensor) -> None:  # [size] int32 each
        """Every row but spare ones has computed one token more, and next_ids lie behind them."""
        state = self._state
        if self._kernels is not None:
            self._kernels.advance_decode(rows, state.computed_len, state.all_token_ids, next_ids, state.spare_row)
            return
        wide = rows.long()
        lens = state.computed_len.index_select(0, wide) + (wide != state.spare_row)
        state.computed_len.index_copy_(0, wide, lens.to(torch.int32))
        # a spare row stays at length 0 and gets its own first id back
        places = wide * state.width + lens
        kept = state.all_token_ids.view(-1).index_select(0, places)
        ids = torch.where(wide == state.spare_row, kept, next_ids)
        state.all_token_ids.view(-1).index_copy_(0, places, ids)

    def _prepare(self, rows: torch.Tensor) -> tuple[Any, ...]:
        assert self._kernels is not None
        size, tables, state = len(rows), self._tables, self._state

        def ints(dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=rows.device)

        ids, positions, seq_lens = ints(), ints(), ints()
        slots = [ints(torch.int64) for _ in range(len(tables))]
        block_tables = [table[:size] for table in self._tables_of_step]
        self._kernels.prepare_decode(
            rows,
            state.all_token_ids,
            state.computed_len,
            [tables[group] for group in range(len(tables))],
            tables.block_size,
            state.spare_row,
            ids=ids,
            positions=positions,
            seq_lens=seq_lens,
            slots=slots,
            block_tables=block_tables,
        )
        return ids, positions, seq_lens, slots, block_tables

    def _derive(self, rows: torch.Tensor) -> tuple[Any, ...]:
        tables, state = self._tables, self._state
        wide = rows.long()
        positions = state.computed_len.index_select(0, wide)
        places = positions.long()
        ids = state.all_token_ids.view(-1).index_select(0, wide * state.width + places).clamp(min=0)
        columns = torch.div(places, tables.block_size, rounding_mode="floor")
        offsets = places - columns * tables.block_size
        entries = columns + wide * tables.max_blocks
        slots = [tables.slots(group, entries, offsets) for group in range(len(tables))]
        block_tables = [tables[group].index_select(0, wide) for group in range(len(tables))]
        return ids, positions, positions + 1, slots, block_tables
