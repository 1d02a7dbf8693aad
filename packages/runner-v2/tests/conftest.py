"""Fixtures of the runner's tests."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2(request: pytest.FixtureRequest) -> Path:
    """The demo model's GGUF file, where the repository's fixtures are at hand; skips where this package is alone."""
    try:
        path: Path = request.getfixturevalue("smollm2_path")
    except pytest.FixtureLookupError:
        pytest.skip("the demo model is fetched by the engine's tests")
    return path
