"""Verifications of drawn drafts keep the target's law: every draft and every decision, without sampling noise.

The oracle (testing/exact.py) proves each rule in rational numbers; each implementation is then asked at the corners
of the cells of uniforms on which the oracle says that its outcome is constant. Corners that disagree, an outcome of
another probability, a law that is not the target's: each fails.
"""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from fractions import Fraction

import pytest

from lamella.specdec import AdaptiveLength
from lamella.specdec.testing import exact

torch = pytest.importorskip("torch")
block = pytest.importorskip("lamella.specdec.verify.block")
rejection = pytest.importorskip("lamella.specdec.verify.rejection")
trees = pytest.importorskip("lamella.specdec.verify.tree")

TOLERANCE = 1e-7  # cells thinner than 3e-9 are left out; everything else is exact up to float64
KINDS = ["random", "equal", "disjoint", "peaked", "sparse", "alternating"]
CHAINS = {
    "rejection": (rejection.verify_rejection, exact.rejection_fate),
    "block": (block.verify_block, exact.block_fate),
}
SHAPES = [(2, 1), (4, 1), (3, 2), (2, 3), (4, 2)]
TREES = [(-1, -1), (-1, -1, -1), (-1, -1, 0), (-1, 0, 0), (-1, 0, 1), (-1, 0, -1, 1)]


class Pair:
    """A target and a draft model that differ as the kind says; probabilities depend on the whole prefix."""

    def __init__(self, kind: str, vocab: int, seed: int) -> None:
        self.kind, self.vocab, self.seed = kind, vocab, seed

    def target(self, prefix):
        return self._row("target", prefix)

    def draft(self, prefix):
        kind = self.kind
        if kind == "alternating":  # equal at every second position: a weight of exactly 1 in the middle of a block
            kind = "equal" if len(prefix) % 2 else "random"
        return self._row("target" if kind == "equal" else "draft", prefix)

    def _row(self, who, prefix):
        rng = random.Random(f"{who} {self.kind} {self.seed} {tuple(prefix)}")
        if self.kind == "disjoint":
            half = self.vocab // 2
            support = range(half) if who == "target" else range(half, self.vocab)
            weights = [rng.randint(1, 9) if x in support else 0 for x in range(self.vocab)]
        elif self.kind == "peaked":
            weights = [1] * self.vocab
            weights[rng.randrange(self.vocab)] = 10**6
        elif self.kind == "sparse":
            weights = [rng.choice([0, 0, 1, 5]) for _ in range(self.vocab)]
            weights[rng.randrange(self.vocab)] += 1
        else:
            weights = [rng.randint(0, 9) for _ in range(self.vocab)]
            weights[rng.randrange(self.vocab)] += 1
        return [Fraction(weight, sum(weights)) for weight in weights]


def close(law, expected):
    """Two laws, one of floats and one of fractions, are the same."""
    off = {ids: (law.get(ids, 0.0), float(expected.get(ids, 0))) for ids in {*law, *expected}}
    off = {ids: pair for ids, pair in off.items() if abs(pair[0] - pair[1]) > TOLERANCE}
    assert not off, off


def chain_law(verify, fate, pair, drafts, chosen=False):
    """Law of the tokens that an implementation emits, given its drafts."""
    k = len(drafts)
    oracle = fate(pair.target, None if chosen else pair.draft, drafts)
    axes = [[t] for t in oracle.thresholds] + [exact.running_sums(oracle.next_rows)]
    boxes = list(exact.cells(axes))
    points = torch.tensor([corner for box in boxes for corner in box.corners], dtype=torch.float64)
    rows = len(points)
    probs = torch.tensor([[float(x) for x in pair.target(drafts[:i])] for i in range(k + 1)], dtype=torch.float64)
    q = torch.tensor([[float(x) for x in pair.draft(drafts[:i])] for i in range(k)], dtype=torch.float64)
    verdict = verify(
        probs.repeat(rows, 1),
        torch.tensor([drafts] * rows),
        torch.arange(rows + 1) * (k + 1),
        None if chosen else q.expand(rows, -1, -1),
        points[:, :k],
        points[:, k:].expand(-1, k + 1),
    )
    outcomes = [(*drafts[:n], x) for n, x in zip(verdict.num_accepted.tolist(), verdict.next_ids.tolist())]
    return weighed(boxes, outcomes), oracle


def tree_law(pair, parents, ids, chosen=False, replacement=False):
    """The same for a tree."""
    oracle = exact.tree_fate(pair.target, None if chosen else pair.draft, parents, ids, replacement)
    axes = [[t] for t in oracle.thresholds] + [exact.running_sums(oracle.next_rows.values())]
    boxes = list(exact.cells(axes))
    points = torch.tensor([corner for box in boxes for corner in box.corners], dtype=torch.float64)
    rows, n = len(points), len(parents)
    tree = trees.DraftTree(parents)
    prefixes = [()]
    for node, parent in enumerate(parents):
        prefixes.append((*prefixes[parent + 1], ids[node]))
    probs = torch.tensor([[float(x) for x in pair.target(prefix)] for prefix in prefixes], dtype=torch.float64)
    q = [[float(x) for x in pair.draft(prefixes[parent + 1])] for parent in parents]
    verdict = trees.verify_tree(
        tree,
        probs.repeat(rows, 1),
        torch.tensor([ids] * rows),
        torch.arange(rows + 1) * (n + 1),
        None if chosen else torch.tensor(q, dtype=torch.float64).expand(rows, -1, -1),
        points[:, :n],
        points[:, n:].expand(-1, tree.depth + 1),
        replacement,
    )
    outcomes = []
    for count, path, next_id in zip(verdict.num_accepted.tolist(), verdict.path.tolist(), verdict.next_ids.tolist()):
        assert all(node >= 0 for node in path[:count])
        assert all(node == -1 for node in path[count:])
        outcomes.append((*(ids[node] for node in path[:count]), next_id))
    return weighed(boxes, outcomes), oracle


def weighed(boxes, outcomes):
    """Outcomes at the corners, in the order of the boxes -> their law. All corners of a box must agree."""
    law = defaultdict(float)
    at = 0
    for box in boxes:
        found = set(outcomes[at : at + len(box.corners)])
        at += len(box.corners)
        assert len(found) == 1, f"a threshold is elsewhere: {found} within one cell"
        law[found.pop()] += box.volume
    return law


def whole_law(parts):
    """Mixture of float laws."""
    law = defaultdict(float)
    for weight, part in parts:
        for ids, prob in part.items():
            law[ids] += float(weight) * prob
    return law


def completed(law, target, num_tokens):
    """exact.completed for floats."""
    return exact.completed(law, lambda ids: [float(x) for x in target(ids)], num_tokens)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("vocab", "k"), [*SHAPES, (3, 3)])
def test_the_rules_keep_the_law_in_rational_numbers(kind, vocab, k):
    """Of the oracle itself: equality, not closeness."""
    for seed in range(2):
        pair = Pair(kind, vocab, seed)
        expected = exact.target_law(pair.target, k + 1)
        drafts = exact.drafts_law(pair.draft, k)
        means = {}
        for name, (_, fate) in CHAINS.items():
            law = exact.mixed(
                (prob, exact.emitted(fate(pair.target, pair.draft, ids), ids)) for ids, prob in drafts.items()
            )
            assert sum(law.values()) == 1
            assert exact.completed(law, pair.target, k + 1) == expected
            means[name] = exact.mean_accepted(law)
        assert means["rejection"] == exact.overlap(pair.target, pair.draft, k)
        assert means["block"] >= means["rejection"]
        for ids in drafts:
            chosen = exact.emitted(exact.rejection_fate(pair.target, None, ids), ids)
            assert exact.completed(chosen, pair.target, k + 1) == expected


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("parents", TREES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_tree_rule_keeps_the_law_in_rational_numbers(kind, parents, replacement):
    pair = Pair(kind, 3, 5)
    num_tokens = trees.DraftTree(parents).depth + 1
    law = exact.mixed(
        (prob, exact.tree_emitted(exact.tree_fate(pair.target, pair.draft, parents, ids, replacement), ids))
        for ids, prob in exact.trees_law(pair.draft, parents, replacement).items()
    )
    assert exact.completed(law, pair.target, num_tokens) == exact.target_law(pair.target, num_tokens)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("vocab", "k"), SHAPES)
@pytest.mark.parametrize("rule", CHAINS)
def test_drawn_drafts_keep_the_law(rule, vocab, k, kind):
    verify, fate = CHAINS[rule]
    pair = Pair(kind, vocab, seed=3)
    parts = []
    for ids, prob in exact.drafts_law(pair.draft, k).items():
        law, oracle = chain_law(verify, fate, pair, ids)
        close(law, exact.emitted(oracle, ids))
        parts.append((prob, law))
    law = whole_law(parts)
    close(completed(law, pair.target, k + 1), exact.target_law(pair.target, k + 1))
    if rule == "rejection":
        assert float(exact.overlap(pair.target, pair.draft, k)) == pytest.approx(mean_accepted(law), abs=TOLERANCE)
    else:
        assert mean_accepted(law) >= float(exact.overlap(pair.target, pair.draft, k)) - TOLERANCE


def mean_accepted(law):
    return sum(prob * (len(ids) - 1) for ids, prob in law.items())


def test_a_block_keeps_more_where_a_good_draft_follows_a_bad_one():
    """Strictly more, so that the comparison above is not one of equals."""
    gains = []
    for seed in range(4):
        pair = Pair("random", 3, seed)
        means = [
            mean_accepted(
                whole_law(
                    (prob, chain_law(verify, fate, pair, ids)[0])
                    for ids, prob in exact.drafts_law(pair.draft, 2).items()
                )
            )
            for verify, fate in CHAINS.values()
        ]
        gains.append(means[1] - means[0])
    assert min(gains) > -TOLERANCE
    assert max(gains) > 0.01


@pytest.mark.parametrize("kind", ["random", "sparse", "peaked"])
@pytest.mark.parametrize("rule", CHAINS)
def test_chosen_drafts_keep_the_law_whatever_they_are(rule, kind):
    """Behind one-by-one rejection also step by step: the law of comparing samples with drafts, as in verify_one_hot."""
    verify, fate = CHAINS[rule]
    pair = Pair(kind, 3, 1)
    expected = exact.target_law(pair.target, 3)
    for ids in exact.target_law(lambda prefix: [Fraction(1, 3)] * 3, 2):
        law, _ = chain_law(verify, fate, pair, ids, chosen=True)
        close(completed(law, pair.target, 3), expected)
        if rule == "rejection":
            one_hot = defaultdict(Fraction)
            for sample, prob in expected.items():
                # the emitted tokens are the samples up to the first that differs from its draft
                agree = next((i for i, (a, b) in enumerate(zip(sample, ids)) if a != b), 2)
                one_hot[sample[: agree + 1]] += prob
            close(law, one_hot)


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("parents", TREES)
@pytest.mark.parametrize("kind", KINDS)
def test_drawn_trees_keep_the_law(kind, parents, replacement):
    pair = Pair(kind, 3, seed=2)
    parts = []
    for ids, prob in exact.trees_law(pair.draft, parents, replacement).items():
        law, oracle = tree_law(pair, parents, ids, replacement=replacement)
        close(law, exact.tree_emitted(oracle, ids))
        parts.append((prob, law))
    num_tokens = trees.DraftTree(parents).depth + 1
    close(completed(whole_law(parts), pair.target, num_tokens), exact.target_law(pair.target, num_tokens))


@pytest.mark.parametrize("kind", ["random", "sparse", "peaked"])
def test_chosen_trees_keep_the_law_whatever_they_are(kind):
    pair = Pair(kind, 3, 4)
    for parents in [(-1, -1), (-1, -1, 0), (-1, 0, 0)]:
        num_tokens = trees.DraftTree(parents).depth + 1
        expected = exact.target_law(pair.target, num_tokens)
        for ids in exact.target_law(lambda prefix: [Fraction(1, 3)] * 3, len(parents)):
            law, oracle = tree_law(pair, parents, ids, chosen=True)
            close(law, exact.tree_emitted(oracle, ids))
            close(completed(law, pair.target, num_tokens), expected)


def test_a_second_candidate_raises_acceptance():
    pair = Pair("random", 4, 0)
    means = []
    for parents in [(-1,), (-1, -1), (-1, -1, -1)]:
        law = whole_law(
            (prob, tree_law(pair, parents, ids)[0]) for ids, prob in exact.trees_law(pair.draft, parents).items()
        )
        means.append(mean_accepted(law))
    assert means[0] < means[1] < means[2]


def test_a_rule_that_looks_at_the_drawn_draft_bends_the_law():
    """p(A) = .7, q(A) = .5, and verification only if the draft is A: A comes out with .85."""
    p, q = [Fraction(7, 10), Fraction(3, 10)], [Fraction(1, 2), Fraction(1, 2)]
    target, draft = (lambda prefix: p), (lambda prefix: q)
    law = exact.mixed(
        (prob, exact.emitted(exact.rejection_fate(target, draft, ids if ids == (0,) else ()), ids))
        for ids, prob in exact.drafts_law(draft, 1).items()
    )
    first = exact.mixed((prob, {ids[:1]: Fraction(1)}) for ids, prob in law.items())
    assert first == {(0,): Fraction(85, 100), (1,): Fraction(15, 100)}


@pytest.mark.parametrize("kind", ["random", "sparse"])
@pytest.mark.parametrize("rule", CHAINS)
def test_lengths_that_follow_the_past_keep_the_law(rule, kind):
    """Three steps of drawn drafts; how many are verified is what AdaptiveLength makes of the steps before."""
    fate, pair, num_tokens = CHAINS[rule][1], Pair(kind, 2, seed=3), 4
    lens = set()

    def steps(ids, streak, control, prob):
        """Law of num_tokens ids behind `ids`, in steps of up to two drafts."""
        if len(ids) >= num_tokens:
            return {ids[:num_tokens]: prob}
        (length,) = control.choose([streak], [2])
        lens.add(length)

        def behind(prefix):
            return pair.target((*ids, *prefix))

        def drawn(prefix):
            return pair.draft((*ids, *prefix))

        parts = []
        for drafts, chance in exact.drafts_law(drawn, 2).items():
            outcome = exact.emitted(fate(behind, drawn, drafts[:length]), drafts[:length])
            for emitted, share in outcome.items():
                after = copy.deepcopy(control)
                now = after.acceptance.observe(streak, drafts, emitted)
                parts.append((Fraction(1), steps((*ids, *emitted), now, after, prob * chance * share)))
        return exact.mixed(parts)

    control = AdaptiveLength([(1, 1.0), (2, 1.45), (3, 1.9)])
    control.acceptance.observe(0, [1], [1])
    law = steps((), 0, control, Fraction(1))
    assert law == exact.target_law(pair.target, num_tokens)
    assert len(lens) > 1, "lengths that never change prove nothing"
