"""What a step looks like on the device: data only, read by models, attention and sampling."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class LayerCache(NamedTuple):
    """The KV of one layer, one group. Further tensors (scales, indexer, hot buffer) get fields of their own."""

    k: torch.Tensor  # [num_blocks, num_kv_heads, block_size, head_dim]
    v: torch.Tensor  # [num_blocks, num_kv_heads, block_size, head_dim]


class InputBatch(NamedTuple):
    """The batch of one step. T tokens of R rows, L logits rows. Index tensors are int32 on the device.

    tokens of row i:         [query_start[i], query_start[i + 1])
    positions of its tokens: [seq_lens[i] - query_len, seq_lens[i])
    logits rows of row i:    [logits_start[i], logits_start[i + 1]); none for an unfinished prompt chunk
    """

    num_tokens: int
    num_rows: int
    max_query_len: int
    max_seq_len: int
    """Upper bound that the host knows."""
    rows: torch.Tensor  # [R] device row of each batch row
    token_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    query_start: torch.Tensor  # [R + 1]
    seq_lens: torch.Tensor  # [R] length after this step
    block_tables: tuple[torch.Tensor, ...]  # per group [R, max_blocks]
    slot_mapping: tuple[torch.Tensor, ...]  # per group [T] int64; -1: write nothing
    logits_idx: torch.Tensor  # [L] index of the token whose hidden state gives each logits row
    logits_start: torch.Tensor  # [R + 1]
    num_single: int = 0
    """The first so many rows have one token each (decode); backends may treat them apart. 0 says nothing."""


class ModelInput(NamedTuple):
    """Everything a model's layers may read, explicit and never ambient."""

    token_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    plans: tuple[Any, ...]
    """Per group: what the attention backend planned for this step."""
    caches: tuple[LayerCache | None, ...]
    """Per layer."""
    embeddings: torch.Tensor | None = None  # [T, hidden]; instead of looking the ids up
    adapter_slots: torch.Tensor | None = None  # [T]
    state_columns: torch.Tensor | None = None  # [R]
