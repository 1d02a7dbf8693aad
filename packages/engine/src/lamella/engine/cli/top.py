"""What a running server does at this moment, again and again: requests, tokens, KV cache, tiers.

  lamella top --base-url http://127.0.0.1:8000
  lamella top --count 1                         once, for a script

Rates are those of the last interval.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

from lamella.engine.cli.metrics_page import MetricsPage
from lamella.engine.config.flags import number
from lamella.engine.config.schema import format_size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", metavar="URL", help="where the server listens")
    parser.add_argument("--api-key", metavar="KEY", help="key to send")
    parser.add_argument(
        "--interval", type=number("float", 0.05, 3600), default=2.0, metavar="X", help="seconds (default: 2)"
    )
    parser.add_argument("--count", type=number("int", 1), metavar="N", help="end after so many (default: never)")


def run(args: argparse.Namespace) -> int:
    before: MetricsPage | None = None
    then_s = 0.0
    shown = 0
    while True:
        page, now_s = MetricsPage.fetch(args.base_url, args.api_key), time.monotonic()
        text = render(page, before, now_s - then_s)
        if sys.stdout.isatty():
            print("\x1b[H\x1b[2J" + text, flush=True)
        else:
            print(text + "\n", flush=True)
        shown += 1
        if args.count is not None and shown >= args.count:
            return 0
        before, then_s = page, now_s
        time.sleep(args.interval)


def render(page: MetricsPage, before: MetricsPage | None, seconds: float) -> str:
    """The screen. before: the page of `seconds` ago, for rates; without it totals since start are shown."""

    def rate(name: str, **labels: str) -> str:
        value = page.value(name, **labels)
        if before is None:
            return f"{value:,.0f} in all"
        return f"{(value - before.value(name, **labels)) / seconds:,.1f}/s"

    lines = [
        f"requests    {page.value('num_requests_running'):.0f} running, "
        f"{page.value('num_requests_waiting'):.0f} waiting, {rate('request_success_total')} ended",
        f"tokens      {rate('generation_tokens_total')} generated, {rate('prompt_tokens_computed_total')} of prompts "
        f"computed, {rate('prompt_tokens_cached_total')} cached",
        f"KV cache    {page.value('kv_cache_usage_perc'):.0%} in use, "
        f"{page.value('num_preemptions_total'):.0f} preempted",
        f"first token {_spread(page, 'time_to_first_token_seconds')}",
    ]
    if page.has("spec_decode_config_info"):
        lines += _drafts(page, before, rate)
    tiers = page.labelled("kv_tier_num_blocks", "tier")
    if tiers:
        lines.append(f"restores    {_spread(page, 'kv_restore_seconds')}")
    for tier, num_blocks in tiers.items():
        lines.append(
            f"{tier:11} {num_blocks:,.0f} blocks, {rate('kv_tier_hit_tokens_total', tier=tier)} tokens hit, "
            f"{format_size(page.value('kv_tier_bytes_in_total', tier=tier))} in, "
            f"{format_size(page.value('kv_tier_bytes_out_total', tier=tier))} out, "
            f"{page.value('kv_tier_queue_depth', tier=tier):.0f} queued, "
            f"{page.value('kv_tier_evictions_total', tier=tier):,.0f} evicted, "
            f"{page.value('kv_tier_failures_total', tier=tier):,.0f} failed"
        )
    return "\n".join(lines)


def _drafts(page: MetricsPage, before: MetricsPage | None, rate: Callable[[str], str]) -> list[str]:
    """How speculation fares; shares are of the last interval, or of all without one."""

    def since(name: str) -> float:
        return page.value(name) - (0.0 if before is None else before.value(name))

    drafts, tokens, accepted = (
        since(f"spec_decode_num_{name}_total") for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    draft_s, verify_s = (since(f"spec_decode_{name}_seconds_total") for name in ("draft", "verify"))
    rows = since("spec_decode_draft_length_count")
    off = page.labelled("spec_decode_off_total", "reason")
    if before is not None:
        earlier = before.labelled("spec_decode_off_total", "reason")
        off = {reason: count - earlier.get(reason, 0.0) for reason, count in off.items()}
    reasons = [f"{reason} {count / rows:.0%}" for reason, count in sorted(off.items()) if count and rows]
    config = "spec_decode_config_info"
    (rule,) = page.labelled(config, "rejection_sample_method") or ("",)
    (methods,) = page.labelled(config, "method") or ("",)
    label = methods if rule == "standard" else f"{methods}; rule {rule}: the output is not the model's own"
    return [
        f"drafts      {rate('spec_decode_num_accepted_tokens_total')} accepted of "
        f"{rate('spec_decode_num_draft_tokens_total')} ({accepted / tokens if tokens else 0:.0%}), "
        f"{1 + accepted / drafts if drafts else 1:.2f} tokens a drafting step ({label})",
        f"            {draft_s:.2f} s drafting, {verify_s:.2f} s in steps that verify; without drafts: "
        f"{', '.join(reasons) or 'none'}",
    ]


def _spread(page: MetricsPage, name: str) -> str:
    quantiles = [page.quantile(name, share) for share in (0.5, 0.95, 0.99)]
    if quantiles[0] is None:
        return "none yet"
    return ", ".join(
        f"{label} {q * 1e3:,.0f} ms" for label, q in zip(("p50", "p95", "p99"), quantiles) if q is not None
    )
