"""Lengths that pay: against all combinations by hand, and on texts with and without repeats."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamella.specdec import AdaptiveLength, NgramConfig, NgramDrafter, Rows, SuffixConfig, SuffixDrafter
from lamella.specdec.length.adaptive import LEAST_SURVIVAL, MAX_AGE, START_GAIN

LINEAR = [(1, 1.0), (2, 1.3), (32, 10.3)]
"""Every draft costs .3 of a plain step of one row."""
FREE = [(1, 1.0), (64, 1.0001)]


def rate(control, streaks, lens):
    """Expected tokens per second of verifying so many of each row."""
    tokens = float(len(lens))
    for streak, length in zip(streaks, lens):
        survival = 1.0
        for ahead in range(length):
            survival *= control.acceptance.probability(streak + ahead)
            tokens += survival
    return tokens / control.cost.seconds(len(lens), sum(lens))


@settings(max_examples=80, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 18), st.integers(0, 3)), min_size=1, max_size=4),
    slope=st.floats(0.0, 0.6),
    history=st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=40),
)
def test_no_other_lengths_are_faster(rows, slope, history):
    control = AdaptiveLength([(1, 1.0), (40, 1.0 + 39 * slope)])
    for streak, stood in history:
        control.acceptance.observe(streak, [1], [1 if stood else 2])
    streaks, held = [s for s, _ in rows], [h for _, h in rows]
    chosen = control.choose(streaks, held)
    assert all(0 <= length <= most for length, most in zip(chosen, held))
    best = max(rate(control, streaks, lens) for lens in itertools.product(*(range(h + 1) for h in held)))
    got, plain = rate(control, streaks, chosen), rate(control, streaks, [0] * len(rows))
    if any(chosen):
        assert got > plain * START_GAIN
        assert got >= best * (1 - LEAST_SURVIVAL)
    else:
        assert best <= plain * START_GAIN * (1 + LEAST_SURVIVAL)


def test_drafts_that_cost_nothing_are_all_verified_and_those_that_cost_a_step_are_not():
    assert AdaptiveLength(FREE).choose([3, 0], [5, 2]) == [5, 2]
    assert AdaptiveLength([(1, 1.0), (2, 2.0)]).choose([3, 0], [5, 2]) == [0, 0]
    assert AdaptiveLength(FREE).choose([3, 0], [0, 0]) == [0, 0]
    assert AdaptiveLength(FREE).choose([], []) == []


def test_rows_that_copy_get_more_than_rows_that_guess():
    chosen = AdaptiveLength(LINEAR).choose([12, 0], [8, 8])
    assert chosen[0] > 3
    assert chosen[1] == 0


def test_a_crowded_device_verifies_less():
    """The same rows: alone drafts ride along, in a batch they cost what tokens cost."""
    table = [(1, 1.0), (32, 1.1), (64, 2.2), (256, 8.8)]
    assert AdaptiveLength(table).choose([2], [4]) == [4]
    assert not any(AdaptiveLength(table).choose([2] * 64, [4] * 64))


def test_starting_needs_a_gain_that_going_on_does_not():
    """Between the two limits the answer depends on what was done before."""
    both = set()
    for step in range(400):
        table = [(1, 1.0), (2, 1.0 + step / 400)]
        fresh, warm = AdaptiveLength(table), AdaptiveLength([*FREE])
        assert warm.choose([1], [1]) == [1]
        warm.cost = fresh.cost
        both.add((fresh.choose([1], [1])[0], warm.choose([1], [1])[0]))
    assert both == {(1, 1), (0, 1), (0, 0)}


def test_a_plain_step_is_made_now_and_then():
    control = AdaptiveLength(FREE)
    lens = []
    for _ in range(3 * MAX_AGE):
        (length,) = control.choose([9], [4])
        control.cost.observe(1, length, 1.0)
        lens.append(length)
    assert lens.count(0) == 2
    assert lens[MAX_AGE] == 0


def speed_up(drafter, texts, prompt_len, seed):
    """Seconds of plain steps ÷ seconds with adaptive lengths, for outputs that are known; seconds follow LINEAR, with
    disturbances."""
    rng = random.Random(seed)
    control, truth = AdaptiveLength(LINEAR), AdaptiveLength(LINEAR).cost
    plain = spent = 0.0
    for generation, text in enumerate(texts):
        known, streak = prompt_len, 0
        while known < len(text):
            view = Rows([0], [generation], [text[:known]])
            drafter.observe(view)
            drafts = list(drafter.propose(view, len(text) - known - 1).ids[0])
            (length,) = control.choose([streak], [len(drafts)])
            stood = next((i for i in range(length) if drafts[i] != text[known + i]), length)
            emitted = text[known : known + stood + 1]
            known += len(emitted)
            seconds = truth.seconds(1, length)
            spent += seconds
            plain += len(emitted)
            streak = control.acceptance.observe(streak, drafts, emitted)
            control.cost.observe(1, length, seconds * (3.0 if rng.random() < 0.05 else rng.uniform(0.9, 1.1)))
    return plain / spent


@pytest.mark.parametrize(
    "make",
    [lambda: NgramDrafter(NgramConfig(16, 1, 5)), lambda: SuffixDrafter(SuffixConfig(16, max_spec_factor=4.0))],
    ids=["ngram", "suffix"],
)
def test_texts_without_repeats_lose_nothing_and_copies_gain(make):
    """Ids of few kinds match all the time and are followed by anything: verifying what matches would cost a lot."""
    rng = random.Random(5)
    noise = [[rng.randrange(12) for _ in range(300)] for _ in range(4)]
    assert speed_up(make(), noise, 100, 1) >= 0.98
    copies = []
    for _ in range(4):
        prompt = [rng.randrange(500) for _ in range(100)]
        copies.append(prompt + prompt[10:90] + [rng.randrange(500) for _ in range(5)] + prompt[20:80])
    assert speed_up(make(), copies, 100, 1) >= 1.8
    assert speed_up(make(), [*noise, *copies, *noise], 100, 1) >= 1.1


def test_each_drafter_is_trusted_by_its_own_record():
    control = AdaptiveLength([(1, 1.0), (2, 1.3), (32, 10.3)], num_methods=2)
    for _ in range(200):
        control.by_method[0].observe(0, [1], [2])
        control.by_method[1].observe(0, [1], [1])
    assert control.choose([0, 0], [2, 2], [0, 1])[0] == 0
    assert control.choose([0, 0], [2, 2], [0, 1])[1] > 0
    assert control.choose([0, 0], [2, 2]) == [0, 0]


def test_a_plain_step_that_is_made_to_measure_says_so():
    control = AdaptiveLength(FREE)
    assert control.choose([3], [2]) == [2]
    assert not control.measures
    for _ in range(MAX_AGE):
        control.cost.observe(1, 2, 1.0)
    assert control.choose([3], [2]) == [0]
    assert control.measures
