"""The suffix drafter: native index, Python reference and a count of all windows by hand say the same."""

from __future__ import annotations

import math
import random
import warnings
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamella.specdec import InputError, Rows, SuffixConfig, SuffixDrafter
from lamella.specdec.drafters import suffix
from lamella.specdec.drafters.suffix import index_arguments
from lamella.specdec.drafters.suffix_index import ReferenceSuffixIndex
from lamella.specdec.testing import ScriptedModel, decode


def make(config: SuffixConfig, kind: str) -> SuffixDrafter:
    if kind == "reference":
        return SuffixDrafter(config, ReferenceSuffixIndex(*index_arguments(config)))
    if suffix.native is None:
        pytest.skip("built without the native module")
    return SuffixDrafter(config, suffix.native.SuffixIndex(*index_arguments(config)))


kinds = pytest.mark.parametrize("kind", ["native", "reference"])


def propose(drafter: SuffixDrafter, ids: list[int], max_len: int = 100) -> list[int]:
    view = Rows.single(ids)
    drafter.observe(view)
    return list(drafter.propose(view, max_len).ids[0])


def best_by_hand(texts: list[list[int]], context: list[int], config: SuffixConfig, max_len: int):
    """(score, drafts) behind the best match of the context's end in the texts, from their windows counted afresh."""
    depth = config.max_tree_depth
    counts: Counter[tuple[int, ...]] = Counter()
    last: dict[tuple[int, ...], int] = {}
    position = 0
    for ids in texts:
        for end in range(1, len(ids) + 1):
            position += 1
            for n in range(1, min(depth, end) + 1):
                window = tuple(ids[end - n : end])
                counts[window] += 1
                last[window] = position
    best_score, best = 0.0, []
    for match_len in range(1, min(depth - 1, len(context)) + 1):
        window = tuple(context[len(context) - match_len :])
        if not counts[window]:
            break
        budget = min(max_len, math.floor(match_len * config.max_spec_factor + config.max_spec_offset))
        prob, score, drafts = 1.0, 0.0, []
        while len(drafts) < budget and len(window) < depth:
            followers = [other for other in last if other[:-1] == window]
            if not followers:
                break
            chosen = max(followers, key=lambda other: (counts[other], last[other]))
            prob *= counts[chosen] / sum(counts[other] for other in followers)
            if prob < config.min_token_prob:
                break
            drafts.append(chosen[-1])
            score += prob
            window = chosen
        if drafts and score >= best_score:
            best_score, best = score, drafts
    return best_score, best


configs = st.builds(
    SuffixConfig,
    num_speculative_tokens=st.integers(1, 9),
    max_tree_depth=st.integers(2, 7),
    max_cached_requests=st.sampled_from([0, 1, 3, 100]),
    max_cached_tokens=st.sampled_from([1, 6, 20, 1000]),
    max_spec_factor=st.sampled_from([1.0, 1.5, 3.0]),
    max_spec_offset=st.sampled_from([0.0, 0.5, 2.0]),
    min_token_prob=st.sampled_from([0.0, 0.1, 0.34, 0.5, 1.0]),
)


@kinds
@settings(max_examples=150, deadline=None)
@given(config=configs, ids=st.lists(st.integers(0, 2), max_size=40), cut=st.integers(0, 40), max_len=st.integers(0, 10))
def test_a_rows_drafts_are_those_counted_by_hand(kind, config, ids, cut, max_len):
    drafter = make(config, kind)
    for known in (ids[:cut], ids):
        allowed = min(max_len, config.num_speculative_tokens)
        assert propose(drafter, known, max_len) == best_by_hand([known], known, config, allowed)[1]


@kinds
@settings(max_examples=100, deadline=None)
@given(
    config=configs,
    outputs=st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=12), max_size=6),
    context=st.lists(st.integers(0, 2), min_size=1, max_size=12),
)
def test_finished_outputs_are_those_counted_by_hand(kind, config, outputs, context):
    drafter = make(config, kind)
    held: list[list[int]] = []
    for generation, output in enumerate(outputs):
        drafter.observe(Rows([3], [generation], [[7]]))  # the prompt, which is no output
        drafter.observe(Rows([3], [generation], [[7, *output]]))
        if config.max_cached_requests and config.max_cached_tokens >= 2:
            held.append(output[-config.max_cached_tokens :])
    drafter.forget([3])
    while len(held) > config.max_cached_requests or sum(map(len, held)) > config.max_cached_tokens:
        held.pop(0)
    assert drafter._index.num_cached_requests == len(held)
    assert drafter._index.num_cached_tokens == sum(map(len, held))
    own = best_by_hand([context], context, config, config.num_speculative_tokens)
    others = best_by_hand(held, context, config, config.num_speculative_tokens)
    assert propose(drafter, context) == (others if others[0] > own[0] else own)[1]


@pytest.mark.parametrize("seed", range(12))
def test_native_equals_reference_over_thousands_of_operations(seed):
    """Rows come, grow, change owner and are forgotten; outputs are kept and leave; all of it with few different ids."""
    rng = random.Random(seed)
    config = SuffixConfig(
        num_speculative_tokens=rng.choice([3, 8, 20]),
        max_tree_depth=rng.choice([2, 3, 5, 12, 24]),
        max_cached_requests=rng.choice([1, 5, 40]),
        max_cached_tokens=rng.choice([30, 200, 2000]),
        max_spec_factor=rng.choice([1.0, 2.5]),
        max_spec_offset=rng.choice([0.0, 1.0]),
        min_token_prob=rng.choice([0.0, 0.1, 0.3]),
    )
    alphabet = rng.choice([2, 3, 8, 100])
    both = [make(config, "native"), make(config, "reference")]
    held: dict[int, tuple[int, list[int]]] = {}
    num_drafts = 0
    for step in range(3000):
        row = rng.randrange(5)
        generation, ids = held.get(row, (0, []))
        action = rng.random()
        if action < 0.01:
            for drafter in both:
                drafter.forget([row, 77])
            held.pop(row, None)
            continue
        if action < 0.03 or row not in held:
            held[row] = (generation + 1, [rng.randrange(alphabet) for _ in range(rng.randrange(12))])
        else:
            ids.extend(rng.randrange(alphabet) for _ in range(rng.randrange(1, 4)))
            if ids and rng.random() < 0.1:  # a repetition
                start = rng.randrange(len(ids))
                ids.extend(ids[start : start + 10])
        shown = [number for number in sorted(held) if number == row or rng.random() < 0.2]
        view = Rows(shown, [held[n][0] for n in shown], [held[n][1] for n in shown])
        lens = [rng.choice([0, 1, 4, 50]) for _ in shown]
        answers = []
        for drafter in both:
            drafter.observe(view)
            answers.append([list(draft) for draft in drafter.propose(view, lens).ids] if step % 3 else [])
        assert answers[0] == answers[1], step
        num_drafts += sum(map(len, answers[0]))
        assert both[0]._index.num_cached_tokens == both[1]._index.num_cached_tokens
        assert both[0]._index.num_cached_requests == both[1]._index.num_cached_requests
        assert both[0]._index.num_nodes <= both[1]._index.num_nodes
    assert num_drafts > 0


@kinds
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), prompt=st.lists(st.integers(0, 4), min_size=1, max_size=12), greedy=st.booleans())
def test_output_is_the_one_without_drafts(kind, seed, prompt, greedy):
    model = ScriptedModel(5, seed=3, memory=2)
    drafter = make(SuffixConfig(4, max_spec_factor=2.0), kind)

    def choose(prefix):
        return model.best(prefix) if greedy else model.sample(prefix, seed)

    plain = decode(choose, prompt, 24)
    for _ in range(2):  # the second time the first output is among the finished ones
        assert decode(choose, prompt, 24, drafter) == plain
        drafter.forget([0])


@kinds
def test_nodes_leave_with_the_outputs(kind):
    drafter = make(SuffixConfig(4, max_tree_depth=6, max_cached_requests=1), kind)
    for generation in range(50):
        drafter.observe(Rows([0], [generation], [[0]]))
        drafter.observe(Rows([0], [generation], [[0, *([generation, 1, 2, 3] * 5)]]))
    drafter.forget([0])
    one_output = drafter._index.num_nodes
    fresh = make(SuffixConfig(4, max_tree_depth=6, max_cached_requests=1), kind)
    fresh.observe(Rows([0], [0], [[0]]))
    fresh.observe(Rows([0], [0], [[0, *([49, 1, 2, 3] * 5)]]))
    fresh.forget([0])
    assert one_output == fresh._index.num_nodes


@kinds
def test_the_most_frequent_continuation_wins_over_the_latest(kind):
    assert propose(make(SuffixConfig(1), kind), [1, 5, 1, 5, 1, 6, 1]) == [5]


@kinds
def test_of_equally_frequent_ones_the_latest_wins(kind):
    assert propose(make(SuffixConfig(1), kind), [1, 5, 1, 6, 1]) == [6]


@kinds
def test_the_match_sets_how_many_are_drafted(kind):
    ids = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]
    assert propose(make(SuffixConfig(9), kind), ids) == [4, 5, 6]
    assert propose(make(SuffixConfig(9, max_spec_factor=2.0), kind), ids) == [4, 5, 6, 7, 8, 9]
    assert propose(make(SuffixConfig(9, max_spec_offset=1.0), kind), ids) == [4, 5, 6, 7]
    assert propose(make(SuffixConfig(9, max_tree_depth=5), kind), ids) == [4, 5]
    assert propose(make(SuffixConfig(2), kind), ids) == [4, 5]
    assert propose(make(SuffixConfig(9), kind), ids, max_len=1) == [4]


@kinds
def test_improbable_tokens_are_not_drafted(kind):
    ids = [1, 5, 1, 6, 1, 7, 1]
    assert propose(make(SuffixConfig(1, min_token_prob=0.34), kind), ids) == []
    assert propose(make(SuffixConfig(1, min_token_prob=0.33), kind), ids) == [7]


@kinds
def test_outputs_serve_other_rows_and_prompts_do_not(kind):
    drafter = make(SuffixConfig(3, max_spec_factor=3.0), kind)
    drafter.observe(Rows([0], [0], [[50, 51, 52]]))
    drafter.observe(Rows([0], [0], [[50, 51, 52, 60, 61, 62, 63]]))
    drafter.forget([0])
    other = Rows([1, 2], [0, 0], [[60], [50]])
    drafter.observe(other)
    assert [list(ids) for ids in drafter.propose(other, 3).ids] == [[61, 62, 63], []]


@kinds
def test_the_rows_own_text_wins_a_tie(kind):
    drafter = make(SuffixConfig(1), kind)
    drafter.observe(Rows([0], [0], [[9]]))
    drafter.observe(Rows([0], [1], [[9]]))
    drafter.observe(Rows([0], [1], [[9, 1, 2]]))
    drafter.forget([0])
    assert propose(drafter, [1, 3, 1]) == [3]


@kinds
def test_without_cached_requests_nothing_is_shared(kind):
    drafter = make(SuffixConfig(3, max_cached_requests=0), kind)
    drafter.observe(Rows([0], [0], [[9]]))
    drafter.observe(Rows([0], [0], [[9, 1, 2, 3]]))
    drafter.forget([0])
    assert drafter._index.num_cached_tokens == 0
    assert propose(drafter, [1]) == []


@kinds
@pytest.mark.parametrize("ids", [[3, -1], [2**31], [1, 2**40]])
def test_impossible_ids_are_refused_by_name(kind, ids):
    with pytest.raises(InputError, match=rf"row 6 has token id {ids[-1]} at position {len(ids) - 1}"):
        make(SuffixConfig(1), kind).observe(Rows([6], [0], [ids]))


@kinds
def test_lists_of_different_lengths_are_refused(kind):
    drafter = make(SuffixConfig(1), kind)
    with pytest.raises(InputError, match="of one length"):
        drafter.observe(Rows([1, 2], [0, 0], [[1], [2]][:1]))
    with pytest.raises(InputError, match="of one length"):
        drafter.propose(Rows([1, 2], [0, 0], [[1], [2]]), [1])


def test_without_the_native_module_one_warning_and_the_reference_serves(monkeypatch):
    monkeypatch.setattr(suffix, "native", None)
    monkeypatch.setattr(suffix, "_warned", False)
    with pytest.warns(RuntimeWarning, match="runs in Python"):
        drafter = SuffixDrafter(SuffixConfig(2))
    assert propose(drafter, [1, 2, 1]) == [2]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SuffixDrafter(SuffixConfig(2))  # no second one
