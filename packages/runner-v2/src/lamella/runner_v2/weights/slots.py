"""How layers say which weights they need, and how a checkpoint hands them over.

    checkpoint --format_of(key)--> layer picks an op --Slot--> loader reads, shards, packs --> store --bind--> layer

Canonical keys (the same for every family and file format):

    embed, final_norm, lm_head
    layers.{i}.attn_norm            before attention        layers.{i}.mlp_norm        before the MLP
    layers.{i}.attn_post_norm       behind attention        layers.{i}.mlp_post_norm   behind the MLP   (Gemma)
    layers.{i}.{q,k,v,o}            [out, in]               layers.{i}.{q,k,v,o}_bias
    layers.{i}.{q_norm,k_norm}      [head_dim]
    layers.{i}.{gate,up,down}       [out, in]               layers.{i}.{gate,up,down}_bias
    layers.{i}.router               [num_experts, hidden]
    layers.{i}.experts.{e}.{gate,up,down}
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch

from lamella.runner_v2.config import ModelConfig
from lamella.runner_v2.quant.scheme import WeightFormat

ShardKind = Literal["replicated", "rows", "columns", "vocab", "first"]


class Shard(NamedTuple):
    """How a tensor is cut over tensor-parallel ranks.

    rows: the output dimension is cut into tp_size equal pieces of whole units; columns: the input dimension.
    A unit is unit_len rows or columns (head_dim for q, k, v, o). Where rows have fewer units than ranks (few KV heads)
    each unit is replicated on tp_size / num_units neighbouring ranks.
    vocab: rank r holds rows [r * n, (r + 1) * n) with n = ceil(rows / tp_size); rows beyond the end are zeros, so the
    gathered logits are cut to vocab_size.
    first: rank 0 holds it, the others zeros (a bias that joins a partial sum).
    """

    kind: ShardKind = "replicated"
    unit_len: int = 1


_REPLICATED = Shard()


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of the checkpoint that a slot needs."""

    key: str
    """Canonical."""
    shape: tuple[int, ...]
    """In the whole model."""
    shard: Shard = _REPLICATED
    optional: bool = False


class RawPart(NamedTuple):
    """A part as read, already cut for this rank.

    Dense: data has the shape and its own dtype. Quantised: data is uint8 [rows, row_bytes] of GGUF blocks; shape is
    that of the matrix it stands for. q and k rows are always in rotate-half order (the reader has undone the
    permutation that llama GGUF files carry).
    """

    key: str
    format: WeightFormat
    shape: tuple[int, ...]
    data: torch.Tensor


@dataclass(slots=True)
class Slot:
    """Where parts go: pack makes named tensors of them (pure), the store keeps those, bind gives them to the layer."""

    name: str
    parts: tuple[Part, ...]
    pack: Callable[[Sequence[RawPart]], Mapping[str, torch.Tensor]]
    bind: Callable[[Mapping[str, torch.Tensor]], None]


class Checkpoint(Protocol):
    """Weights on disk, or made up."""

    config: ModelConfig

    def has(self, key: str) -> bool:
        """Is there a tensor for this canonical key? (lm_head may be missing when embeddings are tied.)"""

    def format_of(self, key: str) -> WeightFormat:
        """Storage format; CheckpointError naming the tensor if it is missing."""

    def shape_of(self, key: str) -> tuple[int, ...]:
        """Shape of the tensor in the whole model; CheckpointError naming the tensor if it is missing."""

    def place_of(self, key: str) -> tuple[int, int]:
        """(file, offset in it): reading in this order is sequential."""

    def name_of(self, key: str) -> str:
        """What the files call the tensor of this key."""

    def read(self, part: Part, tp_rank: int, tp_size: int) -> RawPart:
        """The part, cut for the rank. CheckpointError if missing, misshapen or truncated.

        The data may be a view of the mapped file: do not write to it, and copy what must outlive close().
        """

    def unread(self, wanted: Collection[str]) -> list[str]:
        """Names of tensors in the files that are neither under these keys nor known to be ignorable."""

    def close(self) -> None: ...
