"""What open_checkpoint says to paths that hold no checkpoint."""

from pathlib import Path

import pytest

from lamella.runner_v2.errors import CheckpointError, UnsupportedError
from lamella.runner_v2.testing.tiny_gguf import write_gguf
from lamella.runner_v2.testing.tiny_models import write_folder
from lamella.runner_v2.weights.files import FolderCheckpoint
from lamella.runner_v2.weights.gguf import GgufCheckpoint
from lamella.runner_v2.weights.open import open_checkpoint, read_config


def test_folder_and_file(tmp_path: Path) -> None:
    write_folder(tmp_path / "folder", "qwen2")
    write_gguf(tmp_path / "file.gguf", "qwen2")
    assert isinstance(open_checkpoint(str(tmp_path / "folder")), FolderCheckpoint)
    assert isinstance(open_checkpoint(tmp_path / "file.gguf"), GgufCheckpoint)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere: no such file or folder"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"model\.gguf: no such file or folder"):
        open_checkpoint(tmp_path / "model.gguf")


def test_some_other_file(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match=r"notes\.txt: neither a checkpoint folder nor a \.gguf file"):
        open_checkpoint(tmp_path / "notes.txt")


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no config\.json"):
        open_checkpoint(tmp_path)
    write_gguf(tmp_path / "a.gguf", "llama")
    with pytest.raises(CheckpointError, match=r"without config\.json; give the file itself, such as .*a\.gguf"):
        open_checkpoint(tmp_path)


def test_folder_without_weights(tmp_path: Path) -> None:
    write_folder(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="there are no weights"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickled")
    with pytest.raises(UnsupportedError, match=r"weights are in pytorch_model\.bin; convert them"):
        open_checkpoint(tmp_path)


def test_config_alone_needs_no_weights(tmp_path: Path) -> None:
    model = write_folder(tmp_path / "folder", "qwen3")
    expected = open_checkpoint(model.path).config
    (model.path / "model.safetensors").unlink()
    assert read_config(model.path) == expected
    file = write_gguf(tmp_path / "a.gguf", "qwen3").path
    assert read_config(file) == open_checkpoint(file).config
    with pytest.raises(CheckpointError, match="no such file or folder"):
        read_config(tmp_path / "nowhere")
