"""A generated model for commands, and the command line in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from lamella.runner_v2.testing.tiny_models import write_folder

Spawn = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with random weights, a tokenizer and a chat template; its context lets an answer last for seconds."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    write_folder(path, "llama", max_position_embeddings=4096)
    return str(path)


@pytest.fixture
def spawn() -> Spawn:
    """`lamella` with these words, its streams as pipes of text."""

    def start(*words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "lamella.engine.cli.main", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start
