from __future__ import annotations

import pytest

from lamella.specdec import DraftBatch


def test_padding_fills_with_no_draft():
    batch = DraftBatch([[4, 5], [], [6]])
    assert batch.lens == [2, 0, 1]
    assert batch.padded(2) == [[4, 5], [-1, -1], [6, -1]]


def test_a_row_wider_than_the_padding_is_a_bug():
    with pytest.raises(AssertionError):
        DraftBatch([[4, 5]]).padded(1)
