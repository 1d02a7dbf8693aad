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


class DummyCheckpoint:
    """Random weights, the same for the same seed and key however they are cut.

    Matrices have the given format and a deviation of 1 / sqrt(columns), which keeps activations of the order of one.
    In quantised formats vectors and routers are float32, as in GGUF files. Large tensors repeat a pool of noise, so
    that tens of gigabytes are made at the speed of memory.
    """

    def __init__(self, config: ModelConfig, format: str | None = None, seed: int = 0) -> None:
        name = config.dtype if format is None else format
        if name not in FORMATS:
            raise ConfigError(f"dummy weights: unknown format {name!r}; known: {', '.join(FORMATS)}")
        self.config = config
        self._parts = parts_of(config)
        self._order = {key: idx for idx, key in enumerate(self._parts)}
        self._matrix_format = FORMATS[name]
        self._seed = seed
        self._noise = torch.randn(_POOL_LEN, generator=torch.Generator().manual_seed(seed))
        self._blocks: dict[int, torch.Tensor] = {}  # columns -> uint8 [_BLOCK_POOL_LEN, block_bytes]

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
        self._blocks.clear()

    def _part(self, key: str) -> Part:
        part = self._parts.get(key)
        if part is None:
            raise CheckpointError(f"dummy weights: a model of family {self.config.family} has no {key}")
        return part

    def _dense(self, key: str, shape: tuple[int, ...], format: WeightFormat) -> torch.Tensor:
        noise = self._repeated(self._noise, key, torch.Size(shape).numel()).view(shape)
        if len(shape) > 1:
            values = noise / math.sqrt(shape[-1])
        elif key.endswith("_bias"):
            values = noise * 0.02
        else:
            values = noise * 0.1 + (0.0 if self.config.norm_plus_one else 1.0)
        dtype: torch.dtype = getattr(torch, format.name)
        return values.to(dtype)

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
            self._blocks[columns] = torch.from_numpy(blocks)
        num_blocks = rows * columns // format.block_len
        return self._repeated(self._blocks[columns], key, num_blocks).view(rows, -1)

    def _repeated(self, pool: torch.Tensor, key: str, length: int) -> torch.Tensor:
        """length entries of the pool, over and over, from a start that depends on the key."""
        start = zlib.crc32(key.encode()) % len(pool)
        times = -(-(start + length) // len(pool))
        return pool.repeat(times, *[1] * (pool.dim() - 1))[start : start + length]
