"""Lossy rules: their laws against enumeration of every sample and every coin, from the rules' definitions."""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from fractions import Fraction

import pytest

from lamella.specdec import InputError
from lamella.specdec.rules import Relaxed, Threshold, Typical
from lamella.specdec.testing import exact

torch = pytest.importorskip("torch")
lossy = pytest.importorskip("lamella.specdec.verify.lossy")

VOCAB = 4
RULES = [
    Typical(),
    Typical(0.5, 0.6),
    Typical(1.0, 1.0),
    Relaxed(2, 0.8),
    Relaxed(3, 50.0),
    Threshold(0.4, 1.0),
    Threshold(1.0, 0.5),
    Threshold(0.7, 0.3),
    Threshold(1.0, 0.01),
]


def target(kind, prefix):
    rng = random.Random(f"{kind} {tuple(prefix)}")
    if kind == "sure":
        chosen = rng.randrange(VOCAB)
        return [Fraction(int(x == chosen)) for x in range(VOCAB)]
    weights = [rng.choice([0, 1, 2, 5, 9]) for _ in range(VOCAB)]
    weights[rng.randrange(VOCAB)] += 1
    return [Fraction(weight, sum(weights)) for weight in weights]


def acceptance(rule, p, draft):
    """Probability that a draft stands, from the definition of the rule."""
    if isinstance(rule, Typical):
        entropy = -sum(float(x) * math.log(x) for x in p if x)
        sure = p[draft] > min(rule.posterior_threshold, rule.posterior_alpha * math.exp(-entropy))
    elif isinstance(rule, Relaxed):
        best = sorted(p, reverse=True)
        near = p[draft] > 0 and math.log(best[0]) - math.log(p[draft]) <= rule.relaxed_delta
        sure = near and p[draft] >= best[rule.relaxed_topk - 1]
    else:
        if p[draft] >= Fraction(rule.accept_threshold_single) and p[draft]:
            return Fraction(1)
        return min(Fraction(1), p[draft] / Fraction(rule.accept_threshold_acc))
    return Fraction(1) if sure else p[draft]


def expected_law(rule, kind, drafts):
    """Of the tokens of a step: accepted drafts, then a sample of the target without the refused one."""
    law = defaultdict(Fraction)
    alive = Fraction(1)
    for i, draft in enumerate(drafts):
        p = target(kind, drafts[:i])
        stands = acceptance(rule, p, draft)
        if stands < 1:
            for x in range(VOCAB):
                if x != draft and p[x]:
                    law[(*drafts[:i], x)] += alive * (1 - stands) * p[x] / (1 - p[draft])
        alive *= stands
    for x, prob in enumerate(target(kind, drafts)):
        law[(*drafts, x)] += alive * prob
    return {ids: prob for ids, prob in law.items() if prob}


def found_law(rule, kind, drafts):
    """The same, asked of the implementation for every sample at every position and every cell of coins."""
    rows = [target(kind, drafts[:i]) for i in range(len(drafts) + 1)]
    coins = []
    for p, draft in zip(rows, drafts):
        stands = acceptance(rule, p, draft)
        coins.append([(stands - p[draft]) / (1 - p[draft])] if p[draft] < 1 else [])
    boxes = list(exact.cells(coins)) if isinstance(rule, Threshold) else [exact.Cell(1.0, [(0.5,) * len(drafts)])]
    cases, weights = [], []
    for sampled in itertools.product(range(VOCAB), repeat=len(rows)):
        prob = math.prod(float(p[x]) for p, x in zip(rows, sampled))
        if not prob:
            continue
        for box in boxes:
            for corner in box.corners:
                cases.append((sampled, corner))
                weights.append(prob * box.volume / len(box.corners))
    count = len(cases)
    verdict = lossy.verify_lossy(
        rule,
        torch.tensor([x for sampled, _ in cases for x in sampled], dtype=torch.int32),
        torch.tensor([[float(x) for x in p] for p in rows], dtype=torch.float64).repeat(count, 1),
        torch.tensor([drafts] * count, dtype=torch.int32),
        torch.arange(count + 1) * len(rows),
        torch.tensor([corner for _, corner in cases], dtype=torch.float64) if isinstance(rule, Threshold) else None,
    )
    law = defaultdict(float)
    for weight, accepted, next_id in zip(weights, verdict.num_accepted.tolist(), verdict.next_ids.tolist()):
        law[(*drafts[:accepted], next_id)] += weight
    return law


@pytest.mark.parametrize("kind", ["a", "b", "c", "sure"])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_every_chain_has_the_law_that_the_rule_says(rule, kind):
    for drafts in itertools.product(range(VOCAB), repeat=2):
        law, wanted = found_law(rule, kind, drafts), expected_law(rule, kind, drafts)
        for ids in {*law, *wanted}:
            assert law.get(ids, 0.0) == pytest.approx(float(wanted.get(ids, 0)), abs=1e-7), (drafts, ids)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_more_stands_than_by_the_standard_rule_but_nothing_that_the_target_excludes(rule):
    gained = 0
    for kind, draft in itertools.product("abcd", range(VOCAB)):
        p = target(kind, ())
        stands = sum(prob for ids, prob in found_law(rule, kind, (draft,)).items() if len(ids) == 2)
        assert stands >= float(p[draft]) - 1e-7
        gained += stands > float(p[draft]) + 1e-7
        assert p[draft] or stands == 0.0
    assert gained


def test_shapes_of_batches_do_not_matter():
    """Rows: two drafts, a prompt chunk, none, one of two that has logits."""
    probs = torch.tensor([[0.5, 0.5, 0.0]]).repeat(6, 1)
    drafts = torch.tensor([[1, 2], [1, 1], [-1, -1], [1, 1]], dtype=torch.int32)
    starts = torch.tensor([0, 3, 3, 4, 6])
    verdict = lossy.verify_lossy(Typical(0.4, 1.0), torch.zeros(6, dtype=torch.int32), probs, drafts, starts)
    assert verdict.num_accepted.tolist() == [1, 0, 0, 1]
    assert verdict.next_ids.tolist() == [0, -1, 0, 0]
    none = lossy.verify_lossy(Typical(), torch.zeros(0), torch.zeros(0, 3), drafts[:1], torch.tensor([0, 0]))
    assert (none.num_accepted.tolist(), none.next_ids.tolist()) == ([0], [-1])


def test_arguments_that_do_not_fit_are_named():
    probs, drafts, starts = torch.ones(2, 3), torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, 2])
    with pytest.raises(InputError, match="^target_ids: expected "):
        lossy.verify_lossy(Typical(), torch.zeros(3, dtype=torch.int32), probs, drafts, starts)
    with pytest.raises(InputError, match="^accept_uniforms: thresholds need them"):
        lossy.verify_lossy(Threshold(0.5), torch.zeros(2, dtype=torch.int32), probs, drafts, starts)
