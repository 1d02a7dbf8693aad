from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from lamella.engine.errors import StartError
from lamella.engine.request import Delta
from lamella.engine.scheduler.config import SchedulerConfig
from lamella.engine.sequence import State
from lamella.runner_v2.sampling.params import RowParams
from lamella.runner_v2.step import NewBlocks, Step, Work
from lamella.runner_v2.testing.fake_runner import FakeModel

MakeRig = Callable[..., Any]
Ids = Callable[[list[Delta]], list[int]]
GREEDY = RowParams(temperature=0.0)


def test_planning_imports_neither_torch_nor_asyncio() -> None:
    program = (
        "import sys, lamella.engine.scheduler.scheduler, lamella.engine.executor.in_process, lamella.engine.core; "
        "bad = {'torch', 'numpy', 'asyncio'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_prompt_is_computed_in_chunks_and_steady_steps_are_constant(rig: MakeRig) -> None:
    r = rig(max_num_batched_tokens=10, max_num_seqs=2)
    r.add(list(range(1, 26)), max_tokens=20)
    first = r.plan()
    assert first is not None
    (new,) = first.added
    assert (new.row, new.generation, new.prompt_len, new.computed_len) == (0, 1, 25, 0)
    assert list(new.token_ids) == list(range(1, 26))
    assert len(new.blocks[0]) == 7
    assert first.work == Work((0,), (10,), (0,), (0,))
    assert r.commit() == []
    assert r.plan() == Step(1)
    assert r.commit() == []
    third = r.plan()
    assert third == Step(2, work=Work((0,), (5,), (0,), (0,)))
    (delta,) = r.commit()
    assert len(delta.token_ids) == 1
    assert r.plan() == Step(3, work=Work((0,), (1,), (0,), (0,)))
    r.commit()
    steps = []
    for _ in range(10):
        steps.append(r.plan())
        r.commit()
    grown = [step for step in steps if step.new_blocks]
    assert [step.new_blocks for step in grown] == [
        (NewBlocks(0, 0, [8], 7),),
        (NewBlocks(0, 0, [9], 8),),
    ]
    assert all(step == Step(step.step_id) for step in steps if step not in grown)


def test_decoding_rows_come_first_and_prompts_share_what_is_left(rig: MakeRig) -> None:
    r = rig(max_num_batched_tokens=8, max_num_seqs=4)
    r.add([1] * 3)
    r.step()
    r.add([2] * 20)
    r.add([3] * 4)
    step = r.plan()
    assert step.work == Work((0, 1), (1, 7), (0, 0), (0, 0))
    r.commit()
    r.step()
    step = r.plan()
    assert step.work == Work((0, 1, 2), (1, 6, 1), (0, 0, 0), (0, 0, 0))


def test_admission_is_strictly_in_order(rig: MakeRig) -> None:
    r = rig(num_blocks=9, max_num_seqs=4)
    r.add([1] * 17)
    r.step()
    r.add([2] * 16)
    r.add([3] * 2)
    step = r.plan()
    assert step.added == ()
    r.commit()
    assert r.books.num_waiting == 2


def test_a_prompt_is_admitted_only_as_a_whole(rig: MakeRig) -> None:
    r = rig(num_blocks=8, max_num_batched_tokens=4)
    r.add([1] * 12, max_tokens=1)
    r.add([2] * 20, max_tokens=1)
    for _ in range(3):
        r.step()
        assert r.books.num_waiting == 1
    assert r.plan().added[0].prompt_len == 20


def test_some_blocks_are_left_to_those_who_run(rig: MakeRig) -> None:
    r = rig(num_blocks=33, max_num_seqs=4)
    r.add([1] * 60, max_tokens=4)
    r.step()
    r.add([2] * 64, max_tokens=0)
    assert r.plan().added == ()  # 16 of 17 free blocks would do, but one is kept for the row that decodes
    r.commit()
    r.finish()


def test_priorities_order_the_queue_and_displace_running_sequences(rig: MakeRig, ids: Ids) -> None:
    r = rig(max_num_seqs=2, policy="priority")
    r.add([1] * 6, max_tokens=12, priority=5)
    r.add([2] * 6, max_tokens=12, priority=3)
    told = r.step()
    r.add([3] * 6, max_tokens=12, priority=4)
    r.add([4] * 6, max_tokens=12, priority=1)
    told += r.step()  # marks the worst one
    step = r.plan()
    assert [new.token_ids[0] for new in step.added] == [4]
    assert r.books.stats.preemptions == 1
    assert r.books.waiting.head().request_id == "r2"
    told += r.commit()
    for deltas in r.finish().values():
        told += deltas
    for n in range(4):
        expected = r.runner.model.generate([n + 1] * 6, GREEDY, 12)
        assert ids([delta for delta in told if delta.request_id == f"r{n}"]) == expected
    ended = [delta.request_id for delta in told if delta.finish_reason]
    assert ended[-1] == "r0"


def test_equal_priorities_displace_nobody(rig: MakeRig) -> None:
    r = rig(max_num_seqs=1, policy="priority")
    r.add([1] * 6, priority=1)
    r.step()
    r.add([2] * 6, priority=1)
    r.finish()
    assert r.books.stats.preemptions == 0


def test_a_preempted_sequence_keeps_its_tokens_and_finds_its_prefix(rig: MakeRig, ids: Ids) -> None:
    r = rig(num_blocks=9, max_num_seqs=2)
    first = r.add([1] * 9, max_tokens=16)
    second = r.add([2] * 9, max_tokens=16)
    told: dict[str, list[Delta]] = {first.request_id: [], second.request_id: []}
    back = None
    while r.scheduler.has_work:
        step = r.plan()
        if step is not None and step.added and step.step_id:
            back = step.added[0]
        for delta in r.commit() if step is not None else []:
            told[delta.request_id].append(delta)
    assert r.books.stats.preemptions >= 1
    assert back is not None
    assert back.prompt_len == 9
    assert len(back.token_ids) > 9
    assert back.computed_len >= 8
    for request in (first, second):
        assert ids(told[request.request_id]) == r.runner.model.generate(request.prompt_ids, GREEDY, 16)
        assert told[request.request_id][0].cached_len == 0


def test_siblings_wait_for_the_prompt_and_take_it_from_the_cache(rig: MakeRig) -> None:
    r = rig(max_num_batched_tokens=8)
    r.add([5] * 14, max_tokens=4, n=3, temperature=1.0)
    assert (r.books.num_waiting, len(r.books.waiting)) == (3, 1)
    assert len(r.plan().added) == 1
    assert r.commit() == []
    assert r.plan().added == ()
    r.commit()
    step = r.plan()
    assert [new.computed_len for new in step.added] == [12, 12]
    assert [new.params.seed for new in step.added] == [12, 13]
    told = r.finish()
    assert [told["r0", n][0].cached_len for n in (1, 2)] == [12, 12]
    stats = r.books.stats
    assert stats.prompt_tokens == 14
    assert stats.computed_prompt_tokens == 14 + 2 * 2  # what lies behind the last full block, twice
    assert stats.computed_tokens == stats.computed_prompt_tokens + 3 * 3  # the last token is not computed
    assert len({tuple(t for d in told["r0", n] for t in d.token_ids) for n in (1, 2)}) == 2


def test_siblings_of_a_short_prompt_or_without_cache_start_together(rig: MakeRig) -> None:
    for fields in ({"prompt": [1] * 4}, {"prompt": [1] * 20, "use_prefix_cache": False}):
        r = rig()
        r.add(n=3, temperature=1.0, **fields)
        assert len(r.plan().added) == 3
    r = rig(prefix_caching=False)
    r.add([1] * 20, n=3, temperature=1.0)
    assert len(r.plan().added) == 3


@pytest.mark.parametrize("how", ["abort", "fail"])
def test_when_the_first_sibling_is_lost_the_next_computes_the_prompt(rig: MakeRig, how: str) -> None:
    r = rig(max_num_batched_tokens=8, model=FakeModel(fail_id=9))
    prompt = [5] * 13 + ([9] if how == "fail" else [6])
    r.add(prompt, n=3, temperature=1.0, max_tokens=2)
    r.step()
    if how == "abort":
        r.scheduler.abort("r0", 0)
    told = r.finish()
    if how == "abort":
        assert sorted(told) == [("r0", 1), ("r0", 2)]
    else:
        assert [told["r0", n][0].finish_reason for n in range(3)] == ["error"] * 3


def test_a_request_can_stay_out_of_the_prefix_cache(rig: MakeRig) -> None:
    r = rig()
    r.add([1] * 12, use_prefix_cache=False)
    r.finish()
    r.add([1] * 12)
    assert r.plan().added[0].computed_len == 0
    r.commit()
    r.finish()
    r.add([1] * 12, use_prefix_cache=False)
    assert r.plan().added[0].computed_len == 0
    r.commit()
    r.finish()
    r.add([1] * 12, cache_salt="other")
    assert r.plan().added[0].computed_len == 0
    r.commit()
    r.finish()
    r.add([1] * 12)
    assert r.plan().added[0].computed_len == 8


def test_two_steps_are_planned_before_the_first_result(rig: MakeRig, ids: Ids) -> None:
    r = rig()
    request = r.add([1] * 7, max_tokens=6)
    r.plan()
    assert r.plan() == Step(1, work=Work((0,), (1,), (0,), (0,)))
    (sequence,) = r.books.decoding
    assert (sequence.committed_len, sequence.computed_len, sequence.reach, sequence.planned_len) == (7, 0, 8, 9)
    told = []
    while r.in_flight:
        told += r.commit()
        r.plan()
    assert ids(told) == r.runner.model.generate(request.prompt_ids, GREEDY, 6)
    assert r.runner.num_steps == 6  # no step beyond max_tokens


def test_what_a_step_in_flight_computes_for_an_ended_sequence_is_dropped(rig: MakeRig) -> None:
    model = FakeModel()
    r = rig(max_num_seqs=1, model=model)
    output = model.generate([1] * 7, GREEDY, 3)
    stop = output[1]
    assert output[0] != stop
    r.add([1] * 7, max_tokens=20, stop_token_ids=[stop])
    r.add([2] * 7, max_tokens=1)
    for _ in range(3):
        r.plan()  # steps 0, 1, 2
    r.commit()
    table = r.manager.table(0, 0)
    (delta,) = r.commit()
    assert (delta.finish_reason, delta.stop_reason) == ("stop", stop)
    assert not r.manager.holds(0)
    assert r.manager.pin(0, table[0]) == 2  # a copy has to wait for the ghost's step
    r.manager.unpin(0, table[0])
    step = r.plan()
    assert step.removed == ((0, 1),)
    assert (step.added[0].row, step.added[0].generation) == (0, 2)
    assert r.commit() == []  # the ghost
    (delta,) = r.commit()
    assert delta.request_id == "r1"


def test_preempting_waits_for_steps_in_flight(rig: MakeRig, ids: Ids) -> None:
    r = rig(num_blocks=7, max_num_seqs=2)
    requests = [r.add([n] * 7, max_tokens=12) for n in (1, 2)]
    told: dict[str, list[Delta]] = {request.request_id: [] for request in requests}
    drained = False
    while r.scheduler.has_work:
        while len(r.in_flight) < 2 and r.plan() is not None:
            pass
        for sequence in r.books.draining:
            drained = True
            assert sequence.state is State.DRAINING
            assert r.manager.holds(sequence.id)
        if r.in_flight:
            for delta in r.commit():
                told[delta.request_id].append(delta)
    assert drained
    for request in requests:
        assert ids(told[request.request_id]) == r.runner.model.generate(request.prompt_ids, GREEDY, 12)


def test_drafts_are_verified_and_bounded_by_what_is_left(rig: MakeRig, ids: Ids) -> None:
    r = rig(max_num_drafts=3)
    request = r.add([1] * 7, max_tokens=30)
    told: list[Delta] = []
    emitted = 0
    work = None
    while r.scheduler.has_work:
        held = r.books.decoding[0].held_drafts if r.books.decoding else 0
        step = r.plan()
        work = step.work or work
        assert work.verify_lens == (held,)
        assert emitted + 1 + work.verify_lens[0] <= 30
        assert work.query_lens[0] == (7 if not step.step_id else 1 + held)
        told += r.commit()
        emitted = len(ids(told))
    assert ids(told) == r.runner.model.generate(request.prompt_ids, GREEDY, 30)
    stats = r.scheduler.snapshot()
    assert 0 < stats.spec_accepted_tokens < stats.spec_draft_tokens
    assert stats.spec_accepted_tokens == sum(stats.spec_accepted_per_pos) == 30 - stats.steps
    assert stats.generation_tokens == 30


def test_drafts_are_verified_where_they_pay(rig: MakeRig, ids: Ids) -> None:
    """About every third of the fake runner's drafts is wrong: that pays where they are free, not where they cost."""
    num_drafts = {}
    for name, costs in {"free": [(1, 1.0), (8, 1.001)], "dear": [(1, 1.0), (2, 1.9)], "all": None}.items():
        r = rig(max_num_drafts=3, draft_costs=costs)
        request = r.add([1] * 7, max_tokens=40)
        told: list[Delta] = []
        while r.scheduler.has_work:
            held = r.books.decoding[0].held_drafts if r.books.decoding else 0
            step = r.plan()
            if step.work is not None:
                assert step.work.verify_lens[0] <= held
                assert step.work.query_lens[0] == (7 if not step.step_id else 1 + step.work.verify_lens[0])
            told += r.commit()
        assert ids(told) == r.runner.model.generate(request.prompt_ids, GREEDY, 40)
        stats = r.scheduler.snapshot()
        num_drafts[name] = stats.spec_draft_tokens
        assert stats.spec_accepted_tokens == 40 - stats.steps
    assert num_drafts["free"] > 0.8 * num_drafts["all"]
    assert num_drafts["dear"] == 0


def test_streaks_follow_drafts_that_are_not_verified(rig: MakeRig) -> None:
    r = rig(max_num_drafts=3, draft_costs=[(1, 1.0), (2, 9.0)])
    r.add([1] * 7, max_tokens=40)
    streaks = set()
    while r.scheduler.has_work:
        r.plan()
        r.commit()
        streaks.update(s.streak for s in r.books.decoding)
    assert r.scheduler.snapshot().spec_draft_tokens == 0
    assert max(streaks) > 1


def test_drafts_never_cost_a_row_its_token(rig: MakeRig) -> None:
    r = rig(max_num_drafts=3, max_num_seqs=4, max_num_batched_tokens=6)
    for n in range(4):
        r.add([n + 1], max_tokens=12)
    for _ in range(6):
        step = r.plan()
        if step.work is not None:
            assert sum(step.work.query_lens) <= 6
            assert len(step.work.rows) == 4
        r.commit()


def test_under_pressure_blocks_of_rejected_drafts_come_back_first(rig: MakeRig, ids: Ids) -> None:
    """Blocks of one token; a row that had room for three drafts and whose next step verifies fewer can give some."""
    trimmed: list[int] = []
    for num_blocks in range(12, 24):
        r = rig(num_blocks=num_blocks, block_size=1, max_num_drafts=3, max_num_seqs=2, max_model_len=11)
        trim = r.manager.trim

        def count(sequence: int, *lens: int, trim: Any = trim, r: Any = r) -> Any:
            before = r.manager.num_free(0)
            covered = trim(sequence, *lens)
            trimmed.append(r.manager.num_free(0) - before)
            return covered

        r.manager.trim = count
        r.add([1], max_tokens=10)
        r.add([2], max_tokens=10)
        told = r.finish()
        for n in (0, 1):
            assert ids(told[f"r{n}", 0]) == r.runner.model.generate([n + 1], GREEDY, 10)
    assert sum(trimmed) > 0


def test_nothing_to_do_is_no_step(rig: MakeRig) -> None:
    r = rig()
    assert r.scheduler.plan() is None
    r.add([1] * 3, max_tokens=1)
    r.step()
    assert r.scheduler.plan() is None
    assert not r.scheduler.has_work


def test_limits_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(StartError, match="max_num_batched_tokens is 3, below max_num_seqs 4"):
        SchedulerConfig(max_model_len=10, max_num_seqs=4, max_num_batched_tokens=3, max_chunk_len=10)
    with pytest.raises(StartError, match="too few for a token and its 2 drafts"):
        SchedulerConfig(max_model_len=10, max_num_seqs=4, max_num_batched_tokens=9, max_chunk_len=2, max_num_drafts=2)
