"""Loads the tools under test: they are scripts, not a package."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def tool() -> Iterator[ModuleType]:
    """tool("native") is tools/native.py."""
    sys.path.insert(0, str(ROOT / "tools"))
    yield importlib.import_module
    sys.path.remove(str(ROOT / "tools"))
