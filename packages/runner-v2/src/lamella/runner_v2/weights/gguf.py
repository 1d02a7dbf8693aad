"""A GGUF file as a Checkpoint: block-quantised rows as they lie in the file, cut for a rank."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from lamella.runner_v2.config import ModelConfig
from lamella.runner_v2.errors import CheckpointError
from lamella.runner_v2.models.gguf import GGUF_NAMING, gguf_config
from lamella.runner_v2.quant.gguf_blocks import format_of_ggml
from lamella.runner_v2.quant.scheme import WeightFormat
from lamella.runner_v2.weights.gguf_file import GgufFile, GgufTensor
from lamella.runner_v2.weights.rules import Source
from lamella.runner_v2.weights.shard import cut
from lamella.runner_v2.weights.slots import Part, RawPart

# Files of architecture llama hold the rows of q and k in the order of interleaved rotation; the other ones do not.
_PERMUTED = re.compile(r"layers\.\d+\.[qk](_bias)?")


class _Found(NamedTuple):
    source: Source
    tensor: GgufTensor


class GgufCheckpoint:
    """One GGUF file."""

    config: ModelConfig

    def __init__(self, path: Path) -> None:
        self.file = GgufFile(path)
        embed = self.file.tensors.get("token_embd.weight")
        embed_format = None if embed is None else format_of_ggml(embed.ggml_type, "token_embd.weight")
        self.config = gguf_config(
            self.file.metadata(),
            {name: tensor.shape for name, tensor in self.file.tensors.items()},
            self._vector,
            str(path),
            "float32" if embed_format is None or embed_format.quantised else embed_format.name,
        )
        self._permuted = self.file.metadata()["general.architecture"] == "llama"

    def has(self, key: str) -> bool:
        source = GGUF_NAMING.source(key)
        return source is not None and source.name in self.file.tensors

    def name_of(self, key: str) -> str:
        source = GGUF_NAMING.source(key)
        return key if source is None else source.name

    def format_of(self, key: str) -> WeightFormat:
        source, tensor = self._found(key)
        return format_of_ggml(tensor.ggml_type, source.name)

    def shape_of(self, key: str) -> tuple[int, ...]:
        source, tensor = self._found(key)
        return tensor.shape if source.expert is None else tensor.shape[1:]

    def place_of(self, key: str) -> tuple[int, int]:
        source, tensor = self._found(key)
        return 0, tensor.offset + (0 if source.expert is None else source.expert * tensor.data[0].nbytes)

    def read(self, part: Part, tp_rank: int, tp_size: int) -> RawPart:
        source, tensor = self._found(part.key)
        if self.shape_of(part.key) != part.shape:
            raise CheckpointError(f"tensor {source.name} is {list(self.shape_of(part.key))}, needed {list(part.shape)}")
        format = format_of_ggml(tensor.ggml_type, source.name)
        data = torch.from_numpy(tensor.data if source.expert is None else tensor.data[source.expert])
        if format.name == "bfloat16":
            data = data.view(torch.bfloat16)
        raw = cut(part, format, data, tp_rank, tp_size)
        if self._permuted and _PERMUTED.fullmatch(part.key):
            # a rank holds whole heads, so the order can be mended after the cut
            raw = raw._replace(data=rotate_half_rows(raw.data, self.config.head_dim))
        return raw

    def unread(self, wanted: Collection[str]) -> list[str]:
        known = {self.name_of(key) for key in wanted}
        return [name for name in self.file.tensors if name not in known and not GGUF_NAMING.ignores(name)]

    def close(self) -> None:
        self.file.tensors.clear()

    def _found(self, key: str) -> _Found:
        source = GGUF_NAMING.source(key)
        tensor = None if source is None else self.file.tensors.get(source.name)
        if source is None or tensor is None:
            raise CheckpointError(f"{self.file.path}: there is no tensor {self.name_of(key)}")
        if source.expert is not None and (len(tensor.shape) != 3 or source.expert >= tensor.shape[0]):
            raise CheckpointError(f"{self.file.path}: tensor {source.name} is {list(tensor.shape)}, too few experts")
        return _Found(source, tensor)

    def _vector(self, name: str) -> tuple[float, ...] | None:
        tensor = self.file.tensors.get(name)
        return None if tensor is None else tuple(np.asarray(tensor.data, np.float32).tolist())


def rotate_half_rows(data: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows ordered in each head as (0, 1), (2, 3), ... pairs -> first halves of all pairs, then second halves.

    Rows are independent in every format, so quantised rows move as they are.
    """
    heads = data.reshape(-1, head_dim // 2, 2, *data.shape[1:])
    return heads.transpose(1, 2).reshape(data.shape)
