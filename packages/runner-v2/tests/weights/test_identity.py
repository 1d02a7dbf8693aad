"""Checkpoints that differ have different identities, and a copy has the same one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lamella.runner_v2.errors import CheckpointError
from lamella.runner_v2.weights.identity import HEAD_BYTES, weights_identity


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text('{"model_type": "llama"}')
    (made / "a.safetensors").write_bytes(bytes(range(256)) * (3 * HEAD_BYTES // 256))
    (made / "b.safetensors").write_bytes(b"small")
    (made / "tokenizer.json").write_text("{}")
    return made


def test_a_copy_is_the_same_and_a_rename_of_the_folder_too(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "other")
    assert weights_identity(folder) == weights_identity(tmp_path / "other")
    (folder / "tokenizer.json").write_text("{ }")
    assert weights_identity(folder) == weights_identity(tmp_path / "other"), "the tokenizer writes no KV"


@pytest.mark.parametrize("change", ["config", "header", "tail", "size", "name", "all weights"])
def test_whatever_changes_shows(folder: Path, change: str) -> None:
    before = weights_identity(folder)
    file = folder / "a.safetensors"
    content = bytearray(file.read_bytes())
    if change == "config":
        (folder / "config.json").write_text('{"model_type": "llama2"}')
    elif change == "header":
        content[10] ^= 1
    elif change == "tail":
        content[-1] ^= 1
    elif change == "size":
        content.append(0)
    elif change == "name":
        file.rename(folder / "c.safetensors")
    else:
        content[HEAD_BYTES:] = bytes(b ^ 1 for b in content[HEAD_BYTES:])
    if change != "name":
        file.write_bytes(content)
    assert weights_identity(folder) != before


def test_a_single_file(folder: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first.gguf", tmp_path / "second.gguf"
    first.write_bytes((folder / "a.safetensors").read_bytes())
    shutil.copy(first, second)
    assert weights_identity(first) == weights_identity(second)
    assert weights_identity(folder, with_weights=False) != weights_identity(folder)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone\.gguf"):
        weights_identity(tmp_path / "gone.gguf")
