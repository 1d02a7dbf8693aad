from __future__ import annotations

import asyncio
import time

import pytest

from lamella.engine.generation import Generation
from lamella.engine.metrics import throughput_log
from lamella.engine.metrics.counters import Histogram, ServerCounters, series_125
from lamella.engine.request import Delta, Request, SamplingParams
from lamella.engine.testing.byte_tokenizer import byte_tokenizer
from lamella.engine.wire import Batch, Stats


def test_series() -> None:
    assert series_125(512) == (1, 2, 5, 10, 20, 50, 100, 200, 500)


def test_a_histogram_counts_up_to_each_bound() -> None:
    histogram = Histogram((1, 2, 5))
    for value in (0, 1, 1.5, 5, 9):
        histogram.observe(value)
    histogram.observe(2, times=2)
    assert histogram.cumulative() == [(1, 2), (2, 5), (5, 6), (float("inf"), 7)]
    assert histogram.total == 20.5


def test_steps_are_counted_by_their_tokens() -> None:
    counters = ServerCounters(512)
    counters.on_batch(Batch([], Stats(prompt_tokens=150, computed_tokens=100)))
    counters.on_batch(Batch([], Stats(prompt_tokens=150, generation_tokens=3, computed_tokens=103)))
    counters.on_batch(Batch([]))
    assert counters.step_tokens.total == 103
    assert counters.step_tokens.cumulative()[-1][1] == 2


def test_the_times_of_a_sequence() -> None:
    counters = ServerCounters(512)
    request = Request("r", list(b"prompt"), SamplingParams(n=2), 10, [257])
    generation = Generation(request, byte_tokenizer(), arrival_s=10.0)
    generation.push(Delta("r", 0, [97], cached_len=4, queued_s=0.5, prefill_s=0.25), 11.0)
    generation.push(Delta("r", 0, [97, 98], "length"), 14.0)
    counters.on_end(generation, 0)
    assert counters.finished["length"] == 1
    assert counters.ttft_s.total == 1.0
    assert counters.request_s.total == 4.0
    assert counters.queue_s.total == 0.5
    assert counters.prefill_s.total == 0.25
    assert counters.decode_s.total == 3.0
    assert counters.inference_s.total == 3.25
    assert counters.per_token_s.total == 1.5
    assert counters.generation_tokens.total == 3
    assert counters.num_sequences.total == 0, "the request still runs"
    generation.push(Delta("r", 1, [], "abort"), 15.0)
    counters.on_end(generation, 1)
    assert counters.ttft_s.total == 1.0, "a sequence without a token has no first one"
    assert (counters.num_sequences.total, counters.prompt_tokens.total, counters.cached_prompt_tokens) == (2, 6, 4)


def test_the_line_in_the_log() -> None:
    before = Stats(
        prompt_tokens=120, computed_prompt_tokens=100, generation_tokens=50, prefix_queries=100, prefix_hits=20
    )
    after = Stats(
        prompt_tokens=340,
        computed_prompt_tokens=300,
        generation_tokens=150,
        num_running=3,
        num_waiting=1,
        kv_usage=0.125,
        prefix_queries=300,
        prefix_hits=120,
    )
    assert throughput_log.line(before, after, 10.0) == (
        "prompt 20.0 tokens/s, generation 10.0 tokens/s, running 3, waiting 1, KV cache 12.5 %, prefix hits 50.0 %"
    )


def test_the_log_is_quiet_while_nothing_runs(caplog: pytest.LogCaptureFixture) -> None:
    stats = Stats()

    async def main() -> None:
        task = asyncio.ensure_future(throughput_log.run(lambda: stats, 0.01))
        await asyncio.sleep(0.05)
        assert not caplog.records
        stats.steps, stats.generation_tokens = 5, 7
        deadline = time.monotonic() + 5
        while len(caplog.records) < 2:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        task.cancel()

    with caplog.at_level("INFO", "lamella.stats"):
        asyncio.run(main())
    # no drafts, no line on them; the interval with the tokens, and the first one after it
    assert [record.message.split(",")[1] for record in caplog.records][1:] == [" generation 0.0 tokens/s"]


def test_the_log_tells_of_drafts_where_there_are_any(caplog: pytest.LogCaptureFixture) -> None:
    stats = Stats(spec_accepted_per_pos=[0, 0])

    async def until(num_records: int) -> None:
        deadline = time.monotonic() + 5
        while len(caplog.records) < num_records:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.005)

    async def main() -> None:
        nonlocal stats
        task = asyncio.ensure_future(throughput_log.run(lambda: stats, 0.05))
        await asyncio.sleep(0)
        stats = Stats(steps=1, num_running=1, spec_accepted_per_pos=[0, 0])
        await until(1)
        stats = Stats(
            steps=9,
            num_running=1,
            spec_drafts=4,
            spec_draft_tokens=8,
            spec_accepted_tokens=4,
            spec_accepted_per_pos=[3, 1],
        )
        await until(4)  # the last one is of an interval without drafts again
        task.cancel()

    with caplog.at_level("INFO", "lamella.stats"):
        asyncio.run(main())
    about_drafts = [r.message for r in caplog.records if r.message.startswith("SpecDecoding metrics:")]
    (line,) = about_drafts
    assert "Mean acceptance length: 2.00, " in line
    assert "Accepted: 4 tokens, Drafted: 8 tokens, Per-position acceptance rate: 0.750, 0.250, " in line


@pytest.mark.parametrize("limit", [1, 7, 4096])
def test_length_buckets_end_at_the_context(limit: int) -> None:
    assert max(series_125(limit)) <= limit
