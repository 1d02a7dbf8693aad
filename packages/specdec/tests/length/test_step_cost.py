"""What steps are expected to take."""

from __future__ import annotations

import pytest

from lamella.specdec.length.step_cost import MOST_SHARE, OUTLIER, StepCost, rows_class

TABLE = [(1, 10.0), (2, 12.0), (4, 20.0), (8, 24.0)]


def test_the_table_is_linear_between_its_places_and_goes_on():
    cost = StepCost(TABLE)
    assert cost.curve(1, 9) == pytest.approx([10, 12, 16, 20, 21, 22, 23, 24, 25, 26])
    assert cost.seconds(2, 2) == pytest.approx(20)
    assert cost.seconds(6, 0) == pytest.approx(22)


def test_seconds_never_fall_and_one_place_means_proportional():
    assert StepCost([(1, 10.0), (2, 8.0), (4, 30.0)]).curve(1, 3) == pytest.approx([10, 10, 20, 30])
    assert StepCost([(2, 10.0)]).curve(1, 2) == pytest.approx([5, 10, 15])


@pytest.mark.parametrize("table", [[], [(2, 1.0), (1, 2.0)], [(1, 0.0)], [(0, 1.0)]])
def test_impossible_tables_are_refused(table):
    with pytest.raises(AssertionError):
        StepCost(table)


def test_the_pace_follows_plain_steps():
    cost = StepCost(TABLE)
    for _ in range(40):
        cost.observe(1, 0, 30.0)
    assert cost.curve(1, 1) == pytest.approx([30, 36], rel=1e-2)
    assert cost.seconds(8, 0) == pytest.approx(72, rel=1e-2)  # a class that was not seen has the last pace
    cost.observe(8, 0, 24.0)
    assert cost.seconds(8, 0) == pytest.approx(24)
    assert cost.seconds(1, 0) == pytest.approx(30, rel=1e-2)


def test_the_share_follows_steps_with_drafts_and_returns():
    cost = StepCost(TABLE)
    cost.observe(1, 0, 10.0)
    for _ in range(80):
        cost.observe(1, 3, 15.0)  # half of the table's extra time
    assert cost.seconds(1, 3) == pytest.approx(15, rel=1e-2)
    assert cost.seconds(1, 1) == pytest.approx(11, rel=1e-2)
    for _ in range(500):
        cost.observe(1, 0, 10.0)
    assert cost.seconds(1, 3) == pytest.approx(20, rel=1e-2)


def test_one_disturbance_moves_little_and_none_for_good():
    cost = StepCost(TABLE)
    cost.observe(1, 0, 10.0)
    cost.observe(1, 0, 10_000.0)
    assert cost.seconds(1, 0) <= 10 * (1 + 0.2 * (OUTLIER - 1)) + 1e-9
    for _ in range(60):
        cost.observe(1, 0, 10.0)
    cost.observe(1, 3, 1e9)
    assert cost.seconds(1, 3) <= 10 + 10 * (1 + 0.1 * (OUTLIER - 1)) + 1e-3
    for _ in range(200):
        cost.observe(1, 3, 1e9)
    assert cost.seconds(1, 3) <= 10 + 10 * MOST_SHARE + 1e-3
    cost.observe(1, 0, 0.0)  # a clock that stood still
    assert cost.seconds(1, 0) == pytest.approx(10, rel=1e-2)


def test_ages_count_steps_with_drafts_by_class():
    cost = StepCost(TABLE)
    assert cost.age(3) == 0
    for _ in range(5):
        cost.observe(3, 2, 20.0)
    assert (cost.age(3), cost.age(2)) == (5, 0)
    cost.observe(3, 0, 20.0)
    assert cost.age(3) == 0


def test_classes_of_rows():
    classes = [rows_class(n) for n in range(1, 100)]
    assert classes[:8] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert sorted(set(classes)) == [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96]
    assert all(key <= n < 1.6 * key for n, key in enumerate(classes, 1) if n >= 8)
