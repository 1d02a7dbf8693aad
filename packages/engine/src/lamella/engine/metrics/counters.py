"""What the server counts: plain numbers, updated once per step or request, read when somebody asks for /metrics.

No lock and no registry on the way of a token: an observation is a bisection and two additions, on the loop's thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from lamella.engine.generation import Generation
from lamella.engine.wire import Batch, Stats


def series_125(limit: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, … up to limit."""
    bounds, scale = [], 1
    while scale <= limit:
        bounds += [float(scale * step) for step in (1, 2, 5) if scale * step <= limit]
        scale *= 10
    return tuple(bounds)


TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
GAP_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
HTTP_S = (0.001, 0.01, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 300.0)
RESTORE_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
STEP_TOKENS = tuple(float(1 << i) for i in range(15))
DRAFT_LENGTHS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0)
SEQUENCES = (1.0, 2.0, 5.0, 10.0, 20.0)


class Histogram:
    """Counts per bucket, and the sum. A value equal to a bound belongs to that bound's bucket."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> list[tuple[float, int]]:
        """(upper bound, observations up to it), the last bound infinite."""
        result, so_far = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts):
            so_far += count
            result.append((bound, so_far))
        return result


class ServerCounters:
    """Everything that /metrics shows."""

    def __init__(self, max_model_len: int) -> None:
        lengths = series_125(max_model_len)
        self.stats = Stats()
        self._tokens = 0
        """Stats.computed_tokens of the last batch."""
        self.step_tokens = Histogram(STEP_TOKENS)
        self.ttft_s = Histogram(TTFT_S)
        self.gap_s = Histogram(GAP_S)
        self.per_token_s = Histogram(GAP_S)
        self.request_s = Histogram(REQUEST_S)
        self.queue_s = Histogram(REQUEST_S)
        self.prefill_s = Histogram(REQUEST_S)
        self.decode_s = Histogram(REQUEST_S)
        self.inference_s = Histogram(REQUEST_S)
        self.restore_s = Histogram(RESTORE_S)
        self.prompt_tokens = Histogram(lengths)
        self.generation_tokens = Histogram(lengths)
        self.max_tokens = Histogram(lengths)
        self.num_sequences = Histogram(SEQUENCES)
        self.finished: dict[str, int] = dict.fromkeys(("stop", "length", "abort", "error"), 0)
        self.cached_prompt_tokens = 0
        self.restored_prompt_tokens = 0
        self.rejected = 0
        self.http: dict[tuple[str, str, int], int] = {}
        """(handler, method, status) -> answers."""
        self.http_s: dict[str, Histogram] = {}

    def on_batch(self, batch: Batch) -> None:
        """Books of one step: an observer of EngineClient."""
        stats = batch.stats
        if stats is None:
            return
        if stats.computed_tokens > self._tokens:
            self.step_tokens.observe(stats.computed_tokens - self._tokens)
        self._tokens = stats.computed_tokens
        self.stats = stats

    def on_end(self, generation: Generation, index: int) -> None:
        """Books of a sequence that ended; with the last one, those of its request."""
        output, times = generation.outputs[index], generation.times[index]
        assert output.finish_reason is not None
        assert times.finished_s is not None
        self.finished[output.finish_reason] += 1
        self.generation_tokens.observe(output.num_tokens)
        self.max_tokens.observe(generation.request.max_tokens)
        self.request_s.observe(times.finished_s - generation.arrival_s)
        self.queue_s.observe(times.queued_s)
        if times.first_s is not None and times.last_s is not None:
            decode_s = times.last_s - times.first_s
            self.ttft_s.observe(times.first_s - generation.arrival_s)
            self.prefill_s.observe(times.prefill_s)
            self.decode_s.observe(decode_s)
            self.inference_s.observe(times.prefill_s + decode_s)
            if output.num_tokens > 1:
                self.per_token_s.observe(decode_s / (output.num_tokens - 1))
        if generation.finished:
            self.prompt_tokens.observe(len(generation.request.prompt_ids))
            self.num_sequences.observe(len(generation.outputs))
            self.cached_prompt_tokens += generation.cached_len
            if generation.restored_len:
                self.restored_prompt_tokens += generation.restored_len
                self.restore_s.observe(generation.restore_s)

    def on_http(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Books of one HTTP answer."""
        key = (handler, method, status)
        self.http[key] = self.http.get(key, 0) + 1
        if handler not in self.http_s:
            self.http_s[handler] = Histogram(HTTP_S)
        self.http_s[handler].observe(seconds)
