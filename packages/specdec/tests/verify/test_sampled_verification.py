"""Verifications of drawn drafts beyond their law: samples, ragged batches, odd numbers, wrong arguments."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamella.specdec import InputError
from lamella.specdec.testing import ScriptedModel, exact

torch = pytest.importorskip("torch")
block = pytest.importorskip("lamella.specdec.verify.block")
rejection = pytest.importorskip("lamella.specdec.verify.rejection")
trees = pytest.importorskip("lamella.specdec.verify.tree")

FakeTensorMode = pytest.importorskip("torch._subclasses.fake_tensor").FakeTensorMode


def verify_chain(probs, drafts, logits_start, draft_probs, accept_uniforms, next_uniforms):
    """verify_tree on a tree without branches."""
    tree = trees.DraftTree(range(-1, drafts.shape[1] - 1), drafts.device)
    return trees.verify_tree(tree, probs, drafts, logits_start, draft_probs, accept_uniforms, next_uniforms)


CHAIN_RULES = [rejection.verify_rejection, block.verify_block, verify_chain]
LAWS = {
    rejection.verify_rejection: exact.rejection_fate,
    block.verify_block: exact.block_fate,
    verify_chain: exact.rejection_fate,
}


def laws(rng, *shape, sharpness=2.0):
    """Random probabilities."""
    return torch.softmax(torch.randn(*shape, generator=rng, dtype=torch.float64) * sharpness, dim=-1)


def outcome(verdict):
    return list(zip(verdict.num_accepted.tolist(), verdict.next_ids.tolist()))


def uniforms(rng, *shape):
    return torch.rand(*shape, generator=rng, dtype=torch.float64)


@pytest.mark.parametrize("rows", [200_000, pytest.param(2_000_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rule", CHAIN_RULES)
def test_samples_follow_the_law(rule, rows):
    """χ² of so many steps in float32, drafts drawn anew in each; the oracle gives the expected counts."""
    target, draft = ScriptedModel(4, seed=1).probs, ScriptedModel(4, seed=2).probs
    k = 2
    rng = torch.Generator().manual_seed(0)
    drafts = torch.zeros(rows, 0, dtype=torch.long)
    p, q = [], []
    for i in range(k + 1):
        prefixes, which = (
            torch.unique(drafts, dim=0, return_inverse=True) if i else (drafts[:1], drafts.new_zeros(rows))
        )
        p.append(torch.tensor([[float(x) for x in target(ids)] for ids in prefixes.tolist()])[which])
        if i < k:
            q.append(torch.tensor([[float(x) for x in draft(ids)] for ids in prefixes.tolist()])[which])
            drafts = torch.cat([drafts, torch.multinomial(q[i], 1, generator=rng)], dim=1)
    verdict = rule(
        torch.stack(p, dim=1).flatten(0, 1),
        drafts,
        torch.arange(rows + 1) * (k + 1),
        torch.stack(q, dim=1),
        uniforms(rng, rows, k),
        uniforms(rng, rows, k + 1),
    )
    counts = Counter((*ids[:n], x) for ids, (n, x) in zip(drafts.tolist(), outcome(verdict)))
    expected = exact.mixed(
        (prob, exact.emitted(LAWS[rule](target, draft, ids), ids)) for ids, prob in exact.drafts_law(draft, k).items()
    )
    assert set(counts) <= set(expected)
    chi2 = sum((counts[ids] - rows * float(prob)) ** 2 / (rows * float(prob)) for ids, prob in expected.items())
    degrees = len(expected) - 1
    assert degrees > 20
    assert chi2 < degrees + 5 * (2 * degrees) ** 0.5, (chi2, degrees)


@st.composite
def ragged(draw):
    """Rows of drafts with -1 anywhere, and for each row 0 .. width + 2 logits rows."""
    width = draw(st.integers(0, 4))
    drafts = draw(st.lists(st.lists(st.integers(-1, 4), min_size=width, max_size=width), min_size=1, max_size=5))
    start = [0]
    for _ in drafts:
        start.append(start[-1] + draw(st.integers(0, width + 2)))
    return drafts, start, draw(st.integers(0, 2**31)), draw(st.booleans())


@settings(max_examples=80, deadline=None)
@given(batch=ragged())
def test_a_row_of_a_ragged_batch_is_judged_as_if_alone(batch):
    """Each row of the batch has the verdict of a batch of its own, cut to the drafts that it really has."""
    drafts, start, seed, chosen = batch
    rng = torch.Generator().manual_seed(seed)
    rows, width, vocab = len(drafts), len(drafts[0]), 4  # id 4 is beyond the target's vocabulary
    probs, q = laws(rng, start[-1], vocab), laws(rng, rows, width, vocab + 1)
    accept, following = uniforms(rng, rows, width) ** 3, uniforms(rng, rows, width + 1)
    ids = torch.tensor(drafts, dtype=torch.int32).reshape(rows, width)
    for rule in CHAIN_RULES:
        verdict = rule(probs, ids, torch.tensor(start), None if chosen else q, accept, following)
        assert verdict.num_accepted.dtype == verdict.next_ids.dtype == torch.int32
        for i, row in enumerate(drafts):
            k = min(width, max(start[i + 1] - start[i] - 1, 0), [*row, -1].index(-1))
            if start[i + 1] == start[i]:
                assert outcome(verdict)[i] == (0, -1)
                continue
            alone = rule(
                probs[start[i] : start[i] + k + 1],
                ids[i : i + 1, :k],
                torch.tensor([0, k + 1]),
                None if chosen else q[i : i + 1, :k],
                accept[i : i + 1, :k],
                following[i : i + 1, : k + 1],
            )
            assert outcome(verdict)[i] == outcome(alone)[0]
            assert 0 <= outcome(alone)[0][1] < vocab


@settings(max_examples=60, deadline=None)
@given(batch=ragged())
def test_a_chain_is_a_tree(batch):
    drafts, start, seed, chosen = batch
    rng = torch.Generator().manual_seed(seed)
    rows, width = len(drafts), len(drafts[0])
    args = (
        laws(rng, start[-1], 4),
        torch.tensor(drafts, dtype=torch.int64).reshape(rows, width),
        torch.tensor(start),
        None if chosen else laws(rng, rows, width, 4),
        uniforms(rng, rows, width) ** 3,
        uniforms(rng, rows, width + 1),
    )
    chain = verify_chain(*args)
    assert outcome(chain) == outcome(rejection.verify_rejection(*args))
    assert chain.path.tolist() == [[n if n < count else -1 for n in range(width)] for count in chain.num_accepted]


@pytest.mark.parametrize("rule", CHAIN_RULES)
def test_behind_a_missing_draft_the_next_id_has_the_plain_law(rule):
    """Not the residual: q of a draft that is not there must not be looked at."""
    p = torch.tensor([[0.5, 0.5], [0.5, 0.5]])
    q = torch.tensor([[[1.0, 0.0]]])
    for u, expected in [(0.25, 0), (0.75, 1)]:
        verdict = rule(
            p, torch.tensor([[-1]]), torch.tensor([0, 2]), q, torch.tensor([[0.9]]), torch.tensor([[u, 0.0]])
        )
        assert outcome(verdict) == [(0, expected)]


@pytest.mark.parametrize("rule", CHAIN_RULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_drafts_of_the_target_itself_are_all_accepted(rule, dtype):
    """Even where a float32 uniform was rounded up to 1, and where the bfloat16 rows do not sum to 1."""
    rng = torch.Generator().manual_seed(3)
    rows, k, vocab = 64, 3, 50
    p = laws(rng, rows, k + 1, vocab).to(dtype)
    assert (p.double().sum(-1) - 1).abs().max() > (1e-3 if dtype == torch.bfloat16 else 1e-9)
    drafts = torch.multinomial(p[:, :k].double().flatten(0, 1), 1, generator=rng).reshape(rows, k)
    accept = torch.rand(rows, k, generator=rng)
    accept[:8] = 1.0
    start = torch.arange(rows + 1) * (k + 1)
    verdict = rule(p.flatten(0, 1), drafts, start, p[:, :k], accept, torch.rand(rows, k + 1, generator=rng))
    assert verdict.num_accepted.tolist() == [k] * rows


@pytest.mark.parametrize("scale", [(1.0, 1.0), (1.01, 0.98), (0.5, 3.0)])
@pytest.mark.parametrize("rule", CHAIN_RULES)
def test_rows_count_by_their_own_sum(rule, scale):
    """Scaled by powers or not, p and q stand for the same laws: thresholds of 2/3 (one by one) where p = .4, q = .6."""
    p = torch.tensor([[0.4, 0.6], [0.3, 0.7]]) * scale[0]
    q = torch.tensor([[[0.6, 0.4]]]) * scale[1]
    for u, expected in [(0.666, (1, 0)), (0.667, (0, 1))]:
        verdict = rule(p, torch.tensor([[0]]), torch.tensor([0, 2]), q, torch.tensor([[u]]), torch.tensor([[0.5, 0.2]]))
        assert outcome(verdict) == [expected]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_law_of_rounded_rows_is_exact(dtype):
    """p and q as stored in bfloat16, read as fractions: thresholds and inverse CDF are those of the stored numbers."""
    rng = torch.Generator().manual_seed(7)
    p, q = laws(rng, 2, 5).to(dtype), laws(rng, 1, 1, 5).to(dtype)
    stored = [[Fraction(x) for x in row] for row in (*p.tolist(), q[0, 0].tolist())]
    exact_p, after, exact_q = ([x / sum(row) for x in row] for row in stored)
    for draft in range(5):
        fate = exact.rejection_fate(lambda ids: after if ids else exact_p, lambda ids: exact_q, (draft,))
        threshold = float(fate.thresholds[0])
        for accept, row in [(threshold - 1e-12, fate.next_rows[1]), (threshold + 1e-12, fate.next_rows[0])]:
            if accept >= 1:
                continue
            edges = [0.0, *(float(x) for x in sorted(exact.running_sums([row])))]
            for lo, hi in itertools.pairwise(edges):
                expected = next(x for x in range(5) if float(sum(row[: x + 1])) > (lo + hi) / 2)
                for u in (lo + 1e-12, hi - 1e-12):
                    verdict = rejection.verify_rejection(
                        p,
                        torch.tensor([[draft]]),
                        torch.tensor([0, 2]),
                        q,
                        torch.tensor([[accept]], dtype=torch.float64),
                        torch.full((1, 2), u, dtype=torch.float64),
                    )
                    assert outcome(verdict) == [(int(accept < threshold), expected)]


@pytest.mark.parametrize("rule", CHAIN_RULES)
def test_what_the_target_never_says_is_never_emitted(rule):
    """u = 0 accepts no draft of probability 0; u = 0 and u = 1 draw no id of probability 0."""
    p = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.5, 0.5]])
    q = torch.tensor([[[0.5, 0.5, 0.0]]])
    for u in (0.0, 1.0):
        verdict = rule(p, torch.tensor([[0]]), torch.tensor([0, 2]), q, torch.tensor([[0.0]]), torch.full((1, 2), u))
        assert outcome(verdict) == [(0, 1)]
        verdict = rule(p, torch.tensor([[1]]), torch.tensor([0, 2]), q, torch.tensor([[0.0]]), torch.full((1, 2), u))
        assert outcome(verdict) == [(1, 1 if u == 0 else 2)]


@pytest.mark.parametrize("odd", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("rule", CHAIN_RULES)
def test_a_draft_that_its_q_cannot_have_given_is_refused(rule, odd):
    p = torch.tensor([[0.5, 0.5], [0.5, 0.5]])
    q = torch.tensor([[[odd, 1.0]]])
    verdict = rule(p, torch.tensor([[0]]), torch.tensor([0, 2]), q, torch.tensor([[0.001]]), torch.tensor([[0.9, 0.9]]))
    assert outcome(verdict) == [(0, 0)]


@pytest.mark.parametrize("rule", CHAIN_RULES)
def test_an_empty_residual_falls_back_to_the_target(rule):
    """p = q, and a draft that neither gives: refused, and p is all there is to draw from."""
    p = torch.tensor([[0.25, 0.75, 0.0], [1.0, 0.0, 0.0]])
    for u, expected in [(0.2, 0), (0.3, 1), (1.0, 1)]:
        verdict = rule(
            p, torch.tensor([[2]]), torch.tensor([0, 2]), p[None, :1], torch.tensor([[0.5]]), torch.tensor([[u, 0.0]])
        )
        assert outcome(verdict) == [(0, expected)]


@pytest.mark.parametrize("rule", CHAIN_RULES)
def test_nan_and_negative_target_entries_count_as_nothing(rule):
    p = torch.tensor([[float("nan"), -0.5, 0.5, 0.5]])
    for u, expected in [(0.0, 2), (0.49, 2), (0.51, 3)]:
        verdict = rule(
            p, torch.zeros(1, 0, dtype=torch.long), torch.tensor([0, 1]), None, torch.zeros(1, 0), torch.tensor([[u]])
        )
        assert outcome(verdict) == [(0, expected)]


@pytest.mark.parametrize("rule", CHAIN_RULES)
def test_a_smaller_draft_vocabulary_gives_0_to_the_rest(rule):
    p = torch.tensor([[0.2, 0.2, 0.6], [1.0, 0.0, 0.0]])
    q = torch.tensor([[[0.5, 0.5]]])
    verdict = rule(p, torch.tensor([[0]]), torch.tensor([0, 2]), q, torch.tensor([[0.41]]), torch.tensor([[0.0, 0.0]]))
    assert outcome(verdict) == [(0, 2)]
    verdict = rule(p, torch.tensor([[0]]), torch.tensor([0, 2]), q, torch.tensor([[0.39]]), torch.tensor([[0.0, 0.0]]))
    assert outcome(verdict) == [(1, 0)]


@pytest.mark.parametrize("rule", CHAIN_RULES)
@pytest.mark.parametrize(("rows", "width"), [(0, 0), (0, 3), (2, 0), (2, 3)])
def test_batches_without_rows_or_without_logits(rule, rows, width):
    verdict = rule(
        torch.zeros(0, 4),
        torch.zeros(rows, width, dtype=torch.int32),
        torch.zeros(rows + 1, dtype=torch.int32),
        torch.zeros(rows, width, 4),
        torch.zeros(rows, width),
        torch.zeros(rows, width + 1),
    )
    assert outcome(verdict) == [(0, -1)] * rows


@pytest.mark.parametrize("rule", CHAIN_RULES)
@pytest.mark.parametrize(
    ("index", "value", "name"),
    [
        (0, torch.zeros(3, 4, dtype=torch.long), "probs"),
        (0, torch.zeros(3, 0), "probs"),
        (0, torch.zeros(3), "probs"),
        (1, torch.zeros(1, 2), "drafts"),
        (2, torch.tensor([0]), "logits_start"),
        (2, torch.tensor([0.0, 3.0]), "logits_start"),
        (3, torch.zeros(1, 3, 4), "draft_probs"),
        (3, torch.zeros(2, 4), "draft_probs"),
        (3, torch.zeros(1, 2, 4, dtype=torch.long), "draft_probs"),
        (4, torch.zeros(1, 3), "accept_uniforms"),
        (4, torch.zeros(1, 2, dtype=torch.long), "accept_uniforms"),
        (5, torch.zeros(1, 2), "next_uniforms"),
    ],
)
def test_wrong_arguments_are_named(rule, index, value, name):
    args = [
        torch.ones(3, 4),
        torch.zeros(1, 2, dtype=torch.long),
        torch.tensor([0, 3]),
        torch.ones(1, 2, 4),
        torch.zeros(1, 2),
        torch.zeros(1, 3),
    ]
    rule(*args)
    args[index] = value
    with pytest.raises(InputError, match=f"^{name}: expected "):
        rule(*args)


def test_wrong_trees_are_named():
    for parents, node in [((0,), 0), ((-1, 1), 1), ((-1, -2), 1)]:
        with pytest.raises(InputError, match=re.escape(f"parents[{node}]: ")):
            trees.DraftTree(parents)
    with pytest.raises(InputError, match="^drafts: expected one column for each of the tree's 3 nodes, got 2"):
        trees.verify_tree(
            trees.DraftTree((-1, -1, 0)),
            torch.ones(3, 4),
            torch.zeros(1, 2, dtype=torch.long),
            torch.tensor([0, 3]),
            None,
            torch.zeros(1, 2),
            torch.zeros(1, 3),
        )


def test_a_missing_or_unjudged_sibling_is_passed_over():
    """Row 0 lacks node 0; row 1 has logits rows for node 0 only; row 2 has both."""
    tree = trees.DraftTree((-1, -1))
    p = torch.tensor([0.0, 0.5, 0.5, 0.0])
    verdict = trees.verify_tree(
        tree,
        p.repeat(8, 1),
        torch.tensor([[-1, 1], [0, 1], [0, 1]]),
        torch.tensor([0, 3, 5, 8]),
        torch.full((3, 2, 4), 0.25),
        torch.full((3, 2), 0.5),
        torch.tensor([[0.0, 0.9]] * 3),
    )
    assert verdict.path.tolist() == [[1], [-1], [1]]
    assert outcome(verdict) == [(1, 2), (0, 1), (1, 2)]


@pytest.mark.parametrize("rule", CHAIN_RULES)
@pytest.mark.parametrize("chosen", [False, True])
def test_nothing_is_read_back_to_the_host(rule, chosen):
    """Tensors without values: any decision of the host would need one."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        verdict = rule(
            torch.zeros(7, 5, dtype=torch.bfloat16),
            torch.zeros(2, 3, dtype=torch.int32),
            torch.zeros(3, dtype=torch.int32),
            None if chosen else torch.zeros(2, 3, 5),
            torch.zeros(2, 3),
            torch.zeros(2, 4),
        )
        assert verdict.next_ids.shape == (2,)


def test_a_branching_tree_reads_nothing_back_either():
    tree = trees.DraftTree((-1, -1, 0, 0))
    with FakeTensorMode(allow_non_fake_inputs=True):
        verdict = trees.verify_tree(
            tree,
            torch.zeros(10, 5),
            torch.zeros(2, 4, dtype=torch.int32),
            torch.zeros(3, dtype=torch.int32),
            torch.zeros(2, 4, 5),
            torch.zeros(2, 4),
            torch.zeros(2, 3),
        )
        assert verdict.path.shape == (2, 2)
