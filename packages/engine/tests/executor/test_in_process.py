from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from lamella.engine.executor.in_process import InProcess
from lamella.engine.executor.protocol import Alone
from lamella.kvtier import CopyJob, Location, TicketResult
from lamella.runner_v2.sampling.params import RowParams
from lamella.runner_v2.step import Common, KvLayout, Mask, NewRow, Step, Work
from lamella.runner_v2.testing.fake_runner import FakeModel, FakeRunner

PROMPT = [1, 2, 3]
GREEDY = RowParams(temperature=0.0)
DECODE = Work((0,), (1,), (0,), (0,))


def first_step(**fields: Any) -> Step:
    new = NewRow(0, 1, PROMPT, 3, 0, GREEDY, ([1, 2, 3],))
    return Step(0, added=(new,), work=Work((0,), (3,), (0,), (0,)), **fields)


def opened(worker: FakeRunner | None = None, **options: Any) -> InProcess:
    executor = InProcess(worker or FakeRunner(), **options)
    (report,) = executor.open()
    assert report.vocab_size == 64
    executor.allocate(KvLayout((8,)))
    return executor


@pytest.mark.parametrize("threaded", [False, True])
def test_steps_end_in_order(threaded: bool) -> None:
    executor = opened(depth=3, threaded=threaded)
    executor.submit(first_step())
    executor.submit(Step(1, work=DECODE))
    executor.submit(Step(2))
    outputs: list[Any] = []
    while len(outputs) < 3:
        outputs += executor.poll(5.0).outputs
    assert [output.step_id for output in outputs] == [0, 1, 2]
    assert [token for output in outputs for token in output.token_ids] == FakeModel().generate(PROMPT, GREEDY, 3)
    assert executor.poll(0.0).outputs == ()
    executor.close()


def test_a_worker_that_runs_behind_is_asked_when_someone_waits() -> None:
    worker = FakeRunner()
    worker.runs_behind = True
    executor = opened(worker, depth=2)
    executor.submit(first_step())
    executor.submit(Step(1, work=DECODE))
    assert worker.num_steps == 2, "both were launched, and nobody has waited"
    (first,) = executor.poll(None).outputs
    executor.submit(Step(2))
    rest = [*executor.poll(None).outputs, *executor.poll(None).outputs]
    assert [first.step_id, *(output.step_id for output in rest)] == [0, 1, 2]
    assert executor.poll(0.0).outputs == ()
    tokens = [*first.token_ids, *(token for output in rest for token in output.token_ids)]
    assert tokens == FakeModel().generate(PROMPT, GREEDY, 3)


def test_a_worker_that_fails_behind_has_died() -> None:
    worker = FakeRunner()
    worker.runs_behind = True
    executor = opened(worker, depth=2)
    executor.submit(first_step())
    worker._launched.clear()
    died = executor.poll(None).died
    assert died is not None
    assert "IndexError" in died.reason


def test_no_more_than_depth_are_in_flight() -> None:
    executor = opened(depth=1)
    executor.submit(first_step())
    with pytest.raises(AssertionError, match="depth is 1"):
        executor.submit(Step(1, work=DECODE))
    with pytest.raises(AssertionError, match="in flight"):
        executor.call("num_rows", {})
    executor.poll(None)
    executor.submit(Step(1, work=DECODE))


@pytest.mark.parametrize("threaded", [False, True])
def test_only_steps_with_masks_wait_for_them(threaded: bool) -> None:
    executor = opened(depth=2, threaded=threaded)
    executor.submit(first_step(masked_rows=(0,)))
    executor.submit(Step(1, work=DECODE))
    assert executor.poll(0.05).outputs == ()
    words = (1 << 33 | 1 << 40).to_bytes(8, "little")
    executor.provide(0, [Mask(0, 0, words)])
    outputs: list[Any] = []
    while len(outputs) < 2:
        outputs += executor.poll(5.0).outputs
    assert outputs[0].token_ids[0] in (33, 40)
    assert [output.step_id for output in outputs] == [0, 1]
    executor.close()


def test_masks_may_come_before_the_step() -> None:
    executor = opened()
    executor.provide(0, [Mask(0, 0, (1 << 9).to_bytes(8, "little"))])
    executor.submit(first_step(masked_rows=(0,)))
    assert executor.poll(None).outputs[0].token_ids == [9]


class Mortal(FakeRunner):
    def step(self, step: Step) -> Any:
        if step.step_id == 1:
            raise RuntimeError("out of luck")
        return super().step(step)


@pytest.mark.parametrize("threaded", [False, True])
def test_a_worker_that_raises_is_reported(threaded: bool, caplog: pytest.LogCaptureFixture) -> None:
    executor = opened(Mortal(), depth=3, threaded=threaded)
    executor.submit(first_step())
    executor.submit(Step(1, work=DECODE))
    executor.submit(Step(2))
    outputs: list[Any] = []
    died = None
    while died is None:
        events = executor.poll(5.0)
        outputs += events.outputs
        died = events.died
    assert [output.step_id for output in outputs] == [0]
    assert died == (0, "RuntimeError: out of luck")
    assert executor.poll(0.0).died == died
    assert "in step" in caplog.text, "the traceback is in the log"
    executor.close()


def test_an_interrupt_in_a_step_is_not_a_death() -> None:
    class Interrupted(FakeRunner):
        def step(self, step: Step) -> Any:
            raise KeyboardInterrupt

    executor = opened(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        executor.submit(first_step())
    assert executor.poll(0.0).died is None


def test_a_threaded_submit_does_not_wait_for_the_step() -> None:
    gate = threading.Event()

    class Slow(FakeRunner):
        def step(self, step: Step) -> Any:
            assert gate.wait(5.0)
            return super().step(step)

    executor = opened(Slow(), threaded=True)
    executor.submit(first_step())
    assert executor.poll(0.01).outputs == ()
    gate.set()
    assert len(executor.poll(5.0).outputs) == 1
    executor.close()


def job(ticket: int) -> CopyJob:
    return CopyJob(ticket, b"", Location("device", 0, 1), Location("host", 0, 1), 64)


def test_without_other_tiers_every_copy_fails_and_none_is_lost() -> None:
    executor = opened()
    executor.copy([job(1), job(2)])
    assert [(result.ticket, result.ok) for result in executor.poll(0.0).tickets] == [(1, False), (2, False)]
    assert list(executor.poll(0.0).tickets) == []


def test_copies_do_not_need_steps() -> None:
    class Mover:
        def __init__(self) -> None:
            self.jobs: list[CopyJob] = []
            self.closed = False

        def submit(self, jobs: Sequence[CopyJob]) -> None:
            self.jobs += jobs

        def poll(self) -> Sequence[TicketResult]:
            done = [TicketResult(job.ticket, True) for job in self.jobs]
            self.jobs = []
            return done

        def close(self) -> None:
            self.closed = True

    mover = Mover()
    executor = opened(mover=mover)
    executor.copy([job(5)])
    assert list(executor.poll(0.0).tickets) == [TicketResult(5, True)]
    executor.close()
    assert mover.closed


def test_calls_reach_the_worker_between_steps() -> None:
    executor = opened()
    assert executor.call("echo", {"text": "hi"}) == [{"text": "hi"}]
    assert executor.call("num_rows", {}) == [0]


def test_one_replica_agrees_with_itself() -> None:
    common = Common(num_tokens=8)
    assert Alone().agree(common) is common
