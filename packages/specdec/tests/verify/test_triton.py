"""The Triton kernels give the verdicts of the torch references: on a GPU, or in Triton's interpreter on a CPU.

TRITON_INTERPRET=1 python -m pytest packages/specdec/tests/verify/test_triton.py
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lamella.specdec import InputError
from lamella.specdec.testing import ScriptedModel, exact

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
on_gpu = torch.cuda.is_available()
if not on_gpu and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

block = pytest.importorskip("lamella.specdec.verify.block")
one_hot = pytest.importorskip("lamella.specdec.verify.one_hot")
rejection = pytest.importorskip("lamella.specdec.verify.rejection")
synthetic = pytest.importorskip("lamella.specdec.verify.synthetic")
chain_kernels = pytest.importorskip("lamella.specdec.verify.triton.chain")
one_hot_kernels = pytest.importorskip("lamella.specdec.verify.triton.one_hot")

DEVICE = "cuda" if on_gpu else "cpu"
pytestmark = [pytest.mark.gpu] if on_gpu else []
RULES = {
    "rejection": (rejection.verify_rejection, chain_kernels.verify_rejection, exact.rejection_fate),
    "block": (block.verify_block, chain_kernels.verify_block, exact.block_fate),
}
ODD = [float("nan"), float("inf"), -float("inf"), -0.5]
ragged = settings(max_examples=100 if on_gpu else 40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def placed(value):
    return value.to(DEVICE) if torch.is_tensor(value) else value


def outcome(verdict):
    return list(zip(verdict.num_accepted.tolist(), verdict.next_ids.tolist()))


def same(reference, kernel, *args):
    """Both on the same device; the reference's results."""
    args = [placed(value) for value in args]
    expected, got = reference(*args), kernel(*args)
    assert got.num_accepted.dtype == got.next_ids.dtype == torch.int32
    assert outcome(got) == outcome(expected)
    return expected


class Batch:
    """Rows of drafts with -1 anywhere and 0 .. width + 2 logits rows each, laws that often agree."""

    def __init__(self, draw):
        self.width = draw(st.integers(0, 5))
        self.rows = draw(st.integers(1, 4))
        self.vocab = draw(st.sampled_from([1, 3, 7, chain_kernels.BLOCK, chain_kernels.BLOCK + 1, 5000]))
        self.draft_vocab = max(1, self.vocab + draw(st.sampled_from([0, 0, 2, -1])))
        rng = self.rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
        counts = [draw(st.integers(0, self.width + 2)) for _ in range(self.rows)]
        self.start = torch.tensor([0, *counts]).cumsum(0)
        dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
        sharpness = draw(st.sampled_from([0.5, 3.0]))
        num_logits = int(self.start[-1])
        self.probs = torch.softmax(torch.randn(num_logits, self.vocab, generator=rng) * sharpness, dim=-1)
        self.q = torch.softmax(torch.randn(self.rows, self.width, self.draft_vocab, generator=rng), dim=-1)
        agree = draw(st.booleans())
        for row in range(self.rows):
            for i in range(self.width):
                place = int(self.start[row]) + i
                if agree and place < num_logits:
                    shared = min(self.vocab, self.draft_vocab)
                    self.q[row, i, :shared] = self.probs[place, :shared]
        likely = self.q.flatten(0, 1) + 1e-30
        drawn = torch.multinomial(likely, 1, generator=rng) if len(likely) else torch.zeros(0, 1)
        self.drafts = drawn.reshape(self.rows, self.width).to(torch.int32)
        if draw(st.booleans()) and self.width:
            self.drafts[torch.rand(self.rows, self.width, generator=rng) < 0.2] = -1
        if draw(st.booleans()):
            for law in (self.probs, self.q):
                odd = torch.rand(law.shape, generator=rng) < 0.1
                law[odd] = torch.tensor(ODD)[torch.randint(len(ODD), (int(odd.sum()),), generator=rng)]
        self.probs, self.q = self.probs.to(dtype), self.q.to(dtype)
        self.accept = torch.rand(self.rows, self.width, generator=rng, dtype=torch.float64) ** 2
        self.following = torch.rand(self.rows, self.width + 1, generator=rng, dtype=torch.float64)
        if draw(st.booleans()):
            self.accept = (self.accept * 2).floor() / 2
            self.following = torch.zeros_like(self.following).float()
        if draw(st.booleans()):  # columns of something wider
            self.drafts = torch.cat([self.drafts, self.drafts + 1], dim=1)[:, : self.width]


batches = st.composite(Batch)()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("chosen", [False, True], ids=["drawn", "chosen"])
@ragged
@given(batch=batches)
def test_chains_are_judged_as_by_the_reference(rule, chosen, batch):
    reference, kernel, _ = RULES[rule]
    q = None if chosen else batch.q
    same(reference, kernel, batch.probs, batch.drafts, batch.start, q, batch.accept, batch.following)


@ragged
@given(batch=batches, agreeing=st.booleans())
def test_chosen_drafts_are_compared_as_by_the_reference(batch, agreeing):
    ids = torch.randint(0, 3, (int(batch.start[-1]),), generator=batch.rng)
    if agreeing:
        for row, start in enumerate(batch.start[:-1].tolist()):
            known = batch.drafts[row, : max(0, len(ids) - start)].long()
            ids[start : start + len(known)] = known
    same(one_hot.verify_one_hot, one_hot_kernels.verify_one_hot, ids, batch.drafts, batch.start)
    same(one_hot.verify_one_hot, one_hot_kernels.verify_one_hot, ids.int(), batch.drafts.long(), batch.start.int())


@pytest.mark.parametrize("rates", [[0.9, 0.5, 0.5], [1.0, 1.0, 0.0], [], [0.3]])
@ragged
@given(batch=batches)
def test_synthetic_rates_accept_as_the_reference(rates, batch):
    ids = torch.randint(0, 99, (int(batch.start[-1]),), generator=batch.rng)
    same(
        synthetic.SyntheticAcceptance(rates, DEVICE).verify,
        one_hot_kernels.SyntheticAcceptance(rates, DEVICE).verify,
        ids,
        batch.drafts,
        batch.start,
        batch.accept.float(),
    )


@pytest.mark.parametrize("rule", RULES)
def test_wrong_arguments_are_named(rule):
    kernel = RULES[rule][1]
    probs, drafts, start = torch.rand(3, 5), torch.zeros(1, 2, dtype=torch.int32), torch.tensor([0, 3])
    q, accept, following = torch.rand(1, 2, 5), torch.rand(1, 2), torch.rand(1, 3)
    with pytest.raises(InputError, match="probs"):
        kernel(probs[0], drafts, start, q, accept, following)
    with pytest.raises(InputError, match="draft_probs"):
        kernel(probs, drafts, start, q[:, :1], accept, following)
    with pytest.raises(InputError, match="next_uniforms"):
        kernel(probs, drafts, start, q, accept, accept)


def sampled(rule, rows):
    """χ² of so many steps with their degrees of freedom; drafts drawn anew in each, the oracle's law expected."""
    _, kernel, fate = RULES[rule]
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
    verdict = kernel(
        torch.stack(p, dim=1).flatten(0, 1).to(DEVICE),
        drafts.to(DEVICE),
        (torch.arange(rows + 1) * (k + 1)).to(DEVICE),
        torch.stack(q, dim=1).to(DEVICE),
        torch.rand(rows, k, generator=rng).to(DEVICE),
        torch.rand(rows, k + 1, generator=rng).to(DEVICE),
    )
    counts = Counter((*ids[:n], x) for ids, (n, x) in zip(drafts.tolist(), outcome(verdict)))
    expected = exact.mixed(
        (prob, exact.emitted(fate(target, draft, ids), ids)) for ids, prob in exact.drafts_law(draft, k).items()
    )
    assert set(counts) <= set(expected)
    chi2 = sum((counts[ids] - rows * float(prob)) ** 2 / (rows * float(prob)) for ids, prob in expected.items())
    return chi2, len(expected) - 1


@pytest.mark.skipif(not on_gpu, reason="needs a GPU")
@pytest.mark.parametrize("rule", RULES)
def test_samples_follow_the_law(rule):
    chi2, degrees = sampled(rule, 2_000_000)
    assert degrees > 20
    assert chi2 < degrees + 5 * (2 * degrees) ** 0.5, (chi2, degrees)


@pytest.mark.skipif(not on_gpu, reason="needs a GPU")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("rows", [1, 64])
def test_large_vocabularies(rule, rows):
    reference, kernel, _ = RULES[rule]
    rng = torch.Generator().manual_seed(rows)
    k, vocab = 7, 151_936
    probs = torch.softmax(torch.randn(rows * (k + 1), vocab, generator=rng) * 4, dim=-1)
    q = (probs.view(rows, k + 1, vocab)[:, :k] * torch.exp(torch.randn(rows, k, vocab, generator=rng))).contiguous()
    drafts = torch.multinomial(q.flatten(0, 1), 1, generator=rng).view(rows, k)
    expected = same(
        reference,
        kernel,
        probs,
        drafts,
        torch.arange(rows + 1) * (k + 1),
        q,
        torch.rand(rows, k, generator=rng),
        torch.rand(rows, k + 1, generator=rng),
    )
    assert rows == 1 or 0 < float(expected.num_accepted.float().mean()) < k
