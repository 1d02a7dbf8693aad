from __future__ import annotations

import pytest

WORLDS_PER_TEST = 250


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="the one world to simulate")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Worlds in portions, or the one that was named."""
    if "first_seed" in metafunc.fixturenames:
        seed = metafunc.config.getoption("--seed", default=None)
        portions = [(first, WORLDS_PER_TEST) for first in range(0, 20_000, WORLDS_PER_TEST)]
        metafunc.parametrize(("first_seed", "num_seeds"), portions if seed is None else [(seed, 1)])
