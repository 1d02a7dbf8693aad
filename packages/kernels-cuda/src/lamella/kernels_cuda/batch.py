"""The borders of a decode step whose inputs never leave the device: from the state of rows to a batch, and back.

prepare_decode(rows, token_ids, computed_len, ...)      ids, positions, lengths, slots, block tables of the step
... the step ...
advance_decode(rows, computed_len, token_ids, next_ids, spare_row)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lamella.kernels_cuda.device import native


def prepare_decode(
    rows: torch.Tensor,  # [batch] int32
    token_ids: torch.Tensor,  # [num_rows, width] int32
    computed_len: torch.Tensor,  # [num_rows] int32
    tables: Sequence[torch.Tensor],  # per group [num_rows, max_blocks] int32
    block_size: int,
    spare_row: int,
    *,
    ids: torch.Tensor,  # [batch] int32
    positions: torch.Tensor,  # [batch] int32
    seq_lens: torch.Tensor,  # [batch] int32
    slots: Sequence[torch.Tensor],  # per group [batch] int64
    block_tables: Sequence[torch.Tensor],  # per group [batch, max_blocks] int32
) -> None:
    """Fills what a step reads in which every row of the batch computes one token; one kernel for up to four groups.

    position = computed_len[row]; id = token_ids[row, position], at least 0; seq_len = position + 1; slot = where the
    token's keys go, table[row, position // block_size] * block_size + position % block_size, or -1 if that block is 0
    (the null block) or the row is the spare one, which pads batches and may occur many times. Of a block table the
    first ceil(seq_len / block_size) entries are written; the rest keeps what it holds, and paged_decode() does not read
    it. A row that is not there gives length 0, id 0 and slot -1. ValueError names the argument that does not fit.
    """
    native().prepare_decode(
        rows, token_ids, computed_len, list(tables), block_size, spare_row, ids, positions, seq_lens, list(slots),
        list(block_tables),
    )  # fmt: skip


def advance_decode(
    rows: torch.Tensor,  # [batch] int32
    computed_len: torch.Tensor,  # [num_rows] int32, changed
    token_ids: torch.Tensor,  # [num_rows, width] int32, changed
    next_ids: torch.Tensor,  # [batch] int32
    spare_row: int,
) -> None:
    """computed_len[row] += 1, and token_ids[row, computed_len[row]] = next_id, if there is room for it.

    Nothing is written for the spare row, which may occur many times; other rows occur once.
    """
    native().advance_decode(rows, computed_len, token_ids, next_ids, spare_row)
