"""What a start refuses before anything is loaded."""

from __future__ import annotations

import pytest

from lamella.engine.compose.build import _wanted_tiers
from lamella.engine.config.schema import EngineOptions
from lamella.engine.errors import StartError


def test_tiers_that_cannot_be_filled_are_refused() -> None:
    options = EngineOptions(model="x", kv_tier=["ram=64MiB"])
    assert _wanted_tiers(options, on_gpu=False) is not None
    with pytest.raises(StartError, match="not served below a GPU: leave it out, or choose --device cpu"):
        _wanted_tiers(options, on_gpu=True)
    without = EngineOptions(model="x", kv_tier=["ram=64MiB"], enable_prefix_caching=False)
    with pytest.raises(StartError, match="leave one out"):
        _wanted_tiers(without, on_gpu=False)
    assert _wanted_tiers(EngineOptions(model="x"), on_gpu=True) is None
