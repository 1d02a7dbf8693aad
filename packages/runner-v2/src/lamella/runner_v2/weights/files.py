"""A checkpoint folder: config.json, generation_config.json and safetensors, in one file or sharded with an index.

Files are mapped, not read: a tensor costs memory when it is touched, and a rank touches only its own piece.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from lamella.runner_v2.config import ModelConfig
from lamella.runner_v2.errors import CheckpointError, UnsupportedError
from lamella.runner_v2.models.fields import Fields
from lamella.runner_v2.models.registry import family_of
from lamella.runner_v2.quant.scheme import FORMATS, WeightFormat
from lamella.runner_v2.weights.rules import Source
from lamella.runner_v2.weights.shard import cut
from lamella.runner_v2.weights.slots import Part, RawPart

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_SAMPLING = (
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "max_new_tokens",
)
_log = logging.getLogger(__name__)


class _Entry(NamedTuple):
    """A tensor in the files."""

    file_idx: int
    order: int
    """Rank by offset in its file."""
    shape: tuple[int, ...]
    dtype: str
    """As safetensors spells it."""


class FolderCheckpoint:
    """A folder in the layout of the Hugging Face hub, as a Checkpoint."""

    config: ModelConfig

    def __init__(self, folder: Path) -> None:
        fields = Fields(read_json(folder / "config.json"), str(folder / "config.json"))
        family = family_of(fields)
        self._files = _Files(folder)
        if not fields.has("dtype") and not fields.has("torch_dtype"):
            fields = Fields({**fields.values, "dtype": self._files.main_dtype()}, fields.source)
        self.config = _with_generation(family.parse(fields), folder)
        self._naming = family.naming(self._files.entries)
        if any(re.fullmatch(pattern, name) for pattern in family.left_out for name in self._files.entries):
            _log.warning("%s: only the text model is used; its other modalities are left out", folder.name)

    def has(self, key: str) -> bool:
        source = self._naming.source(key)
        return source is not None and source.name in self._files.entries

    def name_of(self, key: str) -> str:
        source = self._naming.source(key)
        return key if source is None else source.name

    def format_of(self, key: str) -> WeightFormat:
        source, entry = self._entry(key)
        if entry.dtype not in _DTYPES:
            raise UnsupportedError(
                f"tensor {source.name} has type {entry.dtype}; supported in safetensors: {', '.join(_DTYPES)}"
            )
        return FORMATS[_DTYPES[entry.dtype]]

    def shape_of(self, key: str) -> tuple[int, ...]:
        return self._entry(key)[1].shape

    def place_of(self, key: str) -> tuple[int, int]:
        entry = self._entry(key)[1]
        return entry.file_idx, entry.order

    def read(self, part: Part, tp_rank: int, tp_size: int) -> RawPart:
        source, entry = self._entry(part.key)
        if entry.shape != part.shape:
            raise CheckpointError(f"tensor {source.name} is {list(entry.shape)}, needed {list(part.shape)}")
        return cut(part, self.format_of(part.key), self._files.tensor(source.name), tp_rank, tp_size)

    def unread(self, wanted: Collection[str]) -> list[str]:
        known = {self.name_of(key) for key in wanted}
        if self.config.tie_embeddings:
            known.add(self.name_of("lm_head"))  # some savers write the tied copy
        return [name for name in self._files.entries if name not in known and not self._naming.ignores(name)]

    def close(self) -> None:
        self._files.close()

    def _entry(self, key: str) -> tuple[Source, _Entry]:
        source = self._naming.source(key)
        entry = None if source is None else self._files.entries.get(source.name)
        if source is None or entry is None:
            raise CheckpointError(f"{self._files.folder}: there is no tensor {self.name_of(key)}")
        return source, entry


class _Files:
    """The safetensors files of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: dict[str, _Entry] = {}
        self._open: list[Any] = []
        listed = _listed_files(folder)
        for file_idx, (name, wanted) in enumerate(listed.items()):
            file = _open_file(folder / name)
            self._open.append(file)
            for order, tensor in enumerate(file.offset_keys()):
                if wanted is not None and tensor not in wanted:
                    continue  # a duplicate: the index says that another file's copy counts
                if tensor in self.entries:
                    raise CheckpointError(f"{folder}: tensor {tensor} is in several files, and there is no {_INDEX}")
                piece = file.get_slice(tensor)
                self.entries[tensor] = _Entry(file_idx, order, tuple(piece.get_shape()), piece.get_dtype())
            absent = sorted((wanted or set()) - self.entries.keys())
            if absent:
                raise CheckpointError(f"{folder / name}: tensor {absent[0]}, which {_INDEX} places here, is missing")

    def tensor(self, name: str) -> torch.Tensor:
        """The whole tensor, as a view of the mapped file."""
        tensor = self._open[self.entries[name].file_idx].get_tensor(name)
        assert isinstance(tensor, torch.Tensor)
        return tensor

    def main_dtype(self) -> str:
        """Type of the largest supported tensor: what a config.json without a dtype stands for."""
        sizes = [(torch.Size(e.shape).numel(), _DTYPES[e.dtype]) for e in self.entries.values() if e.dtype in _DTYPES]
        return max(sizes, default=(0, "float32"))[1]

    def close(self) -> None:
        self._open.clear()


def folder_config(folder: Path) -> ModelConfig:
    """The configuration of a folder, which needs no weights for it."""
    fields = Fields(read_json(folder / "config.json"), str(folder / "config.json"))
    return _with_generation(family_of(fields).parse(fields), folder)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. CheckpointError naming the file if it is absent, no JSON, or no object."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent}: there is no {path.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: the file holds no JSON object")
    return value


def _listed_files(folder: Path) -> dict[str, set[str] | None]:
    """File name -> the tensors that count in it (None: all)."""
    if (folder / _INDEX).exists():
        weight_map = read_json(folder / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{folder / _INDEX}: weight_map is missing or empty")
        files: dict[str, set[str] | None] = {}
        for tensor, name in weight_map.items():
            if not isinstance(name, str) or Path(name).name != name:
                raise CheckpointError(f"{folder / _INDEX}: {name!r} is no file name in this folder")
            tensors = files.setdefault(name, set())
            assert tensors is not None
            tensors.add(tensor)
        return dict(sorted(files.items()))
    if (folder / _SINGLE).exists():
        return {_SINGLE: None}
    # consolidated.* repeats the weights in another naming, adapters are no weights of the model
    names = [p.name for p in folder.glob("*.safetensors") if not p.name.startswith(("consolidated", "adapter_"))]
    if names:
        return dict.fromkeys(sorted(names))
    other = next((p.name for pattern in ("*.bin", "*.pth", "*.pt") for p in sorted(folder.glob(pattern))), None)
    if other is not None:
        raise UnsupportedError(f"{folder}: weights are in {other}; convert them to safetensors or GGUF")
    raise CheckpointError(f"{folder}: there are no weights (*.safetensors)")


def _open_file(path: Path) -> Any:
    if not path.exists():
        raise CheckpointError(f"{path.parent}: {path.name} is missing, which {_INDEX} lists")
    if not path.is_file():
        raise CheckpointError(f"{path}: not a file")
    try:
        return safe_open(str(path), framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: damaged or truncated: {error}") from error


def _with_generation(config: ModelConfig, folder: Path) -> ModelConfig:
    """Adds the sampling defaults of generation_config.json."""
    path = folder / "generation_config.json"
    if not path.exists():
        return config
    fields = Fields(read_json(path), str(path))
    sampling = {name: fields.values[name] for name in _SAMPLING if fields.has(name)}
    return replace(config, generation=sampling)
