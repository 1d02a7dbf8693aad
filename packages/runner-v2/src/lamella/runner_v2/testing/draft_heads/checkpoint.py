"""Checkpoints of draft heads on disk: random tensors that are the same everywhere, files, and their reading in float64.

Numbers are made from the raw bits of a counter-based generator, whose stream is fixed, so that what was computed with a
checkpoint elsewhere stays true: neither the version of a library nor the processor changes a weight.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

Array = NDArray[np.float64]


class Checkpoint(NamedTuple):
    """What a folder holds."""

    config: dict[str, Any]
    """config.json"""
    tensors: dict[str, Array]
    """Name -> values as stored, widened to float64 (booleans and integers too: they are exact)."""


def random_array(seed: int, name: str, shape: Sequence[int], scale: float = 1.0) -> Array:
    """Uniform numbers of standard deviation `scale` on a grid of 2^-12 * scale, a function of seed, name and shape."""
    bits = np.random.Philox(key=[seed, zlib.crc32(name.encode())]).random_raw(int(np.prod(shape)))
    grid = (np.asarray(bits) >> np.uint64(51)).astype(np.float64)  # 13 bits: [0, 8192)
    return np.asarray(((grid - 4095.5) / 4096 * np.sqrt(3.0) * scale).reshape(shape))


def random_tensors(seed: int, shapes: Mapping[str, Sequence[int]], *, plus_one: Sequence[str] = ()) -> dict[str, Array]:
    """Values for named tensors: matrices keep the size of their input, norms' factors and biases are random too, since
    ones and zeros would hide mistakes.

    `plus_one` are parts of names of norms whose factor is stored less one.
    """
    made = {}
    for name, shape in shapes.items():
        if name.endswith("bias"):
            made[name] = random_array(seed, name, shape, 0.1)
        elif len(shape) == 1:
            factor = random_array(seed, name, shape, 0.2)
            made[name] = factor if any(part in name for part in plus_one) else 1 + factor
        elif name.endswith("base_kernel"):  # near the identity that training starts from
            made[name] = random_array(seed, name, shape, 0.3)
            made[name][:, 0] += 1
        elif "embed" in name or "codebook" in name or "markov_w1" in name:
            made[name] = random_array(seed, name, shape)
        else:
            made[name] = random_array(seed, name, shape, shape[-1] ** -0.5)
    return made


def draft_vocabulary(seed: int, vocab_size: int, draft_vocab_size: int) -> dict[str, torch.Tensor]:
    """A reduced vocabulary as checkpoints carry it: d2t int64 [draft_vocab_size] with target id = i + d2t[i], ascending
    ids, and t2d bool [vocab_size], true for the ids that are kept."""
    order = np.argsort(random_array(seed, "draft vocabulary", [vocab_size]), kind="stable")
    kept = np.sort(order[:draft_vocab_size])
    t2d = np.zeros(vocab_size, dtype=bool)
    t2d[kept] = True
    return {"d2t": torch.from_numpy(kept - np.arange(draft_vocab_size)), "t2d": torch.from_numpy(t2d)}


def write(
    folder: str | Path,
    config: dict[str, Any],
    tensors: Mapping[str, Array | torch.Tensor],
    *,
    dtype: str = "float32",
    file: str = "model.safetensors",
) -> Path:
    """Write config.json and one file of tensors, safetensors or (by its ending) PyTorch's own; arrays get `dtype`,
    tensors keep theirs."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    stored = {
        name: torch.from_numpy(value).to(getattr(torch, dtype)) if isinstance(value, np.ndarray) else value
        for name, value in tensors.items()
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    if file.endswith(".bin"):
        torch.save(stored, folder / file)
    else:
        save_file(stored, folder / file, metadata={"format": "pt"})
    return folder


def read(folder: str | Path) -> Checkpoint:
    """Read all that `write` wrote; files of tensors that lie in one folder are put together."""
    folder = Path(folder)
    stored: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        stored |= load_file(path)
    for path in sorted(folder.glob("*.bin")):
        stored |= torch.load(path, weights_only=True)
    config = json.loads((folder / "config.json").read_text())
    return Checkpoint(config, {name: np.asarray(tensor.double().numpy()) for name, tensor in stored.items()})


def digest(folder: str | Path) -> str:
    """Identity of a checkpoint's configuration and values, whatever the order and the kind of its files."""
    config, tensors = read(folder)
    check = zlib.crc32(json.dumps(config, sort_keys=True).encode())
    for name in sorted(tensors):
        check = zlib.crc32(tensors[name].tobytes(), zlib.crc32(name.encode(), check))
    return f"{check:08x}"
