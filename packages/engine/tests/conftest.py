"""Fixtures that these tests need also where the package is tested alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from lamella.engine.models import resolve_model


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The demo model's GGUF file, pulled into the user cache folder once."""
    return resolve_model("smollm2").path
