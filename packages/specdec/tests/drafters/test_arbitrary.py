"""Arbitrary drafts: always as many as allowed, of ids that the row has."""

from __future__ import annotations

from lamella.specdec import ArbitraryConfig, ArbitraryDrafter, Rows


def test_always_as_many_as_allowed():
    drafter = ArbitraryDrafter(ArbitraryConfig(5))
    view = Rows([0, 1, 2], [0, 0, 0], [[7], [1, 2, 3], [4] * 9 + [5]])
    drafter.observe(view)
    assert drafter.propose(view, 9).ids == [[7] * 5, [3, 2, 1, 3, 2], [5, 4, 4, 4, 4]]
    assert drafter.propose(view, [0, 2, 5]).lens == [0, 2, 5]
