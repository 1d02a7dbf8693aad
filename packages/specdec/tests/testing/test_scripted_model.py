from __future__ import annotations

from collections import Counter

from lamella.specdec.testing import ScriptedModel, decode


def test_probabilities_are_exact_and_fixed_by_the_seed():
    model = ScriptedModel(7, seed=4)
    for prefix in ([], [1], [1, 2, 3]):
        assert sum(model.probs(prefix)) == 1
        assert model.probs(prefix) == ScriptedModel(7, seed=4).probs(prefix)
    assert model.probs([1, 2]) != ScriptedModel(7, seed=5).probs([1, 2])
    assert model.probs([1, 2]) != model.probs([2, 1])


def test_memory_limits_what_counts():
    model = ScriptedModel(7, seed=4, memory=1)
    assert model.probs([1, 2]) == model.probs([5, 5, 2])


def test_samples_follow_the_probabilities():
    model = ScriptedModel(4, seed=1)
    counts = Counter(model.sample([2], seed) for seed in range(4000))
    for token_id, prob in enumerate(model.probs([2])):
        assert abs(counts[token_id] / 4000 - prob) < 0.04
        assert prob or not counts[token_id]


def test_decode_without_a_drafter_is_the_plain_loop():
    model = ScriptedModel(5, seed=2)
    ids = [0, 1]
    for _ in range(6):
        ids.append(model.best(ids))
    assert decode(model.best, [0, 1], 6) == ids[2:]
