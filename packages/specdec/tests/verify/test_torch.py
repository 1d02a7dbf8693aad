"""The torch verifications equal their plain-Python references on ragged batches."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamella.specdec.verify import reference

torch = pytest.importorskip("torch")
one_hot = pytest.importorskip("lamella.specdec.verify.one_hot")
greedy = pytest.importorskip("lamella.specdec.verify.greedy")


@st.composite
def batches(draw):
    """Rows of drafts with -1 anywhere, and for each row 0 .. width + 2 logits rows."""
    width = draw(st.integers(0, 4))
    drafts = draw(st.lists(st.lists(st.integers(-1, 2), min_size=width, max_size=width), min_size=1, max_size=6))
    start = [0]
    for _ in drafts:
        start.append(start[-1] + draw(st.integers(0, width + 2)))
    return drafts, start


@settings(max_examples=300, deadline=None)
@given(batch=batches(), data=st.data())
def test_one_hot_equals_reference(batch, data):
    drafts, start = batch
    target = data.draw(st.lists(st.integers(0, 2), min_size=start[-1], max_size=start[-1]))
    expected = reference.verify_one_hot(target, drafts, start)
    for dtype in (torch.int32, torch.int64):
        verdict = one_hot.verify_one_hot(
            torch.tensor(target, dtype=dtype),
            torch.tensor(drafts, dtype=torch.int32).reshape(len(drafts), len(drafts[0])),
            torch.tensor(start, dtype=torch.int32),
        )
        assert verdict.num_accepted.dtype == verdict.next_ids.dtype == torch.int32
        assert verdict.num_accepted.tolist() == expected.num_accepted
        assert verdict.next_ids.tolist() == expected.next_ids


@settings(max_examples=200, deadline=None)
@given(batch=batches(), data=st.data())
def test_greedy_equals_reference_with_ties_and_nan(batch, data):
    drafts, start = batch
    logit = st.sampled_from([0.0, 1.0, float("nan"), float("inf"), float("-inf")])
    logits = data.draw(st.lists(st.lists(logit, min_size=3, max_size=3), min_size=start[-1], max_size=start[-1]))
    expected = reference.verify_greedy(logits, drafts, start)
    verdict = greedy.verify_greedy(
        torch.tensor(logits).reshape(-1, 3),
        torch.tensor(drafts, dtype=torch.int32).reshape(len(drafts), len(drafts[0])),
        torch.tensor(start, dtype=torch.int32),
    )
    assert verdict.num_accepted.tolist() == expected.num_accepted
    assert verdict.next_ids.tolist() == expected.next_ids


def test_a_missing_draft_ends_the_accepted_prefix_even_if_the_target_says_the_same_again():
    verdict = one_hot.verify_one_hot(
        torch.tensor([4, 5, 6, 7]), torch.tensor([[4, -1, 6]], dtype=torch.int32), torch.tensor([0, 4])
    )
    assert (verdict.num_accepted.tolist(), verdict.next_ids.tolist()) == ([1], [5])


def test_drafts_beyond_the_logits_rows_are_not_looked_at():
    """A scheduler that trims verification leaves drafts in the buffer that no logits row judges."""
    verdict = one_hot.verify_one_hot(
        torch.tensor([4, 5, 9, 9]), torch.tensor([[4, 5, 9], [9, 9, 9]], dtype=torch.int32), torch.tensor([0, 2, 4])
    )
    assert (verdict.num_accepted.tolist(), verdict.next_ids.tolist()) == ([1, 1], [5, 9])


def test_tensors_off_a_gpu_are_judged_by_torch():
    registry = pytest.importorskip("lamella.specdec.verify.registry")
    chosen = registry.verifiers(torch.device("cpu"))
    assert chosen is registry.TORCH
    assert chosen.one_hot(torch.tensor([3, 4]), torch.tensor([[3]]), torch.tensor([0, 2])).next_ids.tolist() == [4]
