"""Checkpoints of draft heads: the same numbers everywhere, and all of them come back."""

from pathlib import Path

import numpy as np
import pytest
import torch

from lamella.runner_v2.testing.draft_heads import checkpoint


def test_numbers_are_fixed() -> None:
    """Values that were computed by hand from the generator's first bits; goldens stand on them."""
    values = checkpoint.random_array(7, "a", [3])
    grid = values / np.sqrt(3.0) * 4096 + 4095.5
    assert np.allclose(grid, np.round(grid))
    raw = np.random.Philox(key=[7, 0xE8B7BE43]).random_raw(3)  # crc32 of "a"
    assert np.round(grid).astype(int).tolist() == [int(bits) >> 51 for bits in raw]


def test_numbers_have_the_spread_that_was_asked_for() -> None:
    values = checkpoint.random_array(0, "wide", [20000], 0.5)
    assert abs(values.mean()) < 0.02
    assert abs(values.std() - 0.5) < 0.01
    assert not np.array_equal(values, checkpoint.random_array(1, "wide", [20000], 0.5))
    assert not np.array_equal(values, checkpoint.random_array(0, "other", [20000], 0.5))


def test_draft_vocabulary_maps_both_ways() -> None:
    maps = checkpoint.draft_vocabulary(3, 50, 20)
    ids = torch.arange(20) + maps["d2t"]
    assert ids.tolist() == maps["t2d"].nonzero()[:, 0].tolist()
    assert len(set(ids.tolist())) == 20
    assert maps["d2t"].dtype == torch.int64
    assert maps["t2d"].dtype == torch.bool


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_files_come_back(tmp_path: Path, file: str, dtype: str) -> None:
    values = {"a": checkpoint.random_array(0, "a", [3, 4]), **checkpoint.draft_vocabulary(0, 8, 4)}
    config, tensors = checkpoint.read(checkpoint.write(tmp_path, {"x": 1}, values, dtype=dtype, file=file))
    assert config == {"x": 1}
    rounded = torch.from_numpy(np.asarray(values["a"])).to(getattr(torch, dtype)).double().numpy()
    assert np.array_equal(tensors["a"], rounded)
    assert np.array_equal(tensors["d2t"], values["d2t"])


def test_digest_sees_each_value_and_not_the_file(tmp_path: Path) -> None:
    values = {"a": np.arange(3.0), "b": np.arange(2.0)}
    first = checkpoint.digest(checkpoint.write(tmp_path / "1", {"x": 1}, values))
    again = checkpoint.write(tmp_path / "2", {"x": 1}, dict(reversed(values.items())), file="pytorch_model.bin")
    assert checkpoint.digest(again) == first
    assert checkpoint.digest(checkpoint.write(tmp_path / "3", {"x": 2}, values)) != first
    values["b"][1] += 2.0**-20
    assert checkpoint.digest(checkpoint.write(tmp_path / "4", {"x": 1}, values)) != first
