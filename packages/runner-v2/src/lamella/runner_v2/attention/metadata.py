"""Sizes that attention is bound to, and the plan of the reference backend."""

from __future__ import annotations

from typing import NamedTuple

import torch


class AttentionLimits(NamedTuple):
    """Everything about a rank's attention that does not change from step to step."""

    device: str
    dtype: torch.dtype
    """Of q, k, v and the output."""
    kv_dtype: torch.dtype
    """Of the cache."""
    num_heads: int
    """Query heads of this rank."""
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None
    """Scores become softcap * tanh(score / softcap) after scaling."""
    block_size: int
    windows: tuple[int | None, ...]
    """Per group; None: full attention."""
    max_num_rows: int
    max_num_tokens: int
    max_model_len: int


class QueryTile(NamedTuple):
    """Queries that the reference computes at once: num_queries of each of G rows, with the keys that they may see."""

    tokens: torch.Tensor  # [G, num_queries] int64 index of each query in the batch
    blocks: torch.Tensor  # [G, num_blocks] int64 ids of the blocks that hold the keys, in order
    key_mask: torch.Tensor  # [G, num_blocks * block_size] bool: holds a key of the row
    mask: torch.Tensor  # [G, 1, num_queries, num_blocks * block_size] bool: the query sees the key


class PagedPlan(NamedTuple):
    """What the reference backend needs of a step, for one group."""

    positions: torch.Tensor  # [T] int32
    window: int | None
    written: torch.Tensor | None  # [W] int64 tokens that have a slot; None: all of them
    block_idx: torch.Tensor  # [W] int64 block of each written token
    block_offset: torch.Tensor  # [W] int64 its place in the block
    tables: torch.Tensor  # [R, max_blocks] int64
    query_start: list[int]  # R + 1 values
    seq_lens: list[int]  # R values
    tiles: list[QueryTile]
    """Empty where every query is computed by itself."""
