"""What a start refuses before anything is loaded."""

from __future__ import annotations

import pytest

from lamella.engine.compose.build import _wanted_tiers
from lamella.engine.config.schema import EngineOptions
from lamella.engine.errors import StartError


def test_tiers_that_cannot_be_filled_are_refused() -> None:
    options = EngineOptions(model="x", kv_tier=["ram=64MiB"])
    assert _wanted_tiers(options) is not None
    without = EngineOptions(model="x", kv_tier=["ram=64MiB"], enable_prefix_caching=False)
    with pytest.raises(StartError, match="leave one out"):
        _wanted_tiers(without)
    assert _wanted_tiers(EngineOptions(model="x")) is None
