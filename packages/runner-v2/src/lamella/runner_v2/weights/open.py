"""Opens whatever a path holds: a checkpoint folder or a GGUF file."""

from __future__ import annotations

import importlib
from pathlib import Path

from lamella.runner_v2.config import ModelConfig
from lamella.runner_v2.errors import CheckpointError
from lamella.runner_v2.weights.files import FolderCheckpoint, folder_config
from lamella.runner_v2.weights.slots import Checkpoint


def open_checkpoint(path: str | Path) -> Checkpoint:
    """A folder with config.json and safetensors, or a .gguf file. Weights stay on disk until they are read.

    CheckpointError if nothing is there, or it is damaged; UnsupportedError for models and formats that this build does
    not know.
    """
    path = Path(path)
    if path.is_dir():
        ggufs = sorted(path.glob("*.gguf"))
        if ggufs and not (path / "config.json").exists():
            raise CheckpointError(f"{path}: a folder without config.json; give the file itself, such as {ggufs[0]}")
        return FolderCheckpoint(path)
    if path.suffix == ".gguf" and path.is_file():
        module = importlib.import_module("lamella.runner_v2.weights.gguf")  # brings the gguf library
        opened: Checkpoint = module.GgufCheckpoint(path)
        return opened
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder")
    raise CheckpointError(f"{path}: neither a checkpoint folder nor a .gguf file")


def read_config(path: str | Path) -> ModelConfig:
    """The configuration alone: a folder needs no weights for it (as for dummy weights). Errors as open_checkpoint."""
    if (Path(path) / "config.json").exists():
        return folder_config(Path(path))
    checkpoint = open_checkpoint(path)
    checkpoint.close()
    return checkpoint.config
