"""Several drafters: whose proposal is used, how that changes, and that rows keep to themselves."""

from __future__ import annotations

import random

import pytest

from lamella.specdec import (
    ArbitraryConfig,
    ArbitraryDrafter,
    CombinedDrafter,
    NgramConfig,
    NgramDrafter,
    Rows,
    SuffixConfig,
    SuffixDrafter,
)
from lamella.specdec.drafters.combined import Record
from lamella.specdec.testing import ScriptedDrafter, ScriptedModel
from lamella.specdec.testing.decode import decode


def scripted(*scripts):
    return CombinedDrafter([ScriptedDrafter(script, 3) for script in scripts])


def steps(drafter, truth, start, num_steps, row=0, generation=0, methods=()):
    """Show a row growing by one id of `truth` a step; the methods that proposed."""
    used = []
    for end in range(start, start + num_steps):
        view = Rows([row], [generation], [truth[:end]], methods)
        drafter.observe(view)
        used.append(drafter.propose(view, 3).methods[0])
    return used


TRUTH = list(range(100))
RIGHT, WRONG = (lambda ids: [len(ids), len(ids) + 1]), (lambda ids: [99, 99])


def test_the_first_that_finds_something_is_used():
    drafter = scripted(lambda ids: [], lambda ids: [5], lambda ids: [6, 6])
    view = Rows.single([1, 2])
    drafter.observe(view)
    batch = drafter.propose(view, 3)
    assert (batch.ids, batch.methods) == ([[5]], [1])
    assert drafter.propose(view, 0).ids == [[]]


def test_a_row_moves_to_the_drafter_that_is_right_and_stays_there():
    drafter = scripted(WRONG, RIGHT)
    used = steps(drafter, TRUTH, 2, 20)
    switch = used.index(1)
    assert 0 < switch < 8
    assert used == [0] * switch + [1] * (20 - switch)


def test_two_that_are_equally_right_do_not_take_turns():
    flaky = lambda ids: [len(ids) if len(ids) % 3 else 99]  # noqa: E731
    other = lambda ids: [len(ids) if (len(ids) + 1) % 3 else 99]  # noqa: E731
    assert set(steps(scripted(flaky, other), TRUTH, 2, 60)) == {0}


def test_records_are_of_a_row_and_a_generation():
    drafter = scripted(WRONG, RIGHT)
    assert steps(drafter, TRUTH, 2, 10)[-1] == 1
    assert steps(drafter, TRUTH, 2, 1, row=7) == [0]
    assert steps(drafter, TRUTH, 2, 1, generation=1) == [0]
    drafter.forget([0, 7])
    assert drafter.record(0) is None
    assert steps(drafter, TRUTH, 2, 1, generation=1) == [0]


def test_a_row_that_changes_owner_unsaid_is_not_judged_by_the_former_ones_drafts():
    drafter = scripted(WRONG, RIGHT)
    steps(drafter, TRUTH, 2, 1)  # open: ids behind the second
    drafter.observe(Rows([0], [1], [TRUTH[:9]]))
    assert drafter.record(0) == Record((0.0, 0.0), 0)
    assert steps(drafter, TRUTH, 9, 2, generation=1) == [0, 0]


def test_new_rows_begin_with_what_all_rows_have_shown():
    drafter = scripted(WRONG, RIGHT)
    for row in range(5):
        used = steps(drafter, TRUTH, 2, 20, row=row)
        assert used[-1] == 1
    assert set(used) == {1}


def test_a_row_that_names_a_drafter_gets_no_other():
    drafter = scripted(RIGHT, WRONG, lambda ids: [])
    assert steps(drafter, TRUTH, 2, 20, methods=[1]) == [1] * 20
    assert drafter.record(0) is None  # nothing was compared
    view = Rows([0, 1, 2], [0, 0, 0], [TRUTH[:30]] * 3, [2, -1, 1])
    drafter.observe(view)
    batch = drafter.propose(view, [3, 3, 1])
    assert batch.ids == [[], [30, 31], [99]]
    assert batch.methods == [2, 0, 1]


def test_what_was_not_judged_yet_counts_once_it_is():
    drafter = scripted(WRONG, RIGHT)
    view = Rows.single(TRUTH[:5])
    drafter.observe(view)
    drafter.propose(view, 3)
    drafter.observe(view)  # nothing new
    assert drafter.record(0) == Record((0.0, 0.0), 0)
    drafter.observe(Rows.single(TRUTH[:8]))  # three ids, two of which were drafted by the second
    assert drafter.record(0).gains == pytest.approx((0.0, 0.4))


def test_needs_are_those_of_all():
    drafter = CombinedDrafter([NgramDrafter(NgramConfig(3)), ArbitraryDrafter(ArbitraryConfig(9))])
    assert (drafter.needs.max_drafts, drafter.needs.host_ids, drafter.needs.one_hot) == (9, True, True)


@pytest.mark.parametrize("seed", range(4))
def test_output_is_what_it_is_without_drafts(seed):
    model = ScriptedModel(5, seed=seed, memory=2)
    rng = random.Random(seed)
    prompt = [rng.randrange(5) for _ in range(12)]
    drafter = CombinedDrafter(
        [
            SuffixDrafter(SuffixConfig(6, max_spec_factor=3.0)),
            NgramDrafter(NgramConfig(4, 1, 3)),
            ArbitraryDrafter(ArbitraryConfig(2)),
        ]
    )
    choose = lambda ids: model.sample(ids, seed)  # noqa: E731
    assert decode(choose, prompt, 80, drafter) == decode(choose, prompt, 80)
