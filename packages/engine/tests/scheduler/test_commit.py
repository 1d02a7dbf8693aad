from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lamella.engine.request import Delta
from lamella.engine.sequence import State
from lamella.runner_v2.sampling.params import RowParams
from lamella.runner_v2.testing.fake_runner import FakeModel

MakeRig = Callable[..., Any]
Ids = Callable[[list[Delta]], list[int]]
GREEDY = RowParams(temperature=0.0)
PROMPT = [1] * 7
OUTPUT = FakeModel().generate(PROMPT, GREEDY, 8)


def test_the_outputs_of_these_tests_do_not_repeat() -> None:
    assert len(set(OUTPUT)) == len(OUTPUT)


@pytest.mark.parametrize(
    ("fields", "count", "reason", "stop_reason"),
    [
        ({}, 8, "length", None),
        ({"eos_ids": [OUTPUT[3]]}, 4, "stop", None),
        ({"stop_token_ids": [OUTPUT[3]]}, 4, "stop", OUTPUT[3]),
        ({"eos_ids": [OUTPUT[3]], "stop_token_ids": [OUTPUT[3]]}, 4, "stop", None),
        ({"eos_ids": [OUTPUT[5]], "stop_token_ids": [OUTPUT[2], OUTPUT[4]]}, 3, "stop", OUTPUT[2]),
        ({"stop_token_ids": [OUTPUT[7]]}, 8, "stop", OUTPUT[7]),
        ({"max_tokens": 1}, 1, "length", None),
        ({"max_tokens": 1, "eos_ids": [OUTPUT[0]]}, 1, "stop", None),
        ({"max_tokens": 6, "eos_ids": [OUTPUT[3]], "ignore_eos": True}, 6, "length", None),
        ({"eos_ids": [OUTPUT[3]], "stop_token_ids": [OUTPUT[4]], "ignore_eos": True}, 5, "stop", OUTPUT[4]),
    ],
)
@pytest.mark.parametrize("max_num_drafts", [0, 3])
def test_stop_rules(
    rig: MakeRig,
    ids: Ids,
    fields: dict[str, Any],
    count: int,
    reason: str,
    stop_reason: int | None,
    max_num_drafts: int,
) -> None:
    r = rig(max_num_drafts=max_num_drafts)
    r.add(PROMPT, **fields)
    told = r.finish()["r0", 0]
    assert ids(told) == OUTPUT[:count]
    assert (told[-1].finish_reason, told[-1].stop_reason) == (reason, stop_reason)
    assert all(delta.finish_reason is None for delta in told[:-1])


@pytest.mark.parametrize("stop_idx", range(7))
def test_drafts_behind_a_stop_are_dropped_whole(rig: MakeRig, ids: Ids, stop_idx: int) -> None:
    """Blocks of one token: whatever was accepted behind the stop would be a block of its own."""
    dropped = 0
    for prompt_len in range(1, 8):
        prompt = PROMPT[:prompt_len]
        output = FakeModel().generate(prompt, GREEDY, 8)
        r = rig(block_size=1, max_num_drafts=3)
        r.add(prompt, max_tokens=20, stop_token_ids=[output[stop_idx]])
        expected = output[: output.index(output[stop_idx]) + 1]
        assert ids(r.finish()["r0", 0]) == expected
        dropped += r.runner.rows[0].computed_len >= prompt_len + len(expected)
        r.add(prompt + expected + [5], max_tokens=1)
        assert r.plan().added[0].computed_len in (prompt_len + len(expected), prompt_len + len(expected) - 1)
    assert dropped or stop_idx == 0


def test_a_sequence_ends_where_the_context_ends(rig: MakeRig, ids: Ids) -> None:
    r = rig(max_model_len=12)
    r.add(PROMPT, max_tokens=50)
    told = r.finish()["r0", 0]
    assert ids(told) == OUTPUT[:5]
    assert told[-1].finish_reason == "length"


def test_a_prompt_can_be_scored_without_output(rig: MakeRig) -> None:
    r = rig(max_num_batched_tokens=4, max_model_len=7)
    r.add(PROMPT, max_tokens=0, prompt_logprobs=2, logprobs=1)
    (delta,) = r.finish()["r0", 0]
    assert (delta.token_ids, delta.finish_reason) == ([], "length")
    expected = r.runner.model.prompt_logprobs(PROMPT, 2)
    assert delta.prompt_logprobs[0] is None
    assert [(e.token_ids, e.logprobs, e.rank) for e in delta.prompt_logprobs[1:]] == [tuple(e) for e in expected]


def test_the_first_delta_says_how_it_began(rig: MakeRig) -> None:
    r = rig(max_num_batched_tokens=8)
    r.add(list(range(1, 10)), max_tokens=1)
    r.finish()
    r.add([*range(1, 9), 20, 21, 22, 23, 24, 25, 26, 27, 28], max_tokens=2)
    r.clock.advance(2.0)
    r.plan()
    r.clock.advance(0.5)
    assert r.commit() == []
    r.plan()
    r.clock.advance(0.25)
    (delta,) = r.commit()
    assert (delta.cached_len, delta.queued_s, delta.prefill_s) == (8, 2.0, 0.75)
    (delta,) = r.step()
    assert (delta.cached_len, delta.queued_s, delta.prefill_s) == (0, 0.0, 0.0)


def test_logprobs_of_each_id(rig: MakeRig) -> None:
    r = rig(max_num_drafts=3)
    r.add(PROMPT, logprobs=2)
    r.add([2] * 5)
    told = r.finish()
    entries = [entry for delta in told["r0", 0] for entry in delta.logprobs]
    expected = r.runner.model.prompt_logprobs([*PROMPT, *OUTPUT], 2)[6:]
    assert [(e.token_ids, e.logprobs, e.rank) for e in entries] == [tuple(e) for e in expected]
    assert all(delta.logprobs is None for delta in told["r1", 0])


def test_prompt_logprobs_do_not_read_the_cache_but_fill_it(rig: MakeRig) -> None:
    r = rig()
    r.add([1] * 12, max_tokens=1)
    r.finish()
    r.add([1] * 12, max_tokens=1, prompt_logprobs=0)
    assert r.plan().added[0].computed_len == 0
    r.commit()
    r.add([3] * 12, max_tokens=1, prompt_logprobs=0)
    r.finish()
    r.add([3] * 12, max_tokens=1)
    assert r.plan().added[0].computed_len == 8


def test_siblings_share_the_prompt_logprobs_of_the_first(rig: MakeRig) -> None:
    r = rig()
    r.add([5] * 9, max_tokens=2, n=3, temperature=1.0, prompt_logprobs=1)
    r.step()
    step = r.plan()
    assert [new.computed_len for new in step.added] == [8, 8]
    assert [new.params.num_prompt_logprobs for new in step.added] == [None, None]
    (_, *others) = r.commit()
    expected = [tuple(entry) for entry in r.runner.model.prompt_logprobs([5] * 9, 1)]
    for delta in others:
        assert [(e.token_ids, e.logprobs, e.rank) for e in delta.prompt_logprobs[1:]] == expected


def test_prompt_logprobs_go_on_where_a_preemption_cut_them(rig: MakeRig) -> None:
    r = rig(num_blocks=8, max_num_batched_tokens=6, max_num_seqs=2, policy="priority")
    r.add([1] * 20, max_tokens=2, prompt_logprobs=1, priority=9)
    r.step()
    r.step()
    r.add([2] * 16, max_tokens=2, priority=1)
    told = r.finish()
    assert r.books.stats.preemptions == 1
    entries = told["r0", 0][0].prompt_logprobs
    expected = r.runner.model.prompt_logprobs([1] * 20, 1)
    assert [(e.token_ids, e.logprobs, e.rank) for e in entries[1:]] == [tuple(e) for e in expected]


def test_a_failed_row_ends_alone_and_leaves_nothing_to_hit(rig: MakeRig, ids: Ids) -> None:
    fail_id = next(token for token in range(2, 64) if token not in OUTPUT)
    r = rig(model=FakeModel(fail_id=fail_id), max_num_batched_tokens=10)
    bad = r.add([1] * 12 + [fail_id] + [1] * 3)
    good = r.add(PROMPT, use_prefix_cache=False)
    told = r.finish()
    (delta,) = told[bad.request_id, 0]
    assert (delta.finish_reason, delta.token_ids, delta.error) == ("error", [], "logits are NaN")
    assert delta.error_status == 500
    assert ids(told[good.request_id, 0]) == OUTPUT
    r.add([1] * 12 + [2], max_tokens=1)
    assert r.plan().added[0].computed_len == 0


@pytest.mark.parametrize("max_num_drafts", [0, 3])
def test_a_request_that_forbids_every_token_is_to_blame(rig: MakeRig, ids: Ids, max_num_drafts: int) -> None:
    r = rig(max_num_drafts=max_num_drafts)
    bad = r.add(PROMPT, allowed_token_ids=[5, 6], stop_token_ids=[5], eos_ids=[6], min_tokens=2)
    good = r.add(PROMPT)
    told = r.finish()
    (delta,) = told[bad.request_id, 0]
    assert (delta.finish_reason, delta.error_status) == ("error", 400)
    assert all(name in delta.error for name in ("allowed_token_ids", "bad_words", "min_tokens"))
    assert ids(told[good.request_id, 0]) == OUTPUT


def test_a_model_that_rules_every_token_out_is_not_the_requests_fault(rig: MakeRig) -> None:
    r = rig(model=FakeModel(vocab_size=0))
    r.add(PROMPT)
    (delta,) = r.finish()["r0", 0]
    assert (delta.error, delta.error_status) == ("no token is allowed", 500)


@pytest.mark.parametrize("max_num_drafts", [0, 3])
def test_computed_tokens_are_those_of_the_steps(rig: MakeRig, max_num_drafts: int) -> None:
    r = rig(max_num_drafts=max_num_drafts, max_num_batched_tokens=8)
    r.add([1] * 17, max_tokens=3)
    told = r.finish()
    assert told["r0", 0][0].cached_len == 0
    stats = r.books.stats
    assert (stats.prompt_tokens, stats.computed_prompt_tokens) == (17, 17)
    before = stats.computed_tokens
    assert before == 17 + 2 if not max_num_drafts else before >= 17 + 1
    r.add([1] * 17, max_tokens=1)
    assert r.finish()["r1", 0][0].cached_len == 16
    assert (stats.prompt_tokens, stats.computed_prompt_tokens, stats.computed_tokens) == (34, 18, before + 1)


def test_a_preempted_prompt_counts_again(rig: MakeRig) -> None:
    r = rig(num_blocks=8, max_num_seqs=2, prefix_caching=False)
    r.add([1] * 8, max_tokens=12)
    r.add([2] * 8, max_tokens=12)
    r.finish()
    stats = r.books.stats
    assert stats.preemptions >= 1
    assert stats.prompt_tokens == 16
    assert stats.computed_prompt_tokens == 16 + 8 * stats.preemptions
    assert stats.computed_tokens > stats.computed_prompt_tokens


def test_ended_sequences_hold_nothing_when_commit_returns(rig: MakeRig) -> None:
    r = rig()
    r.add(PROMPT, max_tokens=2)
    r.step()
    assert r.manager.in_use > 0
    (delta,) = r.step()
    assert delta.finish_reason == "length"
    assert r.manager.in_use == 0.0
    r.add([*PROMPT, *OUTPUT[:1], 9], max_tokens=1)
    assert r.plan().added[0].computed_len == 8  # what the first one computed last can be hit


def test_aborts_in_every_state(rig: MakeRig) -> None:
    r = rig(max_num_seqs=2, max_num_batched_tokens=16)
    for n in range(4):
        r.add([n + 1] * 9, max_tokens=20, n=2 if n == 3 else 1, temperature=1.0)
    r.scheduler.abort("nobody")
    r.plan()
    r.scheduler.abort("r2")  # waits
    r.scheduler.abort("r3", 1)  # parked
    assert (r.books.num_waiting, r.books.num_running) == (1, 2)
    r.scheduler.abort("r0")  # in flight
    assert [s.state for s in r.books.draining] == [State.DRAINING]
    assert r.manager.holds(0)
    assert r.commit() == []  # 16 tokens: all of r0's prompt, which nobody wants any more, and a part of r1's
    assert not r.manager.holds(0)
    r.scheduler.abort("r1")  # running, nothing in flight
    assert not r.manager.holds(1)
    r.scheduler.abort("r1")
    step = r.plan()
    assert {row for row, _ in step.removed} == {0, 1}
    assert [new.token_ids[0] for new in step.added] == [4]
    r.commit()
    r.scheduler.abort("r3")
    assert not r.scheduler.has_work
    assert r.manager.in_use == 0.0


def test_outputs_must_come_in_order(rig: MakeRig) -> None:
    r = rig()
    r.add(PROMPT)
    r.plan()
    r.plan()
    _, second = [r.runner.step(step) for step in r.in_flight]
    with pytest.raises(AssertionError, match="step 1 came before 0"):
        r.scheduler.commit(second)
