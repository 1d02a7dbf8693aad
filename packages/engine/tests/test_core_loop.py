from __future__ import annotations

import threading
import time

import pytest

from lamella.engine.core_loop import CoreCrash, CoreLoop, Inbox
from lamella.engine.request import Request, SamplingParams
from lamella.engine.testing.scripted_core import ScriptedCore
from lamella.engine.wire import (
    Abort,
    Add,
    Batch,
    Call,
    CallResult,
    Dead,
    Ready,
    ToClient,
    parse_sequence_id,
    sequence_id,
)


def add(request_id: str, max_tokens: int, n: int = 1) -> Add:
    return Add(Request(request_id, list(b"say:abcdef"), SamplingParams(n=n, max_tokens=max_tokens), max_tokens, []))


def run(core: ScriptedCore, inbox: Inbox) -> list[ToClient]:
    emitted: list[ToClient] = []
    CoreLoop(core, inbox, emitted.append).run()
    assert core.closed
    return emitted


def test_a_drained_loop_finishes_what_runs_and_refuses_the_rest() -> None:
    core, inbox = ScriptedCore(), Inbox()
    inbox.put(add("a", 3))
    inbox.put(Call(1, "drain"))
    inbox.put(add("late", 3, n=2))
    emitted = run(core, inbox)
    deltas = [delta for message in emitted if isinstance(message, Batch) for delta in message.deltas]
    assert isinstance(emitted[0], Ready)
    assert [(d.index, d.finish_reason, d.error) for d in deltas if d.request_id == "late"] == [
        (0, "abort", "the engine shuts down"),
        (1, "abort", "the engine shuts down"),
    ]
    assert [token_id for d in deltas if d.request_id == "a" for token_id in d.token_ids] == list(b"abc")
    assert deltas[-1].finish_reason == "length"


class MuteCore(ScriptedCore):
    """Has nothing to tell of its first rounds, which take a tenth of a second each by its own clock."""

    num_mute = 6
    now_s = 0.0

    def clock(self) -> float:
        return self.now_s

    def run_once(self) -> Batch:
        self.now_s += 0.1
        batch = super().run_once()
        return batch if self.steps > self.num_mute else None  # type: ignore[return-value]


def test_rounds_that_have_nothing_to_tell_show_that_they_are_made() -> None:
    core, inbox = MuteCore(), Inbox()
    inbox.put(add("a", 8))
    inbox.put(Call(1, "drain"))
    emitted: list[ToClient] = []
    CoreLoop(core, inbox, emitted.append, clock=core.clock).run()
    assert isinstance(emitted[0], Ready)
    deltas = [message.deltas for message in emitted if isinstance(message, Batch)]
    assert deltas[:2] == [[], []], "after rounds 3 and 6"
    assert len(deltas) == 2 + 2
    assert all(deltas[2:])


def test_a_drained_loop_lingers_for_its_client() -> None:
    core, inbox = ScriptedCore(), Inbox()
    emitted: list[ToClient] = []
    thread = threading.Thread(target=CoreLoop(core, inbox, emitted.append, linger_s=20.0).run)
    thread.start()
    inbox.drain()
    inbox.put(add("late", 3))
    inbox.put(Call(1, "ping"))
    deadline = time.monotonic() + 5
    while CallResult(1) not in emitted:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert thread.is_alive()
    inbox.close()
    thread.join(5)
    assert not thread.is_alive()
    assert isinstance(emitted[1], Batch)
    assert emitted[1].deltas[0].error_status == 503


def test_shutdown_ends_before_the_next_step() -> None:
    core, inbox = ScriptedCore(), Inbox()
    inbox.put(add("a", 3))
    inbox.put(Call(7, "shutdown"))
    assert run(core, inbox)[1:] == [CallResult(7)]
    assert core.steps == 0


def test_messages_are_handled_in_order_between_steps() -> None:
    core, inbox = ScriptedCore(), Inbox()
    inbox.put(add("a", 100, n=2))
    inbox.put(Abort([sequence_id("a", 0)]))
    inbox.put(Call(1, "held"))
    inbox.put(Abort(["a"]))
    inbox.put(Call(2, "held"))
    inbox.put(Call(3, "nonsense"))
    inbox.put(Call(4, "ping"))
    inbox.put(Call(5, "drain"))
    answers = [message for message in run(core, inbox) if isinstance(message, CallResult)]
    assert [(a.call_id, a.value, a.error) for a in answers] == [
        (1, 1, None),
        (2, 0, None),
        (3, None, "unknown method 'nonsense'"),
        (4, None, None),
        (5, None, None),
    ]


def test_a_crash_is_told_before_it_is_raised() -> None:
    core, inbox = ScriptedCore(crash_after=2), Inbox()
    inbox.put(add("a", 10))
    emitted: list[ToClient] = []
    with pytest.raises(CoreCrash, match="RuntimeError: the script says crash"):
        CoreLoop(core, inbox, emitted.append).run()
    assert emitted[-1] == Dead("RuntimeError: the script says crash")
    assert core.closed


def test_an_idle_loop_sleeps_until_a_message_comes() -> None:
    core, inbox = ScriptedCore(), Inbox()
    emitted: list[ToClient] = []
    ready, done = threading.Event(), threading.Event()

    def emit(message: ToClient) -> None:
        emitted.append(message)
        ready.set()
        if isinstance(message, Batch) and message.deltas[-1].finish_reason is not None:
            done.set()

    thread = threading.Thread(target=CoreLoop(core, inbox, emit).run)
    thread.start()
    assert ready.wait(5)
    assert core.steps == 0
    inbox.put(add("a", 2))
    assert done.wait(5)
    inbox.close()
    thread.join(5)
    assert not thread.is_alive()
    assert core.steps == 2


def test_sequence_ids_survive_the_way_there_and_back() -> None:
    assert parse_sequence_id(sequence_id("r1f", 12)) == ("r1f", 12)
    assert parse_sequence_id("r1f") == ("r1f", None)
