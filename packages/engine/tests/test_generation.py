from __future__ import annotations

import pytest

from lamella.engine.generation import Generation, Usage
from lamella.engine.request import Delta, Request, SamplingParams
from lamella.engine.testing.byte_tokenizer import byte_tokenizer
from lamella.engine.testing.scripted_core import logprob

TOKENIZER = byte_tokenizer()


def generation(**params: object) -> Generation:
    given = SamplingParams(**params)  # type: ignore[arg-type]
    return Generation(Request("r", list(b"prompt"), given, 10, [257]), TOKENIZER, arrival_s=100.0)


def test_usage_and_times_of_two_sequences() -> None:
    run = generation(n=2)
    run.push(Delta("r", 0, [97], cached_len=4, queued_s=0.5, prefill_s=0.25), 101.0)
    run.push(Delta("r", 1, [97, 98]), 102.0)
    run.push(Delta("r", 0, [98], "length"), 103.0)
    assert run.usage == Usage(6, 4, 4), "the prompt counts once"
    assert not run.finished
    assert run.ttft_s == 1.0
    run.push(Delta("r", 1, [], "abort"), 104.0)
    assert run.finished
    times = run.times[0]
    assert (times.first_s, times.last_s, times.finished_s) == (101.0, 103.0, 103.0)
    assert (times.queued_s, times.prefill_s) == (0.5, 0.25)
    assert run.times[1].last_s == 102.0
    assert [output.finish_reason for output in run.outputs] == ["length", "abort"]


def test_deltas_behind_the_end_are_nothing() -> None:
    run = generation(stop=["b"])
    piece = run.push(Delta("r", 0, list(b"ab")), 1.0)
    assert piece is not None
    assert piece.still_runs
    assert run.push(Delta("r", 0, list(b"cd")), 2.0) is None
    assert run.usage.completion_tokens == 2


def test_a_failed_sequence_tells_why() -> None:
    run = generation()
    run.push(Delta("r", 0, [], "error", error="NaN"), 1.0)
    assert run.errors == ["NaN"]
    assert run.outputs[0].finish_reason == "error"
    assert run.ttft_s is None


def test_prompt_logprobs_are_described_with_their_context() -> None:
    run = Generation(Request("r", list("aé".encode()), SamplingParams(prompt_logprobs=1), 0, []), TOKENIZER, 0.0)
    assert run.prompt_logprobs() is None
    scores = [None, logprob(0xC3, 1), logprob(0xA9, 1)]
    run.push(Delta("r", 0, [], "length", prompt_logprobs=scores), 1.0)
    described = run.prompt_logprobs()
    assert described is not None
    assert described[0] is None
    assert [(p.chosen.text, p.chosen.bytes) for p in described[1:] if p] == [("", b"\xc3"), ("é", b"\xa9")]


def test_usage_adds_up() -> None:
    assert Usage(1, 2, 3).plus(Usage(10, 20, 30)) == Usage(11, 22, 33)
    with pytest.raises(AttributeError):
        Usage().total = 1  # type: ignore[attr-defined]


def test_drafts_behind_a_stop_string_do_not_count() -> None:
    run = generation(stop=["b"])
    run.push(Delta("r", 0, list(b"aaa"), accepted_drafts=2, rejected_drafts=1), 1.0)
    run.push(Delta("r", 0, list(b"abcd"), accepted_drafts=3), 2.0)
    assert run.usage == Usage(6, 5, 0, accepted_drafts=4, rejected_drafts=1)
