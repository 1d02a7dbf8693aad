"""What all tests of this folder need: a device and the kernels for it."""

from __future__ import annotations

from types import ModuleType

import pytest


@pytest.fixture(scope="module", autouse=True)
def kernels() -> ModuleType:
    """lamella.kernels_cuda; without it, or where it cannot run, the tests are skipped."""
    module = pytest.importorskip("lamella.kernels_cuda")
    reason = module.why_not()
    if reason is not None:
        pytest.skip(reason)
    return module
