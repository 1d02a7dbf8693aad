"""The counters in Prometheus' text format. Names are those that dashboards for vLLM use, with the prefix `lamella:`
instead of `vllm:`. Labels: model_name, engine (always 0 so far).

    gauges      num_requests_running, num_requests_waiting        sequences that run, that wait
                kv_cache_usage_perc                               0 … 1
                spec_decode_config_info                           1; the labels say methods, rule, most drafts
                cache_config_info                                 1; the labels say block size, blocks, tokens
    counters    prompt_tokens, generation_tokens              of prompts that are done, cached tokens included; told
                prompt_tokens_computed                            run through the model; again after a preemption
                prompt_tokens_cached,
                prefix_cache_queries, prefix_cache_hits           in tokens
                num_preemptions, engine_steps, engine_step_seconds, engine_schedule_seconds
                spec_decode_num_drafts, spec_decode_num_draft_tokens, spec_decode_num_accepted_tokens,
                spec_decode_num_accepted_tokens_per_pos{position}
                spec_decode_num_unverified_draft_tokens           drafts made that no step checked
                spec_decode_draft_seconds, spec_decode_verify_seconds
                                                                  of engine_step_seconds: drafting; steps that checked
                                                                  drafts, without their drafting
                spec_decode_off{reason}                           decoding rows, summed over steps, without a draft:
                                                                  request, logprobs, last_token, nothing_found,
                                                                  not_paying, measuring, token_budget
                spec_decode_method_draft_tokens{method}, spec_decode_method_accepted_tokens{method}
                request_success{finished_reason}                  sequences by the way they ended
                admission_rejections                              requests answered with 503
    histograms  time_to_first_token_seconds                       arrival at the server to the first token
                inter_token_latency_seconds                       gap between the tokens of a sequence
                request_time_per_output_token_seconds             (last − first token) / (tokens − 1), per sequence
                e2e_request_latency_seconds, request_queue_time_seconds, request_prefill_time_seconds,
                request_decode_time_seconds, request_inference_time_seconds
                request_prompt_tokens, request_generation_tokens, request_params_n, request_params_max_tokens
                iteration_tokens_total                            tokens that a step computed, drafts included
                spec_decode_draft_length                          drafts that a decoding row checked in a step
    tiers       kv_tier_*{tier}                               one family per field of wire.TierFigures; only with tiers
                kv_restore_seconds                                time that a request waited for what a tier gave it
                kv_late_loads, prompt_tokens_restored
    HTTP        http_requests{handler, method, status}, http_request_duration_seconds{handler}
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from lamella.engine.metrics.counters import DRAFT_LENGTHS, Histogram, ServerCounters
from lamella.engine.wire import CoreInfo, SpecInfo, Stats

PREFIX = "lamella:"
LABELS = ("model_name", "engine")

TIER_GAUGES = {
    "num_blocks": "Blocks that a tier of the KV cache holds",
    "capacity": "Blocks that it can hold; 0: not known",
    "queue_depth": "Copies to and from it that have not ended",
}
TIER_COUNTERS = {
    "lookups": "Prompts looked up in it",
    "queried_tokens": "Prompt tokens looked up in it",
    "hit_tokens": "Prompt tokens found in it and in no faster tier",
    "partial_hits": "Lookups of which less was brought than found",
    "bytes_in": "Bytes written to it",
    "bytes_out": "Bytes read from it",
    "evictions": "Blocks evicted from it",
    "loads": "Blocks loaded from it",
    "load_seconds": "Time of these copies",
    "prefill_tokens_saved": "Prompt tokens that it gave",
    "seconds_saved": "Prefill time that they would have taken",
    "seconds_spent": "Time that requests and steps waited for it",
}
TIER_REASONS = (
    ("refused", "reason", "Blocks that it did not take in"),
    ("failures", "kind", "Copies that failed"),
)


class Exporter:
    """Answers a scrape."""

    def __init__(self, counters: ServerCounters, info: CoreInfo, model_name: str) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_EngineCollector(counters, info, model_name))
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)

    def render(self, accept: str) -> tuple[bytes, str]:
        """Body and content type in the format that the Accept header asks for."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


class _EngineCollector:
    """Makes the metric families anew for each scrape."""

    def __init__(self, counters: ServerCounters, info: CoreInfo, model_name: str) -> None:
        self._counters = counters
        self._info = info
        self._values = (model_name, "0")

    def collect(self) -> Iterator[Metric]:
        counters, stats = self._counters, self._counters.stats
        yield self._gauge("num_requests_running", "Sequences in the running batch", stats.num_running)
        yield self._gauge("num_requests_waiting", "Sequences that wait to be scheduled", stats.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", stats.kv_usage)
        yield self._cache_config()
        for name, text, value in (
            ("prompt_tokens", "Tokens of prompts that are done, cached ones included", stats.prompt_tokens),
            ("prompt_tokens_computed", "Prompt tokens computed, without cached ones", stats.computed_prompt_tokens),
            ("generation_tokens", "Tokens generated", stats.generation_tokens),
            ("prompt_tokens_cached", "Prompt tokens that the prefix cache gave", counters.cached_prompt_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", stats.prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache", stats.prefix_hits),
            ("num_preemptions", "Sequences preempted", stats.preemptions),
            ("engine_steps", "Steps executed", stats.steps),
            ("engine_step_seconds", "Time that the runner worked", stats.step_seconds),
            ("engine_schedule_seconds", "Time spent planning and committing", stats.schedule_seconds),
            ("spec_decode_num_drafts", "Drafts checked", stats.spec_drafts),
            ("spec_decode_num_draft_tokens", "Draft tokens checked", stats.spec_draft_tokens),
            ("spec_decode_num_accepted_tokens", "Draft tokens accepted", stats.spec_accepted_tokens),
            ("admission_rejections", "Requests answered with 503", counters.rejected),
        ):
            yield self._counter(name, text, value)
        yield self._by_label(
            "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by position in the draft",
            "position",
            {str(i): count for i, count in enumerate(stats.spec_accepted_per_pos)},
        )
        yield self._by_label("request_success", "Sequences ended, by reason", "finished_reason", counters.finished)
        for name, text, histogram in (
            ("time_to_first_token_seconds", "Arrival to first token", counters.ttft_s),
            ("inter_token_latency_seconds", "Gap between tokens of a sequence", counters.gap_s),
            ("request_time_per_output_token_seconds", "Mean gap of a sequence", counters.per_token_s),
            ("e2e_request_latency_seconds", "Arrival to last token", counters.request_s),
            ("request_queue_time_seconds", "Arrival in the core to first step", counters.queue_s),
            ("request_prefill_time_seconds", "First step to first token", counters.prefill_s),
            ("request_decode_time_seconds", "First to last token", counters.decode_s),
            ("request_inference_time_seconds", "First step to last token", counters.inference_s),
            ("request_prompt_tokens", "Prompt tokens of a request", counters.prompt_tokens),
            ("request_generation_tokens", "Tokens generated for a sequence", counters.generation_tokens),
            ("request_params_n", "Sequences asked for", counters.num_sequences),
            ("request_params_max_tokens", "Most tokens a sequence could get", counters.max_tokens),
            ("iteration_tokens_total", "Tokens that a step computed", counters.step_tokens),
        ):
            family = HistogramMetricFamily(PREFIX + name, text, labels=LABELS)
            _fill(family, self._values, histogram)
            yield family
        if self._info.speculation is not None:
            yield from self._speculation(self._info.speculation, stats)
        if stats.tiers:
            yield from self._tiers(stats)
        yield from self._http()

    def _speculation(self, speculation: SpecInfo, stats: Stats) -> Iterator[Metric]:
        info = GaugeMetricFamily(
            PREFIX + "spec_decode_config_info",
            "How drafts are made and kept; another rule than standard means output that is not the model's own",
            labels=(*LABELS, "method", "rejection_sample_method", "num_speculative_tokens", "adaptive"),
        )
        shown = (",".join(speculation.methods), speculation.rule, str(speculation.max_drafts))
        info.add_metric((*self._values, *shown, str(speculation.adaptive).lower()), 1)
        yield info
        for name, text, value in (
            (
                "spec_decode_num_unverified_draft_tokens",
                "Draft tokens made but not checked",
                stats.spec_unverified_tokens,
            ),
            ("spec_decode_draft_seconds", "Time spent drafting", stats.spec_draft_seconds),
            ("spec_decode_verify_seconds", "Time of steps that checked drafts", stats.spec_verify_seconds),
        ):
            yield self._counter(name, text, value)
        for name, text, label, values in (
            ("spec_decode_off", "Decoding rows of steps without a draft, by reason", "reason", stats.spec_off),
            (
                "spec_decode_method_draft_tokens",
                "Draft tokens checked, by method",
                "method",
                stats.spec_method_draft_tokens,
            ),
            (
                "spec_decode_method_accepted_tokens",
                "Draft tokens accepted, by method",
                "method",
                stats.spec_method_accepted_tokens,
            ),
        ):
            yield self._by_label(name, text, label, values)
        lengths = Histogram(DRAFT_LENGTHS)
        for length, count in enumerate(stats.spec_lens):
            lengths.observe(length, count)
        family = HistogramMetricFamily(
            PREFIX + "spec_decode_draft_length", "Drafts that a decoding row checked in a step", labels=LABELS
        )
        _fill(family, self._values, lengths)
        yield family

    def _tiers(self, stats: Stats) -> Iterator[Metric]:
        for name, text in TIER_GAUGES.items():
            gauge = GaugeMetricFamily(f"{PREFIX}kv_tier_{name}", text, labels=(*LABELS, "tier"))
            for tier, figures in stats.tiers.items():
                gauge.add_metric((*self._values, tier), getattr(figures, name))
            yield gauge
        for name, text in TIER_COUNTERS.items():
            counter = CounterMetricFamily(f"{PREFIX}kv_tier_{name}", text, labels=(*LABELS, "tier"))
            for tier, figures in stats.tiers.items():
                counter.add_metric((*self._values, tier), getattr(figures, name))
            yield counter
        for name, label, text in TIER_REASONS:
            counter = CounterMetricFamily(f"{PREFIX}kv_tier_{name}", text, labels=(*LABELS, "tier", label))
            for tier, figures in stats.tiers.items():
                for reason, count in getattr(figures, name).items():
                    counter.add_metric((*self._values, tier, reason), count)
            yield counter
        counters = self._counters
        yield self._counter("kv_late_loads", "Sequences that went on without a late load", stats.late_loads)
        yield self._counter("prompt_tokens_restored", "Prompt tokens from tiers", counters.restored_prompt_tokens)
        family = HistogramMetricFamily(PREFIX + "kv_restore_seconds", "Wait for what a tier gave", labels=LABELS)
        _fill(family, self._values, counters.restore_s)
        yield family

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(PREFIX + name, text, labels=LABELS)
        family.add_metric(self._values, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(PREFIX + name, text, labels=LABELS)
        family.add_metric(self._values, value)
        return family

    def _by_label(self, name: str, text: str, label: str, values: dict[str, int]) -> CounterMetricFamily:
        family = CounterMetricFamily(PREFIX + name, text, labels=(*LABELS, label))
        for key, value in values.items():
            family.add_metric((*self._values, key), value)
        return family

    def _cache_config(self) -> GaugeMetricFamily:
        info = self._info
        family = GaugeMetricFamily(
            PREFIX + "cache_config_info",
            "Shape of the KV cache",
            labels=(*LABELS, "block_size", "num_blocks", "kv_tokens", "max_model_len", "max_num_seqs"),
        )
        blocks = ",".join(map(str, info.num_blocks))
        values = (info.block_size, blocks, info.kv_tokens, info.max_model_len, info.max_num_seqs)
        family.add_metric((*self._values, *map(str, values)), 1)
        return family

    def _http(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            PREFIX + "http_requests", "HTTP answers", labels=(*LABELS, "handler", "method", "status")
        )
        for (handler, method, status), count in self._counters.http.items():
            requests.add_metric((*self._values, handler, method, str(status)), count)
        yield requests
        seconds = HistogramMetricFamily(
            PREFIX + "http_request_duration_seconds", "Time to the end of the answer", labels=(*LABELS, "handler")
        )
        for handler, histogram in self._counters.http_s.items():
            _fill(seconds, (*self._values, handler), histogram)
        yield seconds


def _fill(family: HistogramMetricFamily, labels: tuple[str, ...], histogram: Histogram) -> None:
    buckets = [("+Inf" if bound == float("inf") else str(bound), count) for bound, count in histogram.cumulative()]
    family.add_metric(labels, buckets, histogram.total)
