from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest

from lamella.engine.request import Request, SamplingParams
from lamella.engine.scheduler.loading import Loading, Turn
from lamella.engine.sequence import Sequence, Siblings, State, make_chain
from lamella.kvtier import LoadState
from lamella.kvtier.testing.fake_clock import FakeClock

NONE, STARTED, LATER = LoadState.NONE, LoadState.STARTED, LoadState.LATER


class Answers:
    """A manager that says what a test wants."""

    loads = True

    def __init__(self, *answers: LoadState) -> None:
        self.answers = list(answers)
        self.asked: list[int] = []
        self.ended: list[int] = []
        self.loaded: list[int] = []
        self.waits: dict[int, float] = {}
        self.num_lost = 0

    def begin_load(
        self, sequence: int, ids: Seq[int], chain: object, max_hit_len: int | None, *, tenant: str | None
    ) -> LoadState:
        self.asked.append(sequence)
        return self.answers.pop(0)

    def end_load(self, sequence: int) -> None:
        self.ended.append(sequence)

    def take_loaded(self) -> list[int]:
        loaded, self.loaded = self.loaded, []
        return loaded

    def add_wait(self, sequence: int, seconds: float) -> None:
        self.waits[sequence] = seconds


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(10.0)


def make(answers: Answers, clock: FakeClock) -> Loading:
    return Loading(answers, clock.now, lambda _: 2.0)  # type: ignore[arg-type]


def sequence_of(number: int) -> Sequence:
    request = Request(f"r{number}", list(range(9)), SamplingParams(max_tokens=4), 4, [])
    sequence = Sequence(Siblings(request, 0.0), 0, number, (number,), 0, 64)
    sequence.chain = make_chain(request, 4, 0)
    return sequence


def test_a_head_without_room_waits_for_those_that_load(clock: FakeClock) -> None:
    answers = Answers(STARTED, LATER, LATER, STARTED)
    loading = make(answers, clock)
    first, second = sequence_of(1), sequence_of(2)
    assert loading.begin(first)
    assert not loading.begin(second)
    assert loading.turn(second, can_enter=True) is Turn.WAITS
    clock.advance(0.5)
    answers.loaded = [1]
    assert loading.take_ended() == [first]
    clock.advance(0.5)
    assert loading.turn(second, can_enter=True) is Turn.LOADS
    assert second.state is State.LOADING
    clock.advance(0.25)
    answers.loaded = [2]
    assert loading.take_ended() == [second]
    assert answers.waits == {1: 0.5, 2: 1.25}
    assert second.load_s == 1.25
    assert loading.turn(second, can_enter=True) is Turn.ENTERS
    assert answers.asked == [1, 2, 2, 2]


def test_nobody_behind_a_head_that_waits_takes_the_room(clock: FakeClock) -> None:
    answers = Answers(STARTED, LATER, LATER, NONE, NONE)
    loading = make(answers, clock)
    first, second, third, fourth = map(sequence_of, range(1, 5))
    assert loading.begin(first)
    assert not loading.begin(second)
    assert loading.turn(second, can_enter=True) is Turn.WAITS
    assert not loading.begin(third)
    assert answers.asked == [1, 2, 2]
    answers.loaded = [1]
    loading.take_ended()
    assert loading.turn(second, can_enter=True) is Turn.ENTERS
    second.enter(0, 0, 0, 16)
    assert not loading.begin(fourth)
    assert answers.asked == [1, 2, 2, 2, 4]


def test_a_head_has_patience_for_the_loads_of_others_and_no_more(clock: FakeClock) -> None:
    answers = Answers(STARTED, LATER, LATER, LATER)
    loading = make(answers, clock)
    first, second = sequence_of(1), sequence_of(2)
    loading.begin(first)
    assert loading.turn(second, can_enter=True) is Turn.WAITS
    clock.advance(1.9)
    assert loading.turn(second, can_enter=True) is Turn.WAITS
    clock.advance(0.2)
    assert loading.turn(second, can_enter=True) is Turn.ENTERS
    assert second.tiers_settled
    assert loading.num_late == 1
    assert second.load_s == pytest.approx(2.1)


def test_room_that_nobody_who_loads_will_give_back_is_not_waited_for(clock: FakeClock) -> None:
    """Who holds it has been brought everything, and stands behind the head."""
    loading = make(Answers(LATER), clock)
    head = sequence_of(1)
    assert loading.turn(head, can_enter=True) is Turn.ENTERS
    assert head.tiers_settled


def test_a_head_that_could_not_enter_anyway_decides_nothing(clock: FakeClock) -> None:
    loading = make(Answers(STARTED, LATER), clock)
    loading.begin(sequence_of(1))
    head = sequence_of(2)
    assert loading.turn(head, can_enter=False) is Turn.ENTERS
    assert not head.tiers_settled


def test_tiers_are_asked_again_when_something_has_left_since(clock: FakeClock) -> None:
    answers = Answers(NONE, STARTED)
    loading = make(answers, clock)
    sequence = sequence_of(1)
    assert not loading.begin(sequence)
    assert loading.turn(sequence, can_enter=True) is Turn.ENTERS
    assert answers.asked == [1]
    answers.num_lost = 3
    assert loading.turn(sequence, can_enter=True) is Turn.LOADS


def test_who_was_too_late_is_not_asked_again(clock: FakeClock) -> None:
    answers = Answers(STARTED)
    loading = make(answers, clock)
    sequence = sequence_of(1)
    assert loading.begin(sequence)
    clock.advance(2.5)
    assert loading.take_ended() == [sequence]
    answers.num_lost = 3
    assert loading.turn(sequence, can_enter=True) is Turn.ENTERS
    assert (answers.ended, loading.num_late) == ([1], 1)
