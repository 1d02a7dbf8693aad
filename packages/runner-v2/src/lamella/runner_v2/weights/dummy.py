"""A checkpoint made up: random weights for any ModelConfig, to measure speed and memory without files."""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection

import numpy as np
import torch

from lamella.runner_v2.config import ModelConfig
from lamella.runner_v2.errors import CheckpointError, ConfigError
from lamella.runner_v2.quant.gguf_blocks import random_blocks
from lamella.runner_v2.quant.scheme import FORMATS, WeightFormat
from lamella.runner_v2.weights.rules import parts_of
from lamella.runner_v2.weights.shard import cut
from lamella.runner_v2.weights.slots import Part, RawPart

# Lengths of the pools of noise that tensors repeat: primes, so that rows do not come out alike.
_POOL_LEN = 1_048_573
_BLOCK_POOL_LEN = 4093
_VIEWED_LEN = 1 << 22
"""Tensors of up to so many entries are views of a pool that is long enough: no work at all for the many matrices of
experts."""


class DummyCheckpoint:
    """Random weights, the same for the same seed and key however they are cut and wherever they are made.

    Matrices have the given format and a deviation of 1 / sqrt(columns), which keeps activations of the order of one.
    In quantised formats vectors and routers are float32, as in GGUF files. Large tensors repeat a pool of noise, so
    that tens of gigabytes are made at the speed of the device's memory.

    In a model with experts, routers have a deviation of 1 and norms are all 1: logits of the router spread far enough
    that tokens go to different experts, as in a trained model, and a step reads as many of them.
    """

    def __init__(
        self, config: ModelConfig, format: str | None = None, seed: int = 0, device: str | torch.device = "cpu"
    ) -> None:
        """device: where the tensors are made; pools of a few megabytes come from the CPU."""
        name = config.dtype if format is None else format
        if name not in FORMATS:
            raise ConfigError(f"dummy weights: unknown format {name!r}; known: {', '.join(FORMATS)}")
        self.config = config
        self._parts = parts_of(config)
        self._order = {key: idx for idx, key in enumerate(self._parts)}
        self._matrix_format = FORMATS[name]
        self._seed = seed
        self._device = torch.device(device)
        self._has_experts = any(layer.moe is not None for layer in config.layers)
        self._noise = torch.randn(_POOL_LEN, generator=torch.Generator().manual_seed(seed))
        self._pools: dict[tuple[float, float, str], torch.Tensor] = {}
        """(factor, offset, dtype) -> noise * factor + offset, on the device."""
        self._blocks: dict[int, torch.Tensor] = {}
        """columns -> uint8 [_BLOCK_POOL_LEN, block_bytes], on the device."""

    def has(self, key: str) -> bool:
        return key in self._parts

    def name_of(self, key: str) -> str:
        return key

    def format_of(self, key: str) -> WeightFormat:
        vector = len(self._part(key).shape) == 1 or key.endswith(".router")
        return FORMATS["float32"] if vector and self._matrix_format.quantised else self._matrix_format

    def shape_of(self, key: str) -> tuple[int, ...]:
        return self._part(key).shape

    def place_of(self, key: str) -> tuple[int, int]:
        return 0, self._order[self._part(key).key]

    def read(self, part: Part, tp_rank: int, tp_size: int) -> RawPart:
        shape, format = self.shape_of(part.key), self.format_of(part.key)
        if shape != part.shape:
            raise CheckpointError(f"tensor {part.key} is {list(shape)}, needed {list(part.shape)}")
        data = self._quantised(part.key, shape) if format.quantised else self._dense(part.key, shape, format)
        return cut(part, format, data, tp_rank, tp_size)

    def unread(self, wanted: Collection[str]) -> list[str]:
        return [key for key in self._parts if key not in wanted]

    def close(self) -> None:
        """Let go of the pools; tensors that are views of them keep theirs."""
        self._pools.clear()
        self._blocks.clear()

    def _part(self, key: str) -> Part:
        part = self._parts.get(key)
        if part is None:
            raise CheckpointError(f"dummy weights: a model of family {self.config.family} has no {key}")
        return part

    def _dense(self, key: str, shape: tuple[int, ...], format: WeightFormat) -> torch.Tensor:
        factor, offset = self._deviation(key, shape)
        which = (factor, offset, format.name)
        pool = self._pools.get(which)
        if pool is None:
            # on the CPU and then copied, since devices round otherwise
            dtype: torch.dtype = getattr(torch, format.name)
            pool = (self._noise * factor + offset).to(dtype).to(self._device)
            self._pools[which] = pool
        length = math.prod(shape)
        if length <= _VIEWED_LEN:
            pool = self._pools[which] = _grown(pool, _POOL_LEN, length)
            start = _start(key, _POOL_LEN)
            return pool[start : start + length].view(shape)
        return _repeated(pool[:_POOL_LEN], key, length).view(shape)

    def _deviation(self, key: str, shape: tuple[int, ...]) -> tuple[float, float]:
        """(factor, offset) of the noise."""
        if len(shape) > 1:
            return (1.0 if key.endswith(".router") else 1 / math.sqrt(shape[-1])), 0.0
        if key.endswith("_bias"):
            return 0.02, 0.0
        return (0.0 if self._has_experts else 0.1), (0.0 if self.config.norm_plus_one else 1.0)

    def _quantised(self, key: str, shape: tuple[int, ...]) -> torch.Tensor:
        format, (rows, columns) = self._matrix_format, shape
        if columns % format.block_len:
            raise ConfigError(
                f"dummy weights: {key} has {columns} columns, which {format.name} cannot cut into blocks of "
                f"{format.block_len}"
            )
        if columns not in self._blocks:
            rng = np.random.default_rng(self._seed + columns)
            blocks = random_blocks(format, _BLOCK_POOL_LEN, columns**-0.5, rng)
            self._blocks[columns] = torch.from_numpy(blocks).to(self._device)
        num_blocks = rows * columns // format.block_len
        return _repeated(self._blocks[columns], key, num_blocks).view(rows, -1)


def _start(key: str, pool_len: int) -> int:
    return zlib.crc32(key.encode()) % pool_len


def _grown(pool: torch.Tensor, pool_len: int, length: int) -> torch.Tensor:
    """The pool, repeated until any start in it has `length` entries behind it."""
    if len(pool) >= pool_len + length:
        return pool
    return pool[:pool_len].repeat(-(-(pool_len + length) // pool_len))


def _repeated(pool: torch.Tensor, key: str, length: int) -> torch.Tensor:
    """length entries of the pool, over and over, from a start that depends on the key."""
    start = _start(key, len(pool))
    times = -(-(start + length) // len(pool))
    return pool.repeat(times, *[1] * (pool.dim() - 1))[start : start + length]
