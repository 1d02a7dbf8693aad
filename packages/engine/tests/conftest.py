"""Fixtures that these tests need also where the package is tested alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from lamella.engine.models import resolve_model
from lamella.runner_v2.testing.tiny_models import write_folder


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The demo model's GGUF file, pulled into the user cache folder once."""
    return resolve_model("smollm2").path


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of a folder with a tiny model and a tokenizer."""
    path: Path = tmp_path_factory.mktemp("tiny")
    write_folder(path, "llama")
    return str(path)
