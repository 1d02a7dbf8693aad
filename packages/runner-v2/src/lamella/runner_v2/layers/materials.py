"""What layers are built from: the model's description, its weights' formats, the op table and the rank's group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lamella.runner_v2.attention.backend import AttentionBackend
from lamella.runner_v2.attention.metadata import AttentionLimits
from lamella.runner_v2.config import ModelConfig
from lamella.runner_v2.ops.rotary import RopeTable
from lamella.runner_v2.ops.spec import Site
from lamella.runner_v2.ops.table import OpTable
from lamella.runner_v2.parallel.collectives import Collectives
from lamella.runner_v2.quant.scheme import WeightFormat
from lamella.runner_v2.weights.shard import span_of
from lamella.runner_v2.weights.slots import Part


@dataclass(frozen=True)
class Materials:
    """Passed to every layer's constructor; nothing of it is looked up later."""

    config: ModelConfig
    parts: Mapping[str, Part]
    """Every weight of the model by canonical key."""
    format_of: Callable[[str], WeightFormat]
    table: OpTable
    group: Collectives
    attention: AttentionBackend
    limits: AttentionLimits
    ropes: tuple[RopeTable, ...]
    """In the order of ModelConfig.ropes."""
    device: str
    dtype: torch.dtype
    """Of the activations."""

    def site(self, op: str, params: Mapping[str, Any], keys: Sequence[str] = ()) -> Site:
        """A place where an op works, on the weights with these keys."""
        formats = tuple(self.format_of(key) for key in keys)
        return Site(op, self.device, self.dtype, formats, self.group.size, params)

    def shape(self, key: str) -> tuple[int, ...]:
        """Of this rank's piece of a weight. ConfigError, naming it, if the group's size does not divide it."""
        part = self.parts[key]
        span = span_of(part, self.format_of(key), self.group.rank, self.group.size)
        if span is None:
            return part.shape
        if part.shard.kind == "columns":
            return (*part.shape[:-1], span.padded_len)
        return (span.padded_len, *part.shape[1:])

    def biases(self, keys: Sequence[str]) -> list[str]:
        """Keys of the biases that belong to these matrices, as far as the model has them."""
        return [f"{key}_bias" for key in keys if f"{key}_bias" in self.parts]
