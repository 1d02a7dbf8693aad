"""Verification keeps the target's law: exact enumeration with rational probabilities, and identity of sampled output.

The runner samples every logits row independently behind the drafts before it; verification compares ids. So the joint
law of the next tokens must be exactly the target's, whatever the drafts are.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamella.specdec import AcceptanceStats, NgramConfig, NgramDrafter
from lamella.specdec.drafters.ngram_index import ReferenceNgramIndex
from lamella.specdec.testing import ScriptedDrafter, ScriptedModel, decode
from lamella.specdec.verify.reference import verify_greedy, verify_one_hot

PREFIX = [1, 0, 2]


def law_of_target(model: ScriptedModel, num_tokens: int) -> dict[tuple[int, ...], Fraction]:
    """Probability of each run of num_tokens ids behind PREFIX, sampled one by one."""
    law = {(): Fraction(1)}
    for _ in range(num_tokens):
        law = {
            (*ids, token_id): prob * step
            for ids, prob in law.items()
            for token_id, step in enumerate(model.probs([*PREFIX, *ids]))
        }
    return {ids: prob for ids, prob in law.items() if prob}


def law_of_verified(model: ScriptedModel, drafts: tuple[int, ...]) -> dict[tuple[int, ...], Fraction]:
    """The same for one verified step, filled up to len(drafts) + 1 tokens by plain sampling."""
    num_tokens = len(drafts) + 1
    law: dict[tuple[int, ...], Fraction] = defaultdict(Fraction)
    rows = [model.probs([*PREFIX, *drafts[:i]]) for i in range(num_tokens)]
    for samples in itertools.product(range(model.vocab_size), repeat=num_tokens):
        prob = Fraction(1)
        for row, token_id in zip(rows, samples):
            prob *= row[token_id]
        if not prob:
            continue
        verdict = verify_one_hot(samples, [drafts], [0, num_tokens])
        emitted = (*drafts[: verdict.num_accepted[0]], verdict.next_ids[0])
        tails = {emitted: prob}
        for _ in range(num_tokens - len(emitted)):
            tails = {
                (*ids, token_id): weight * step
                for ids, weight in tails.items()
                for token_id, step in enumerate(model.probs([*PREFIX, *ids]))
            }
        for ids, weight in tails.items():
            law[ids] += weight
    return {ids: prob for ids, prob in law.items() if prob}


@pytest.mark.parametrize(("vocab_size", "num_drafts", "seed"), [(3, 1, 0), (3, 2, 1), (2, 3, 2), (4, 2, 3)])
def test_one_hot_verification_keeps_the_joint_law_exactly(vocab_size, num_drafts, seed):
    model = ScriptedModel(vocab_size, seed)
    expected = law_of_target(model, num_drafts + 1)
    assert sum(expected.values()) == 1
    for drafts in itertools.product(range(vocab_size), repeat=num_drafts):
        assert law_of_verified(model, drafts) == expected, drafts


def test_a_wrong_rule_would_be_noticed():
    """Emitting the rejected row's draft instead of its sample breaks the law; else the test above proves nothing."""
    model = ScriptedModel(3, 1)
    expected = law_of_target(model, 2)
    law: dict[tuple[int, ...], Fraction] = defaultdict(Fraction)
    for draft in range(3):
        for ids, prob in law_of_verified(model, (draft,)).items():
            law[draft, ids[1]] += prob
    assert dict(law) != expected


def test_greedy_verification_emits_the_greedy_run_for_every_draft():
    for seed in range(20):
        model = ScriptedModel(4, seed)
        greedy = decode(model.best, PREFIX, 4)
        for drafts in itertools.product(range(4), repeat=3):
            logits = [[float(p) for p in model.probs([*PREFIX, *drafts[:i]])] for i in range(4)]
            verdict = verify_greedy(logits, [drafts], [0, 4])
            emitted = [*drafts[: verdict.num_accepted[0]], verdict.next_ids[0]]
            assert emitted == greedy[: len(emitted)]
            assert verdict.num_accepted[0] == len(
                list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(drafts, greedy)))
            )


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    prompt=st.lists(st.integers(0, 4), min_size=1, max_size=12),
    script=st.lists(st.integers(0, 4), max_size=5),
    num_tokens=st.integers(1, 24),
)
def test_seeded_output_is_the_one_without_drafts(seed, prompt, script, num_tokens):
    model = ScriptedModel(5, seed=3, memory=2)

    def choose(prefix):
        return model.sample(prefix, seed)

    plain = decode(choose, prompt, num_tokens)
    config = NgramConfig(4, 1, 3)
    for drafter in (ScriptedDrafter(lambda ids: script, 5), NgramDrafter(config, ReferenceNgramIndex(1, 3, False))):
        assert decode(choose, prompt, num_tokens, drafter) == plain


def test_drafts_of_the_target_itself_are_all_accepted():
    model = ScriptedModel(6, seed=9)
    stats = AcceptanceStats()
    drafter = ScriptedDrafter(lambda ids: decode(lambda p: model.sample(p, 5), ids, 3), 3)
    decode(lambda prefix: model.sample(prefix, 5), [1, 2], 40, drafter, stats)
    assert stats.acceptance_rate == 1.0
    assert stats.mean_acceptance_length == 4.0
