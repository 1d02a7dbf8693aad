"""What a client may rely on, of the scripted core as of the real one: the tests of server and client stand on the
first, what they prove must hold for the second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lamella.engine.core import CoreOptions, EngineCore
from lamella.engine.core_loop import Core
from lamella.engine.executor.in_process import InProcess
from lamella.engine.request import Delta, Request, SamplingParams
from lamella.engine.testing.scripted_core import ScriptedCore
from lamella.engine.wire import Stats, sequence_id
from lamella.runner_v2.sampling.params import RowParams
from lamella.runner_v2.testing.fake_runner import FakeModel, FakeRunner

PROMPT = [3, 1, 4, 1, 5]
OUTPUT = FakeModel().generate(PROMPT, RowParams(temperature=0.0), 12)
"""What both cores answer, as far as nothing ends it."""
FIRST_OF = {token: n for n, token in reversed(list(enumerate(OUTPUT)))}
LATE = max(FIRST_OF, key=lambda token: FIRST_OF[token])
"""The id that comes last among those of OUTPUT."""
ABSENT = next(token for token in range(64) if token not in OUTPUT)


def scripted() -> Core:
    return ScriptedCore(script=lambda request, index: OUTPUT)


def real(**options: Any) -> Core:
    executor = InProcess(FakeRunner(), **options)
    reports = executor.open()
    options = CoreOptions(max_model_len=64, max_num_seqs=8, max_num_batched_tokens=64, num_blocks=(200,))
    return EngineCore(executor, reports, options)


MAKERS: dict[str, Callable[[], Core]] = {
    "scripted": scripted,
    "real": real,
    "two steps in flight": lambda: real(depth=2, threaded=True),
}


@pytest.fixture(params=MAKERS)
def core(request: pytest.FixtureRequest) -> Core:
    return MAKERS[request.param]()


def ask(core: Core, name: str = "r", max_tokens: int = 12, eos: tuple[int, ...] = (), **params: Any) -> None:
    sampling = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **params})
    core.add(Request(name, PROMPT, sampling, max_tokens, list(eos)))


def run(core: Core) -> list[Delta]:
    """To the end; closes the core."""
    deltas: list[Delta] = []
    stats: Stats | None = None
    for _ in range(200):
        if not core.has_work:
            break
        batch = core.run_once()
        if batch is not None:
            deltas += batch.deltas
            stats = batch.stats
    assert not core.has_work
    if deltas:
        assert stats is not None
        assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0.0)
    core.close()
    return deltas


def answers(deltas: list[Delta]) -> dict[tuple[str, int], tuple[list[int], str | None, int | None]]:
    """Ids, finish reason and stop reason of each sequence; nothing may come behind a finish reason."""
    result: dict[tuple[str, int], tuple[list[int], str | None, int | None]] = {}
    for delta in deltas:
        ids, finish, stop = result.get((delta.request_id, delta.index), ([], None, None))
        assert finish is None, "a delta behind the last one"
        assert delta.error is None
        result[delta.request_id, delta.index] = (
            ids + delta.token_ids,
            delta.finish_reason,
            delta.stop_reason if delta.finish_reason else stop,
        )
    return result


def test_the_length_ends_an_answer(core: Core) -> None:
    ask(core, max_tokens=7)
    assert answers(run(core)) == {("r", 0): (OUTPUT[:7], "length", None)}


def test_the_end_id_is_part_of_the_answer_and_no_stop_reason(core: Core) -> None:
    ask(core, eos=(LATE, ABSENT))
    end = FIRST_OF[LATE] + 1
    assert 1 < end < 12
    assert answers(run(core)) == {("r", 0): (OUTPUT[:end], "stop", None)}


def test_the_end_id_can_be_ignored(core: Core) -> None:
    ask(core, eos=(LATE,), ignore_eos=True)
    assert answers(run(core)) == {("r", 0): (OUTPUT, "length", None)}


def test_a_stop_id_ends_an_answer_and_is_its_reason(core: Core) -> None:
    ask(core, eos=(ABSENT,), stop_token_ids=[ABSENT, LATE])
    assert answers(run(core)) == {("r", 0): (OUTPUT[: FIRST_OF[LATE] + 1], "stop", LATE)}


def test_a_stop_id_holds_also_where_the_end_is_ignored(core: Core) -> None:
    ask(core, eos=(LATE,), stop_token_ids=[LATE], ignore_eos=True)
    assert answers(run(core)) == {("r", 0): (OUTPUT[: FIRST_OF[LATE] + 1], "stop", LATE)}


def test_a_stop_id_as_last_token_is_a_stop(core: Core) -> None:
    ask(core, max_tokens=FIRST_OF[LATE] + 1, stop_token_ids=[LATE])
    assert answers(run(core)) == {("r", 0): (OUTPUT[: FIRST_OF[LATE] + 1], "stop", LATE)}


def test_no_tokens_are_an_answer_of_their_own(core: Core) -> None:
    ask(core, max_tokens=0, prompt_logprobs=1)
    deltas = run(core)
    assert answers(deltas) == {("r", 0): ([], "length", None)}
    (scored,) = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None]
    assert scored[0] is None
    assert [entry.token_ids[0] for entry in scored[1:] if entry is not None] == PROMPT[1:]


def test_every_sequence_of_a_request_is_answered(core: Core) -> None:
    ask(core, max_tokens=5, n=3, temperature=1.0)
    ask(core, "other", max_tokens=3)
    told = answers(run(core))
    assert told.pop(("other", 0)) == (OUTPUT[:3], "length", None)
    assert {name: (len(ids), finish) for name, (ids, finish, _) in told.items()} == {
        ("r", index): (5, "length") for index in range(3)
    }


def test_the_first_delta_says_what_the_wait_was(core: Core) -> None:
    ask(core, max_tokens=4)
    first, *later = run(core)
    assert first.prefill_s > 0
    assert all((delta.queued_s, delta.prefill_s, delta.cached_len) == (0, 0, 0) for delta in later)


@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_nothing_more_is_told_of_an_aborted_request(core: Core, rounds: int) -> None:
    ask(core, "gone", n=2, temperature=1.0)
    ask(core, "stays")
    deltas: list[Delta] = []
    for _ in range(rounds):
        batch = core.run_once()
        deltas += batch.deltas if batch is not None else []
    core.abort(["gone"])
    later = run(core)
    assert {delta.request_id for delta in later} == {"stays"}
    assert answers(deltas + later)["stays", 0] == (OUTPUT, "length", None)


@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_nothing_more_is_told_of_an_aborted_sequence(core: Core, rounds: int) -> None:
    ask(core, n=3, temperature=1.0)
    deltas: list[Delta] = []
    for _ in range(rounds):
        batch = core.run_once()
        deltas += batch.deltas if batch is not None else []
    core.abort([sequence_id("r", 1)])
    later = run(core)
    assert {delta.index for delta in later} == {0, 2}
    told = answers(deltas + later)
    assert all((len(told["r", index][0]), told["r", index][1]) == (12, "length") for index in (0, 2))


def test_aborting_all_sequences_ends_the_request(core: Core) -> None:
    ask(core, n=2, temperature=1.0)
    core.run_once()
    core.abort([sequence_id("r", 0), sequence_id("r", 1)])
    assert run(core) == []


def test_aborts_of_what_is_unknown_or_has_ended_are_ignored(core: Core) -> None:
    ask(core, max_tokens=3)
    core.abort(["unknown", sequence_id("unknown", 0), sequence_id("r", 7)])
    deltas: list[Delta] = []
    while core.has_work:
        batch = core.run_once()
        deltas += batch.deltas if batch is not None else []
    assert answers(deltas) == {("r", 0): (OUTPUT[:3], "length", None)}
    core.abort(["r", sequence_id("r", 0)])
    ask(core, "next", max_tokens=3)
    assert answers(run(core)) == {("next", 0): (OUTPUT[:3], "length", None)}
