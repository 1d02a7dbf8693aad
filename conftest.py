"""Fixtures shared by all tests of the repository."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Two cores are shared by test processes and the servers that tests start: libraries must not each take all of them.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# transformers and huggingface_hub must never ask a hub in tests
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The demo model's GGUF file, pulled into the user cache folder once."""
    from lamella.engine.models import resolve_model

    return Path(resolve_model("smollm2").path)
