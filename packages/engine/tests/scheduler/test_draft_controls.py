"""What single requests say about drafts, side by side in one batch, and why rows go without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lamella.engine.errors import RequestError
from lamella.engine.request import Delta, SamplingParams, draft_limit
from lamella.engine.scheduler.limits import check_request
from lamella.engine.sequence import row_params
from lamella.specdec.length.adaptive import MAX_AGE

MakeRig = Callable[..., Any]
Ids = Callable[[list[Delta]], list[int]]
METHODS = ("first", "second")


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "seeded"])
@pytest.mark.parametrize("costs", [None, [(1, 1.0), (8, 1.3)]], ids=["all", "paying"])
def test_controls_of_one_batch_hold_for_each_request_and_change_no_token(
    rig: MakeRig, ids: Ids, temperature: float, costs: list[tuple[int, float]] | None
) -> None:
    r = rig(max_num_drafts=3, max_num_seqs=6, draft_methods=METHODS, draft_costs=costs)
    limits = {
        r.add([n + 1] * 5, max_tokens=40, temperature=temperature, seed=n, **controls).request_id: limit
        for n, (controls, limit) in enumerate(
            [
                ({}, 3),
                ({"disable_spec_decode": True}, 0),
                ({"num_speculative_tokens": 0}, 0),
                ({"num_speculative_tokens": 1}, 1),
                ({"num_speculative_tokens": 99, "spec_method": "second"}, 3),
                ({"spec_method": "first"}, 3),
            ]
        )
    }
    requests = {name: siblings.request for name, siblings in r.books.requests.items()}
    told: dict[str, list[Delta]] = {name: [] for name in limits}
    verified = dict.fromkeys(limits, 0)
    work = None
    while r.scheduler.has_work:
        step = r.plan()
        rows = {s.row: s.request_id for s in (*r.books.decoding, *r.books.prefilling)}
        work = step.work or work
        for row, verify_len, propose_len in zip(work.rows, work.verify_lens, work.propose_lens):
            assert max(verify_len, propose_len) <= limits[rows[row]]
            verified[rows[row]] += verify_len
        for delta in r.commit():
            told[delta.request_id].append(delta)
    for name, request in requests.items():
        params = row_params(request, 0, 0)
        assert ids(told[name]) == r.runner.model.generate(request.prompt_ids, params, 40)
        accepted, rejected = (sum(getattr(d, f"{k}_drafts") for d in told[name]) for k in ("accepted", "rejected"))
        assert (verified[name] > 0) == (accepted + rejected > 0) == (limits[name] > 0)
    stats = r.scheduler.snapshot()
    assert stats.spec_accepted_tokens >= sum(d.accepted_drafts for told_ in told.values() for d in told_) > 0
    assert sum(stats.spec_lens) == sum(len(d) - 1 for d in told.values())
    assert stats.spec_off["request"] == sum(len(told[name]) - 1 for name in limits if not limits[name])
    assert set(stats.spec_method_draft_tokens) == set(METHODS)
    assert min(stats.spec_method_draft_tokens.values()) > 0


def test_a_method_that_is_named_is_the_only_one(rig: MakeRig) -> None:
    r = rig(max_num_drafts=3, draft_methods=METHODS)
    r.add([1] * 5, max_tokens=30, spec_method="second")
    r.finish()
    assert r.runner.proposed.keys() == {1}
    assert r.scheduler.snapshot().spec_method_draft_tokens["first"] == 0


def test_every_row_without_drafts_has_a_reason(rig: MakeRig) -> None:
    r = rig(max_num_drafts=3, draft_costs=[(1, 1.0), (2, 9.0)])
    r.add([1] * 7, max_tokens=40)
    r.finish()
    off = r.scheduler.snapshot().spec_off
    assert off.keys() == {"not_paying", "nothing_found", "last_token"}
    assert off["last_token"] == 1
    assert r.scheduler.snapshot().spec_unverified_tokens > 0

    r = rig(max_num_drafts=3, max_num_seqs=4, max_num_batched_tokens=4)
    for n in range(4):
        r.add([n + 1], max_tokens=12)
    r.finish()
    assert r.scheduler.snapshot().spec_off["token_budget"] > 0


def test_plain_steps_that_measure_are_told_apart(rig: MakeRig) -> None:
    r = rig(max_num_drafts=3, draft_costs=[(1, 1.0), (8, 1.0001)])
    r.add([1] * 7, max_tokens=30)
    while r.scheduler.has_work:
        for _ in range(MAX_AGE):  # as after many steps with drafts
            r.books.adaptive.cost.observe(1, 2, 1.0)
        r.step()
    stats = r.scheduler.snapshot()
    assert stats.spec_off["measuring"] == sum(stats.spec_lens) - stats.spec_off["nothing_found"] - 1
    assert stats.spec_draft_tokens == 0


def test_seconds_of_drafting_and_of_steps_that_verify(rig: MakeRig) -> None:
    r = rig(max_num_drafts=3)
    r.add([1] * 7, max_tokens=30)
    verifying = 0
    work = None
    while r.scheduler.has_work:
        step = r.plan()
        work = step.work or work
        verifying += any(work.verify_lens)
        r.in_flight.clear()
        r.scheduler.commit(r.runner.step(step)._replace(seconds=1.0, draft_seconds=0.25))
    stats = r.scheduler.snapshot()
    assert stats.spec_draft_seconds == 0.25 * stats.steps
    assert stats.spec_verify_seconds == 0.75 * verifying
    assert 0 < verifying < stats.steps


def test_under_a_lossy_rule_logprobs_go_without_drafts_and_answers_are_labelled(rig: MakeRig) -> None:
    r = rig(max_num_drafts=3, draft_rule="typical", draft_rule_exact=False)
    names = [r.add([1] * 7, max_tokens=12, **fields).request_id for fields in ({}, {"logprobs": 0}, {"n": 1})]
    off = r.add([1] * 7, max_tokens=12, disable_spec_decode=True).request_id
    told = r.finish()
    labels = {name: {delta.draft_rule for delta in told[name, 0]} for name in (*names, off)}
    assert labels == {names[0]: {"typical", None}, names[1]: {None}, names[2]: {"typical", None}, off: {None}}
    assert told[names[0], 0][0].draft_rule == "typical"
    assert r.scheduler.snapshot().spec_off["logprobs"] == 11


def test_what_is_left_behind_a_stop_is_neither_accepted_nor_rejected(rig: MakeRig, ids: Ids) -> None:
    """Whatever token ends the answer: a delta never tells of more drafts than it has tokens."""
    free = rig(max_num_drafts=3)
    request = free.add([1] * 7, max_tokens=30)
    whole = ids(free.finish()[request.request_id, 0])
    cut = 0
    for stop in set(whole):
        r = rig(max_num_drafts=3)
        request = r.add([1] * 7, max_tokens=30, stop_token_ids=[stop])
        deltas = r.finish()[request.request_id, 0]
        assert ids(deltas) == whole[: whole.index(stop) + 1]
        assert all(delta.accepted_drafts <= len(delta.token_ids) for delta in deltas)
        accepted = sum(delta.accepted_drafts for delta in deltas)
        cut += r.scheduler.snapshot().spec_accepted_tokens - accepted
    assert cut > 0


@pytest.mark.parametrize(
    ("fields", "exact", "limit"),
    [
        ({}, True, (5, None)),
        ({"num_speculative_tokens": 2}, True, (2, None)),
        ({"num_speculative_tokens": 7}, True, (5, None)),
        ({"num_speculative_tokens": 0}, True, (0, "request")),
        ({"disable_spec_decode": True}, False, (0, "request")),
        ({"logprobs": 1}, True, (5, None)),
        ({"logprobs": 0}, False, (0, "logprobs")),
    ],
)
def test_limits(fields: dict[str, Any], exact: bool, limit: tuple[int, str | None]) -> None:
    assert draft_limit(SamplingParams(**fields), 5, exact=exact) == limit


@pytest.mark.parametrize(
    ("methods", "said"),
    [((), "this engine has no speculation"), (METHODS, "this engine drafts by first, second: name one of them")],
)
def test_methods_that_the_engine_does_not_have_are_refused(rig: MakeRig, methods: tuple[str, ...], said: str) -> None:
    r = rig(max_num_drafts=3 * bool(methods), draft_methods=methods)
    request = r.add([1])
    request.params = SamplingParams(spec_method="third")
    with pytest.raises(RequestError, match=said) as caught:
        check_request(request, r.books.config, r.manager, 64)
    assert caught.value.param == "spec_method"
