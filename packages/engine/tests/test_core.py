from __future__ import annotations

from typing import Any

import pytest

from lamella.engine.core import CoreOptions, EngineCore
from lamella.engine.core_loop import Core
from lamella.engine.errors import CapacityError, EngineDeadError, EngineError, RequestError
from lamella.engine.executor.in_process import InProcess
from lamella.engine.request import Delta, Request, SamplingParams
from lamella.engine.wire import Batch, Stats, sequence_id
from lamella.kvtier.testing.fake_clock import FakeClock
from lamella.runner_v2.sampling.params import RowParams
from lamella.runner_v2.step import Common, Step
from lamella.runner_v2.testing.fake_runner import FakeModel, FakeRunner

GREEDY = RowParams(temperature=0.0)


def make(
    model: FakeModel | None = None,
    *,
    depth: int = 1,
    threaded: bool = False,
    runner: FakeRunner | None = None,
    rendezvous: Any = None,
    **options: Any,
) -> EngineCore:
    runner = runner or FakeRunner(model)
    executor = InProcess(runner, depth=depth, threaded=threaded)
    reports = executor.open()
    fields: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 32, **options}
    fields.setdefault("num_blocks", (200,) * len(reports[0].groups))
    clock = FakeClock()
    core = EngineCore(
        executor,
        reports,
        CoreOptions(**fields),
        clock=clock.now,
        draw_seed=lambda: 5,
        rendezvous=rendezvous,
    )
    assert_is_core(core)
    return core


def assert_is_core(core: Core) -> None:
    """The type checker's part of the contract with the loop."""


def request(name: str, prompt: list[int], max_tokens: int = 4, **params: Any) -> Request:
    return Request(
        name, prompt, SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **params}), max_tokens, []
    )


def drain(core: EngineCore) -> list[Delta]:
    deltas: list[Delta] = []
    for _ in range(300):
        if not core.has_work:
            break
        batch = core.run_once()
        deltas += batch.deltas if batch is not None else []
        core.check()
    assert not core.has_work
    return deltas


def ids(deltas: list[Delta], name: str) -> list[int]:
    return [token for delta in deltas if delta.request_id == name for token in delta.token_ids]


@pytest.mark.parametrize(("depth", "threaded"), [(1, False), (1, True), (2, False), (2, True)])
def test_requests_come_back_as_deltas(depth: int, threaded: bool) -> None:
    core = make(depth=depth, threaded=threaded)
    for n in range(6):
        core.add(request(f"r{n}", [n + 1] * (n + 3), max_tokens=5))
    deltas = drain(core)
    for n in range(6):
        assert ids(deltas, f"r{n}") == FakeModel().generate([n + 1] * (n + 3), GREEDY, 5)
    assert core.run_once() is None
    core.close()


def test_info_says_what_is_fixed() -> None:
    core = make(FakeModel(windows=(None, 8)), num_blocks=(33, 17), report={"why": "because"})
    info = core.info
    assert info.num_blocks == [33, 17]
    assert info.kv_tokens == 32 * 4
    assert (info.max_model_len, info.vocab_size, info.block_size) == (64, 64, 4)
    assert (info.max_num_seqs, info.max_num_batched_tokens, info.report) == (4, 32, {"why": "because"})


def test_the_cache_must_hold_one_longest_sequence() -> None:
    with pytest.raises(CapacityError, match="window"):
        make(FakeModel(windows=(30,)), num_blocks=(6,))


def test_what_cannot_be_served_is_told_to_each_sequence_and_disturbs_nobody() -> None:
    core = make()
    core.add(request("good", [1, 2, 3]))
    core.add(request("bad", [1] * 64, n=2, temperature=1.0))
    core.add(request("good", [1, 2, 3]))
    batch = core.run_once()
    assert batch is not None
    refused = [delta for delta in batch.deltas if delta.finish_reason == "error"]
    assert [(delta.request_id, delta.index) for delta in refused] == [("bad", 0), ("bad", 1), ("good", 0)]
    assert "the prompt has 64 tokens" in (refused[0].error or "")
    assert "'good' is in use" in (refused[2].error or "")
    assert len(ids([d for d in batch.deltas if d.finish_reason != "error"] + drain(core), "good")) == 4


def test_submit_raises_what_add_tells() -> None:
    core = make()
    with pytest.raises(RequestError, match="empty"):
        core.submit(request("r", []))
    core.submit(request("r0", [1]))
    with pytest.raises(RequestError, match="in use"):
        core.submit(request("r0", [3]))
    core.run_once()
    with pytest.raises(RequestError, match="in use"):
        core.submit(request("r0", [3]))


def test_an_abort_frees_blocks_at_the_next_round() -> None:
    core = make()
    core.add(request("r", [1] * 9, max_tokens=50))
    core.run_once()
    assert core.stats().kv_usage > 0
    core.abort(["r", "unknown"])
    assert core.has_work
    batch = core.run_once()
    assert not core.has_work
    assert core.stats().kv_usage == 0
    assert batch is not None
    assert (batch.deltas, batch.stats) == ([], core.stats()), "gauges must not stay at what the last delta came with"
    assert core.run_once() is None


def test_the_last_batch_of_an_abort_says_that_nothing_is_held_also_with_steps_in_flight() -> None:
    core = make(depth=2)
    core.add(request("r", [1] * 9, max_tokens=50))
    for _ in range(3):
        core.run_once()
    core.abort(["r"])
    told: list[Stats] = []
    while core.has_work:
        batch = core.run_once()
        if batch is not None:
            assert batch.deltas == []
            assert batch.stats is not None
            told.append(batch.stats)
    assert (told[-1].num_running, told[-1].num_waiting, told[-1].kv_usage) == (0, 0, 0.0)


def test_a_round_that_says_nothing_new_tells_nothing() -> None:
    core = make(max_num_batched_tokens=8)
    core.add(request("r", [1] * 30, max_tokens=2))
    first = core.run_once()
    assert first is not None
    assert first.stats is not None
    assert (first.deltas, first.stats.num_running) == ([], 1)
    assert core.run_once() is None  # the second chunk of the prompt
    assert len(ids(drain(core), "r")) == 2


def test_one_sequence_of_a_request_can_be_aborted() -> None:
    core = make()
    core.add(request("r", [1] * 9, max_tokens=6, n=3, temperature=1.0))
    for _ in range(3):
        core.run_once()
    core.abort([sequence_id("r", 1)])
    told = {(delta.index, delta.finish_reason) for delta in drain(core) if delta.finish_reason}
    assert told == {(0, "length"), (2, "length")}


def test_a_request_aborted_before_its_first_round_is_never_run() -> None:
    core = make()
    core.add(request("r", [1] * 9))
    core.abort(["r"])
    assert drain(core) == []
    assert core.stats().steps == 0


def test_calls_between_steps() -> None:
    core = make(depth=2)
    core.add(request("r", [1] * 9, max_tokens=30))
    first = core.run_once()
    assert first is not None
    assert isinstance(core.call("stats", {}), Stats)
    assert core.call("echo", {"n": 1}) == [{"n": 1}]
    assert core.call("reset_prefix_cache", {}) is True
    with pytest.raises(EngineError, match="knows no operation 'dance'"):
        core.call("dance", {})
    with pytest.raises(EngineError, match="unexpected keyword argument 'loud'"):
        core.call("num_rows", {"loud": True})
    assert ids(first.deltas + drain(core), "r") == FakeModel().generate([1] * 9, GREEDY, 30)


def test_reset_forgets_prefixes() -> None:
    core = make()
    for name in ("a", "b", "c"):
        core.add(request(name, [1] * 9))
        (first, *_) = drain(core)
        assert first.cached_len == (8 if name == "b" else 0)
        if name == "b":
            core.call("reset_prefix_cache", {})


def test_stats_add_up() -> None:
    core = make(runner=FakeRunner(max_num_drafts=3), max_num_drafts=3)
    core.add(request("a", [1] * 9, max_tokens=8))
    batches: list[Batch] = []
    while core.has_work:
        batch = core.run_once()
        if batch is not None:
            batches.append(batch)
    core.add(request("b", [1] * 9, max_tokens=8))
    drain(core)
    stats = core.stats()
    assert (stats.prompt_tokens, stats.generation_tokens) == (18, 16)
    assert (stats.prefix_queries, stats.prefix_hits) == (18, 8)
    assert stats.steps == 16 - stats.spec_accepted_tokens
    assert batches[0].stats is not None
    assert batches[0].stats.generation_tokens == 1  # a snapshot, not the live object


@pytest.mark.parametrize("threaded", [False, True])
def test_a_dead_worker_ends_the_core(threaded: bool) -> None:
    class Mortal(FakeRunner):
        def step(self, step: Step) -> Any:
            raise RuntimeError("no more")

    core = make(runner=Mortal(), threaded=threaded)
    core.add(request("r", [1]))
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="worker 0 died: RuntimeError: no more"):
            core.run_once()


def test_a_broken_invariant_ends_the_core() -> None:
    class Liar(FakeRunner):
        def step(self, step: Step) -> Any:
            return super().step(step)._replace(generations=(99,))

    core = make(runner=Liar())
    core.add(request("r", [1]))
    with pytest.raises(AssertionError, match="another owner"):
        core.run_once()


def test_replicas_agree_between_plan_and_submit() -> None:
    class Meeting:
        def __init__(self) -> None:
            self.asked = 0

        def agree(self, local: Common) -> Common:
            self.asked += 1
            return local._replace(skip_drafts=True)

    meeting = Meeting()
    runner = FakeRunner(max_num_drafts=2)
    core = make(runner=runner, max_num_drafts=2, rendezvous=meeting)
    core.add(request("r", [1] * 5, max_tokens=7))
    drain(core)
    assert meeting.asked == runner.num_steps == 7
    assert core.stats().spec_draft_tokens == 0
