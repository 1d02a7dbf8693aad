"""Cuts a tensor for one tensor-parallel rank.

rows     [ r0 | r1 | r2 | r3 ]      output dimension, whole units; few units are replicated on neighbours
columns  each row cut alike         input dimension, whole units and whole blocks of the weight format
vocab    [ r0 | r1 | r2 | r3 0 ]    rows, the last pieces filled up with zero rows
first    rank 0 all, others zeros
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from lamella.runner_v2.errors import ConfigError
from lamella.runner_v2.quant.scheme import WeightFormat
from lamella.runner_v2.weights.slots import Part, RawPart


class Span(NamedTuple):
    """Half-open range of one dimension that a rank holds, and the length it is filled up to with zeros."""

    start: int
    stop: int
    padded_len: int


def vocab_rows(vocab_size: int, tp_size: int) -> int:
    """Rows of the embedding and of the head on each rank, zero rows at the end included."""
    return -(-vocab_size // tp_size)


def span_of(part: Part, format: WeightFormat, tp_rank: int, tp_size: int) -> Span | None:
    """What the rank holds of the dimension along which the part is cut (rows, vocab: 0; columns: the last).

    None where nothing is cut. ConfigError, naming the tensor, where tp_size does not divide it.
    """
    kind, unit_len = part.shard
    if tp_size == 1 or kind in ("replicated", "first"):
        return None
    length = part.shape[-1] if kind == "columns" else part.shape[0]
    if kind == "vocab":
        rows = vocab_rows(length, tp_size)
        return Span(min(tp_rank * rows, length), min((tp_rank + 1) * rows, length), rows)
    num_units = length // unit_len
    if kind == "rows" and num_units < tp_size and tp_size % num_units == 0:
        start = tp_rank // (tp_size // num_units) * unit_len
        return Span(start, start + unit_len, unit_len)
    if num_units % tp_size:
        what = f"{num_units} heads of {unit_len}" if unit_len > 1 else f"{length} {kind}"
        raise ConfigError(f"tensor parallel size {tp_size} does not divide {part.key}: {what}")
    piece = num_units // tp_size * unit_len
    if kind == "columns" and piece % format.block_len:
        raise ConfigError(
            f"tensor parallel size {tp_size} cuts {part.key} ({length} columns) into pieces of {piece}, "
            f"which is not a multiple of the block length {format.block_len} of {format.name}"
        )
    return Span(tp_rank * piece, (tp_rank + 1) * piece, piece)


def cut(
    part: Part,
    format: WeightFormat,
    data: torch.Tensor,  # dense: part.shape; quantised: uint8 [rows, row_bytes] of the whole tensor
    tp_rank: int,
    tp_size: int,
) -> RawPart:
    """The rank's piece, contiguous. A view of data where the piece lies in one stretch."""
    if part.shard.kind == "first" and tp_rank > 0:
        return RawPart(part.key, format, part.shape, torch.zeros_like(data))
    span = span_of(part, format, tp_rank, tp_size)
    if span is None:
        return RawPart(part.key, format, part.shape, data.contiguous())
    start, stop, padded_len = span
    if part.shard.kind == "columns":
        lo, hi = (_byte_offset(format, at) for at in (start, stop)) if format.quantised else (start, stop)
        return RawPart(part.key, format, (*part.shape[:-1], stop - start), data[..., lo:hi].contiguous())
    rows = data[start:stop]
    if padded_len > stop - start:
        # all formats read zero bytes as zero weights
        rows = torch.cat([rows, rows.new_zeros(padded_len - (stop - start), *data.shape[1:])])
    return RawPart(part.key, format, (padded_len, *part.shape[1:]), rows.contiguous())


def _byte_offset(format: WeightFormat, column: int) -> int:
    return column // format.block_len * format.block_bytes
