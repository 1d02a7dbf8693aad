from __future__ import annotations

import random

import pytest

from lamella.kvtier.control.eviction.lru import Lru


def test_order_against_a_list() -> None:
    rng = random.Random(1)
    lru, model = Lru(12), list[int]()
    for _ in range(3000):
        block = rng.randrange(1, 12)
        action = rng.randrange(4)
        if block not in model and action < 2:
            lru.add(block)
            model.append(block)
        elif block in model and action == 2:
            lru.remove(block)
            model.remove(block)
        elif block in model and action == 3:
            lru.touch(block)
            model.remove(block)
            model.append(block)
        elif model and action == 0:
            assert lru.pick() == model.pop(0)
        assert list(lru) == model
        assert len(lru) == len(model)
        assert [b in lru for b in range(12)] == [b in model for b in range(12)]


def test_misuse_is_caught() -> None:
    lru = Lru(3)
    lru.add(1)
    with pytest.raises(AssertionError, match="already a candidate"):
        lru.add(1)
    with pytest.raises(AssertionError, match="not a candidate"):
        lru.remove(2)
    lru.pick()
    with pytest.raises(AssertionError, match="null block"):
        lru.pick()
