"""How sequences with drafts become logits rows."""

import numpy as np

from lamella.runner_v2.sampling.rows import LogitsRows


def test_rows_without_drafts():
    layout = LogitsRows.of([7, 2], [10, 0])
    assert layout.rows.tolist() == [7, 2]
    assert layout.positions.tolist() == [10, 0]
    assert layout.draft_idx.tolist() == [0, 0]
    assert [layout.prefix(i) for i in range(2)] == [[], []]


def test_rows_with_drafts():
    layout = LogitsRows.of([7, 2, 4], [10, 3, 5], [[21, 22], [], [23]])
    assert layout.rows.tolist() == [7, 7, 7, 2, 4, 4]
    assert layout.positions.tolist() == [10, 11, 12, 3, 5, 6]
    assert layout.draft_idx.tolist() == [0, 1, 2, 0, 0, 1]
    assert [layout.prefix(i) for i in range(6)] == [[], [21], [21, 22], [], [], [23]]
    assert all(field.dtype == np.int32 for field in layout)


def test_no_rows():
    assert len(LogitsRows.of([], [], []).rows) == 0
