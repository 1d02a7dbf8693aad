"""Who waits for copies from the host tier: steps of those that read them, and nobody else's."""

from __future__ import annotations

import random

import pytest

from lamella.engine.core import CoreOptions, EngineCore
from lamella.engine.executor.in_process import InProcess
from lamella.engine.request import Request, SamplingParams
from lamella.engine.testing.fake_mover import FakeMover, Faults
from lamella.kvtier import TierPlan
from lamella.runner_v2.step import Step, StepOutput
from lamella.runner_v2.testing.fake_runner import FakeRunner

PREFIX = list(range(3, 23))
PROMPT, OTHER, SHORT = [*PREFIX, 30], [40 + n for n in range(21)], [50, 51]


class Bench:
    """A core over a runner that keeps its steps, and over a mover that copies when a step waits, or is told to."""

    def __init__(self, holds: bool) -> None:
        self.runner = FakeRunner(block_size=4, max_num_rows=4)
        self.steps: list[Step] = []
        run = self.runner.step

        def step(step: Step) -> StepOutput:
            self.steps.append(step)
            return run(step)

        self.runner.step = step  # type: ignore[method-assign]
        self.mover = FakeMover(lambda: self.runner._memory, random.Random(1), Faults(delay=0.0))
        self.runner.mover, self.mover.late = self.mover, True
        executor = InProcess(self.runner, mover=self.mover)
        self.core = EngineCore(
            executor,
            executor.open(),
            CoreOptions(
                max_model_len=64,
                max_num_seqs=4,
                max_num_batched_tokens=64,
                num_blocks=(17,),
                tiers=TierPlan(host_slots=(40,)),
                holds_restores=holds,
            ),
            draw_seed=lambda: 7,
        )
        self.ids: dict[str, list[int]] = {}

    def add(self, name: str, prompt: list[int], max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self.ids[name] = []
        self.core.add(Request(name, prompt, params, max_tokens, []))

    def round(self) -> None:
        batch = self.core.run_once()
        for delta in batch.deltas if batch is not None else []:
            assert delta.error is None
            self.ids[delta.request_id] += delta.token_ids
        self.core.check()

    def drain(self) -> None:
        while self.core.has_work:
            self.round()

    def run(self, name: str, prompt: list[int], max_tokens: int = 2) -> list[int]:
        self.add(name, prompt, max_tokens)
        self.drain()
        return self.ids[name]

    def keep_in_the_host(self) -> list[int]:
        """The prompt's blocks have left the device; what it was answered."""
        expected = self.run("first", PROMPT)
        for n in range(4):
            self.run(f"other {n}", [60 - n, *OTHER])
        return expected

    def enter_beside(self, max_tokens: int, rounds: int = 1) -> None:
        """One sequence decodes so many tokens, for some rounds; then another one enters behind slow copies."""
        self.add("decodes", SHORT, max_tokens)
        for _ in range(rounds):
            self.round()
        self.mover.faults = Faults(delay=1.0)
        self.add("again", PROMPT, 2)

    def is_held(self) -> bool:
        """It has a row, and is in no step."""
        (sequence,) = self.core._scheduler.books.prefilling
        return sequence.row not in self.steps[-1].work.rows if self.steps[-1].work else True


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(getattr(request, "param", True))


def test_alone_it_waits_in_its_first_step(bench: Bench) -> None:
    expected = bench.keep_in_the_host()
    assert not any(step.waits_for_copies for step in bench.steps)
    bench.mover.faults = Faults(delay=1.0)
    before = len(bench.steps)
    assert bench.run("again", PROMPT) == expected
    assert bench.steps[before].waits_for_copies
    assert bench.core.stats().tiers["host"].hit_tokens == len(PREFIX)


@pytest.mark.parametrize("bench", [False], indirect=True)
def test_without_holding_those_that_decode_wait_too(bench: Bench) -> None:
    expected = bench.keep_in_the_host()
    bench.enter_beside(12)
    bench.round()
    assert bench.steps[-1].waits_for_copies
    bench.mover.faults = Faults(delay=0.0)
    bench.drain()
    assert bench.ids["again"] == expected


def test_beside_others_that_decode_it_is_held(bench: Bench) -> None:
    expected = bench.keep_in_the_host()
    bench.enter_beside(12, rounds=2)
    for _ in range(5):
        before = len(bench.ids["decodes"])
        bench.round()
        assert not bench.steps[-1].waits_for_copies
        assert len(bench.ids["decodes"]) == before + 1
        assert bench.is_held()
    bench.mover.faults = Faults(delay=0.0)
    bench.drain()
    assert not any(step.waits_for_copies for step in bench.steps), "its copies had ended"
    assert bench.ids["again"] == expected


def test_held_to_the_end_of_the_others_it_waits_by_itself(bench: Bench) -> None:
    expected = bench.keep_in_the_host()
    bench.enter_beside(6)
    while bench.core.has_work and len(bench.ids["again"]) < 2:
        bench.round()
    assert len(bench.ids["decodes"]) == 6
    assert [step.waits_for_copies for step in bench.steps].count(True) >= 1
    assert bench.ids["again"] == expected
    bench.mover.faults = Faults()
    bench.drain()


def test_one_that_is_held_may_be_aborted(bench: Bench) -> None:
    bench.keep_in_the_host()
    bench.enter_beside(12, rounds=2)
    bench.round()
    assert bench.is_held()
    bench.core.abort(["again"])
    bench.round()
    assert bench.core._scheduler.books.prefilling == []
    bench.mover.faults = Faults(delay=0.0)
    bench.drain()
    assert len(bench.ids["decodes"]) == 12
    assert bench.core._manager.in_use == 0.0
