"""What a row's streak says of its next drafts."""

from __future__ import annotations

import random

from lamella.specdec.length.acceptance import FULL_WEIGHT, MAX_STREAK, StreakAcceptance


def test_drafts_count_up_to_the_first_that_differs():
    acceptance = StreakAcceptance()
    before = [acceptance.probability(streak) for streak in range(5)]
    assert acceptance.observe(1, [7, 8, 9, 10], [7, 8, 0]) == 0  # the third differs, of the fourth nothing is known
    after = [acceptance.probability(streak) for streak in range(5)]
    assert [a > b for a, b in zip(after, before)] == [False, True, True, False, False]
    assert after[3] < before[3]
    assert (after[0], after[4]) == (before[0], before[4])


def test_a_draft_that_was_not_verified_counts_by_what_the_target_said():
    acceptance = StreakAcceptance()
    before = acceptance.probability(4)
    assert acceptance.observe(4, [7, 8, 9], [7]) == 5
    assert acceptance.probability(4) > before
    assert acceptance.observe(5, [8, 9], [3]) == 0


def test_all_stood_and_more_are_held_than_were_emitted():
    assert StreakAcceptance().observe(2, [1, 2, 3, 4], [1, 2, 3]) == 5
    assert StreakAcceptance().observe(2, [1, 2], [1, 2, 9]) == 4


def test_a_step_without_drafts_ends_the_streak_and_counts_nothing():
    acceptance = StreakAcceptance()
    before = [acceptance.probability(streak) for streak in range(MAX_STREAK + 1)]
    assert acceptance.observe(6, [], [3]) == 0
    assert [acceptance.probability(streak) for streak in range(MAX_STREAK + 1)] == before


def test_the_rate_is_learnt_and_relearnt():
    acceptance, rng = StreakAcceptance(), random.Random(0)
    for rate in (0.9, 0.2, 0.6):
        for _ in range(600):
            acceptance.observe(0, [1], [1 if rng.random() < rate else 2])
        assert abs(acceptance.probability(0) - rate) < 0.12
    assert acceptance.probability(3) == StreakAcceptance().probability(3)


def test_long_streaks_are_one():
    acceptance = StreakAcceptance()
    for _ in range(int(FULL_WEIGHT)):
        acceptance.observe(MAX_STREAK + 40, [1], [2])
    assert acceptance.probability(MAX_STREAK) == acceptance.probability(1000) < 0.1
