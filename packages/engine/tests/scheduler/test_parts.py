"""Queues, rows, policies, budget."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella.engine.request import Request, SamplingParams
from lamella.engine.scheduler.budget import Budget
from lamella.engine.scheduler.cost import TokenCost
from lamella.engine.scheduler.policy import POLICIES
from lamella.engine.scheduler.queues import WaitingQueue
from lamella.engine.scheduler.rows import Rows
from lamella.engine.sequence import Sequence, Siblings, State, row_params


def sequence(key: tuple[int, ...]) -> Sequence:
    request = Request("r", [1, 2], SamplingParams(), 4, [])
    return Sequence(Siblings(request, 0.0), 0, key[0], key, 0, 100)


def test_the_queue_keeps_the_order_of_keys_whatever_ends_in_it() -> None:
    rng = random.Random(2)
    queue, model = WaitingQueue(), list[Sequence]()
    for _ in range(4000):
        action = rng.randrange(3)
        if action == 0:
            new = sequence((rng.randrange(1 << 40),))
            queue.push(new)
            model.append(new)
        elif model and action == 1:
            gone = rng.choice(model)
            gone.move_to(State.FINISHED)
            queue.forget(gone)
            model.remove(gone)
        elif model and action == 2:
            head = queue.head()
            assert head is min(model, key=lambda s: s.key)
            assert head is not None
            head.move_to(State.RUNNING)
            queue.leave(head)
            model.remove(head)
        assert len(queue) == len(model)
        assert len(queue._heap) <= 2 * len(model) + 33
    assert (queue.head() is None) == (not model)


def test_rows_raise_their_generation_and_say_who_left() -> None:
    rows = Rows(2)
    assert [rows.take(), rows.take()] == [(0, 1), (1, 1)]
    assert rows.num_free == 0
    rows.give_back(0, 1)
    assert rows.take() == (0, 2)
    assert rows.take_removed() == ((0, 1),)
    assert rows.take_removed() == ()
    with pytest.raises(AssertionError, match="another owner"):
        rows.give_back(0, 1)


def test_policies() -> None:
    fcfs, priority = POLICIES["fcfs"], POLICIES["priority"]
    assert fcfs.key(9, 1, 0) < fcfs.key(0, 2, 0) < fcfs.key(0, 2, 1)
    assert priority.key(0, 2, 0) < priority.key(0, 3, 0) < priority.key(9, 1, 0)
    assert not fcfs.displaces(fcfs.key(0, 1, 0), fcfs.key(9, 2, 0))
    assert priority.displaces(priority.key(0, 2, 0), priority.key(9, 1, 0))
    assert not priority.displaces(priority.key(0, 1, 0), priority.key(0, 2, 0))


def test_the_budget_is_spent_once() -> None:
    budget = Budget(20, max_chunk_len=8, cost=TokenCost())
    budget.take_rows(4)
    assert budget.take_drafts(6) == 6
    assert budget.next_chunk() == 8
    assert budget.take_chunk(0, 3) == 3
    assert budget.take_chunk(50, 100) == 7
    assert (budget.take_drafts(1), budget.take_chunk(0, 1), budget.left, budget.next_chunk()) == (0, 0, 0, 0)
    with pytest.raises(AssertionError, match="more rows than tokens"):
        budget.take_rows(1)


@given(st.floats(0, 3), st.integers(0, 10_000), st.integers(1, 2000))
def test_the_longest_chunk_for_a_cost(slope: float, start: int, num_tokens: int) -> None:
    cost = TokenCost(slope)
    by_hand = sum(1 + slope * position for position in range(start, start + num_tokens))
    assert cost.of(start, num_tokens) == pytest.approx(by_hand)
    assert cost.fitting(start, cost.of(start, num_tokens)) == num_tokens
    assert cost.fitting(start, cost.of(start, num_tokens) * (1 - 1e-3 / num_tokens)) == num_tokens
    assert cost.fitting(start, 0.0) == cost.fitting(start, -1.0) == 0
    assert cost.fitting(start, 1e-3) == 1, "what is left buys a token, so that nothing starves"


def test_a_long_context_makes_chunks_short() -> None:
    cost = TokenCost(slope=0.01, least_tokens=4)
    budget = Budget(100, max_chunk_len=1000, cost=cost)
    assert budget.next_chunk() == 100, "from an empty context on, a step is as long as its limit says"
    assert budget.take_chunk(900, 500) == 15  # each costs about 10 of the 149.5
    assert budget.take_chunk(900, 500) == 0
    assert budget.left == 85

    rows = Budget(100, max_chunk_len=1000, cost=cost)
    rows.take_rows(10)
    rows.take_contexts(10 * 500)
    assert rows.next_chunk() == cost.fitting(0, cost.of(0, 100) - 60)
    rows.take_contexts(10 * 5000)
    assert (rows.next_chunk(), rows.take_chunk(900, 3)) == (4, 3), "rows do not keep prompts out"
    assert (rows.take_chunk(0, 9), rows.next_chunk()) == (1, 0)


def test_the_life_of_a_sequence_has_no_short_cuts() -> None:
    one = sequence((1,))
    with pytest.raises(AssertionError):
        one.move_to(State.DRAINING)
    one.enter(3, 1, cached_len=0, room=16)
    one.move_to(State.DRAINING)
    with pytest.raises(AssertionError):
        one.move_to(State.RUNNING)
    one.leave(State.FINISHED)
    with pytest.raises(AssertionError):
        one.move_to(State.WAITING)


def test_row_params_resolve_what_users_say() -> None:
    params = SamplingParams(
        n=3,
        temperature=0.5,
        top_k=-1,
        seed=-1,
        logit_bias={5: 2.0},
        stop_token_ids=[7, 8],
        allowed_token_ids=[1, 7],
        min_tokens=2,
        logprobs=3,
        prompt_logprobs=0,
    )
    request = Request("r", [1], params, 16, [9, 7], bad_words_ids=[[3, 4]])
    first, second = row_params(request, 0, 77), row_params(request, 1, 77)
    assert (first.seed, second.seed) == (2**64 - 1, 0)
    assert first.top_k == 0
    assert first.stop_ids == (9, 7, 8)
    assert first.logit_bias == ((5, 2.0),)
    assert first.bad_words == ((3, 4),)
    assert (first.allowed_ids, first.min_tokens) == ((1, 7), 2)
    assert (first.num_logprobs, first.num_prompt_logprobs) == (3, 0)
    assert row_params(Request("r", [1], SamplingParams(), 16, []), 1, 77).seed == 77
