"""The n-gram drafter against a brute-force search over the whole row, for the native index and its reference alike."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamella.specdec import InputError, NgramConfig, NgramDrafter, Rows
from lamella.specdec.drafters import ngram
from lamella.specdec.drafters.ngram_index import ReferenceNgramIndex


def make(config: NgramConfig, kind: str) -> NgramDrafter:
    arguments = (config.prompt_lookup_min, config.prompt_lookup_max, config.match == "earliest")
    if kind == "reference":
        return NgramDrafter(config, ReferenceNgramIndex(*arguments))
    if ngram.native is None:
        pytest.skip("built without the native module")
    return NgramDrafter(config, ngram.native.NgramIndex(*arguments))


kinds = pytest.mark.parametrize("kind", ["native", "reference"])


def brute_force(ids: list[int], config: NgramConfig, max_len: int) -> list[int]:
    """Every n from long to short, every start; the continuation of a match runs on into itself."""
    for n in range(config.prompt_lookup_max, config.prompt_lookup_min - 1, -1):
        starts = [start for start in range(len(ids) - n) if ids[start : start + n] == ids[len(ids) - n :]]
        if n <= len(ids) and starts:
            start = starts[0] if config.match == "earliest" else starts[-1]
            extended = list(ids)
            for i in range(max_len):
                extended.append(extended[start + n + i])
            return extended[len(ids) :]
    return []


configs = st.tuples(
    st.integers(1, 8), st.integers(1, 6), st.integers(1, 6), st.sampled_from(["rightmost", "earliest"])
).map(lambda t: NgramConfig(t[0], min(t[1], t[2]), max(t[1], t[2]), t[3]))

# small alphabets repeat, large ids test the hash
rows_of_ids = st.one_of(
    st.lists(st.integers(0, 2), max_size=60),
    st.lists(st.integers(0, 8), max_size=120),
    st.lists(st.sampled_from([0, 1, 2**31 - 1, 2**31 - 2, 2**16, 2**24]), max_size=60),
)


@kinds
@settings(max_examples=300, deadline=None)
@given(config=configs, ids=rows_of_ids, cuts=st.lists(st.integers(0, 120), max_size=6), max_len=st.integers(0, 10))
def test_equals_brute_force_however_the_ids_arrive(kind, config, ids, cuts, max_len):
    drafter = make(config, kind)
    for end in [*sorted(min(cut, len(ids)) for cut in cuts), len(ids)]:
        view = Rows.single(ids[:end])
        drafter.observe(view)
        allowed = min(max_len, config.num_speculative_tokens)
        assert list(drafter.propose(view, max_len).ids[0]) == brute_force(ids[:end], config, allowed)


@settings(max_examples=100, deadline=None)
@given(config=configs, data=st.data())
def test_native_equals_reference_over_many_rows(config, data):
    """Rows come, grow, change owner and are forgotten in any order; both indexes say the same."""
    both = [make(config, "native"), make(config, "reference")]
    held: dict[int, tuple[int, list[int]]] = {}
    for _ in range(data.draw(st.integers(1, 12))):
        action = data.draw(st.sampled_from(["grow", "grow", "grow", "new owner", "forget"]))
        row = data.draw(st.integers(0, 4))
        generation, ids = held.get(row, (0, []))
        if action == "forget":
            for drafter in both:
                drafter.forget([row])
        elif action == "new owner":
            held[row] = (generation + 1, data.draw(st.lists(st.integers(0, 3), max_size=20)))
        else:
            held[row] = (generation, [*ids, *data.draw(st.lists(st.integers(0, 3), max_size=20))])
        shown = data.draw(st.lists(st.sampled_from(sorted(held)), unique=True)) if held else []
        view = Rows(shown, [held[r][0] for r in shown], [held[r][1] for r in shown])
        lens = data.draw(st.lists(st.integers(-1, 9), min_size=len(shown), max_size=len(shown)))
        answers = []
        for drafter in both:
            drafter.observe(view)
            answers.append([list(draft) for draft in drafter.propose(view, lens).ids])
        assert answers[0] == answers[1]
        for ids_of_row, draft, limit in zip((held[r][1] for r in shown), answers[0], lens):
            assert draft == brute_force(ids_of_row, config, max(0, min(limit, config.num_speculative_tokens)))


@kinds
def test_rightmost_and_earliest_choose_among_occurrences(kind):
    ids = [1, 2, 7, 1, 2, 8, 1, 2]
    for match, expected in (("rightmost", [8, 1, 2]), ("earliest", [7, 1, 2])):
        drafter = make(NgramConfig(3, 1, 2, match), kind)
        view = Rows.single(ids)
        drafter.observe(view)
        assert list(drafter.propose(view, 3).ids[0]) == expected


@kinds
def test_longest_match_wins_over_a_more_recent_shorter_one(kind):
    drafter = make(NgramConfig(2, 1, 3), kind)
    view = Rows.single([1, 2, 3, 50, 9, 3, 60, 1, 2, 3])
    drafter.observe(view)
    assert list(drafter.propose(view, 2).ids[0]) == [50, 9]


@kinds
def test_periodic_end_is_drafted_at_full_length(kind):
    drafter = make(NgramConfig(7, 2, 2), kind)
    view = Rows.single([5, 6, 5, 6, 5, 6])
    drafter.observe(view)
    assert list(drafter.propose(view, 7).ids[0]) == [5, 6, 5, 6, 5, 6, 5]


@kinds
def test_stale_generation_and_unknown_row_get_no_drafts(kind):
    drafter = make(NgramConfig(3, 1, 1), kind)
    drafter.observe(Rows([4], [0], [[1, 1, 1]]))
    assert drafter.propose(Rows([4, 5], [0, 0], [[], []]), 2).lens == [2, 0]
    assert drafter.propose(Rows([4], [1], [[1, 1, 1]]), 2).lens == [0]
    drafter.forget([4, 99])
    assert drafter.propose(Rows([4], [0], [[1, 1, 1]]), 2).lens == [0]


@kinds
def test_new_owner_sees_nothing_of_the_old_one(kind):
    drafter = make(NgramConfig(3, 1, 1), kind)
    drafter.observe(Rows([0], [0], [[1, 2, 3, 1]]))
    view = Rows([0], [1], [[8, 1]])
    drafter.observe(view)
    assert drafter.propose(view, 3).lens == [0]


@kinds
@pytest.mark.parametrize("ids", [[3, -1], [2**31], [1, 2**40]])
def test_impossible_ids_are_refused_by_name(kind, ids):
    with pytest.raises(InputError, match=rf"row 6 has token id {ids[-1]} at position {len(ids) - 1}"):
        make(NgramConfig(1), kind).observe(Rows([6], [0], [ids]))


@kinds
def test_a_row_that_became_shorter_is_refused(kind):
    drafter = make(NgramConfig(1), kind)
    drafter.observe(Rows([2], [0], [[1, 2, 3]]))
    with pytest.raises(InputError, match="row 2 had 3 ids and now has 2"):
        drafter.observe(Rows([2], [0], [[1, 2]]))


@kinds
def test_lists_of_different_lengths_are_refused(kind):
    drafter = make(NgramConfig(1), kind)
    with pytest.raises(InputError, match="of one length"):
        drafter.observe(Rows([1, 2], [0], [[1], [2]]))
    with pytest.raises(InputError, match="of one length"):
        drafter.propose(Rows([1, 2], [0, 0], [[1], [2]]), [1])


@kinds
@pytest.mark.parametrize("container", [tuple, list, lambda ids: memoryview(bytes(ids))])
def test_any_sequence_of_ints_will_do(kind, container):
    drafter = make(NgramConfig(2, 1, 2), kind)
    ids = [1, 2, 3, 1, 2]
    drafter.observe(Rows.single(container(ids[:3])))
    view = Rows.single(container(ids))
    drafter.observe(view)
    assert list(drafter.propose(view, 2).ids[0]) == [3, 1]


def test_without_the_native_module_one_warning_and_the_reference_serves(monkeypatch):
    monkeypatch.setattr(ngram, "native", None)
    monkeypatch.setattr(ngram, "_warned", False)
    with pytest.warns(RuntimeWarning, match="runs in Python"):
        drafter = NgramDrafter(NgramConfig(2, 1, 1))
    view = Rows.single([1, 2, 1])
    drafter.observe(view)
    assert list(drafter.propose(view, 2).ids[0]) == [2, 1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        NgramDrafter(NgramConfig(2))  # no second one


def test_the_whole_import_needs_no_torch():
    code = "import sys, lamella.specdec, lamella.specdec.testing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
