"""Contract of `embed`: look ids up in a table.

Site: weights = the table's format; params:
    vocab, hidden   rows and width of this rank's table
    scale           factor on every row, or None
    tied            the table is the language model head too

    pack([table]) -> named tensors
    bind(packed) -> handle
    run(ids [T] int32, handle) -> [T, hidden]    in the site's dtype, a fresh tensor; ids are in [0, vocab)

tied: the same provider's `logits` op may be bound to these packed tensors plus a norm weight, without packing the table
again. So where a provider multiplies by another layout than it looks rows up in, embed packs both.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from lamella.runner_v2.ops.spec import Op


class DenseTable(NamedTuple):
    """Handle of the reference."""

    weight: torch.Tensor  # [vocab, hidden]
    scale: float | None
    dtype: torch.dtype


def embed(ids: torch.Tensor, handle: DenseTable) -> torch.Tensor:
    """Rows of the table, scaled in the result's dtype."""
    rows = F.embedding(ids, handle.weight).to(handle.dtype)
    return rows if handle.scale is None else rows * handle.scale


EMBED = Op("embed", embed, "rows of the embedding table")
