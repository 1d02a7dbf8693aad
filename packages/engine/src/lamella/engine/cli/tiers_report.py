"""What the tiers of a running server hold, give and cost.

  lamella tiers report --base-url http://127.0.0.1:8000 --plot tiers.png

The figure that counts is the last one: seconds of prefill that a tier saved, less the seconds that requests and steps
waited for it. Below zero, the tier costs more than it gives: prompts are too short for it, or it is too slow.
"""

from __future__ import annotations

import argparse

from lamella.engine.cli.bench import plot_file
from lamella.engine.cli.metrics_page import MetricsPage
from lamella.engine.cli.report import Report, Row, plot_columns
from lamella.engine.config.flags import output_file
from lamella.engine.errors import StartError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", metavar="URL", help="where the server listens")
    parser.add_argument("--api-key", metavar="KEY", help="key to send")
    parser.add_argument("--json", type=output_file(), metavar="FILE", help="write the rows as JSON")
    parser.add_argument("--plot", type=plot_file, metavar="FILE", help="draw into a .png, .svg, .pdf or .html file")


def run(args: argparse.Namespace) -> int:
    page = MetricsPage.fetch(args.base_url, args.api_key)
    tiers = list(page.labelled("kv_tier_num_blocks", "tier"))
    if not tiers:
        raise StartError(f"the server at {args.base_url} has no tier but the device: start it with --kv-tier ram=4GiB")
    rows = [row for tier in tiers for row in tier_rows(page, tier)]
    rows += restore_rows(page)
    report = Report.of(rows)
    print(report.table())
    for tier in tiers:
        print(verdict(page, tier))
    if args.json:
        report.write(args.json)
    if args.plot:
        seconds = {
            "saved": [page.value("kv_tier_seconds_saved_total", tier=tier) for tier in tiers],
            "spent": [page.value("kv_tier_seconds_spent_total", tier=tier) for tier in tiers],
        }
        plot_columns(args.plot, "Seconds of prefill saved, seconds waited", tiers, seconds, y_label="s")
    return 0


def tier_rows(page: MetricsPage, tier: str) -> list[Row]:
    """Everything that is counted of one tier."""

    def value(name: str) -> float:
        return page.value(f"kv_tier_{name}", tier=tier)

    queried, hit = value("queried_tokens_total"), value("hit_tokens_total")
    capacity, num_blocks = value("capacity"), value("num_blocks")
    loads, load_s = value("loads_total"), value("load_seconds_total")
    rows = [
        Row(name=f"{tier}: blocks held", value=num_blocks, unit="blocks"),
        Row(name=f"{tier}: lookups", value=value("lookups_total"), unit="prompts"),
        Row(name=f"{tier}: tokens hit", value=hit, unit="tokens"),
        Row(name=f"{tier}: partial hits", value=value("partial_hits_total"), unit="prompts"),
        Row(name=f"{tier}: written", value=value("bytes_in_total") / 2**20, unit="MiB"),
        Row(name=f"{tier}: read", value=value("bytes_out_total") / 2**20, unit="MiB"),
        Row(name=f"{tier}: queue", value=value("queue_depth"), unit="copies"),
        Row(name=f"{tier}: evicted", value=value("evictions_total"), unit="blocks"),
    ]
    if capacity:
        rows.insert(1, Row(name=f"{tier}: full", value=100 * num_blocks / capacity, unit="%"))
    if queried:
        rows.insert(3, Row(name=f"{tier}: hit rate", value=100 * hit / queried, unit="% of tokens"))
    if loads:
        rows.append(Row(name=f"{tier}: a block's load", value=load_s / loads * 1e3, unit="ms"))
    for name, label in (("refused", "reason"), ("failures", "kind")):
        for reason, count in page.labelled(f"kv_tier_{name}_total", label, tier=tier).items():
            rows.append(Row(name=f"{tier}: {name}, {reason}", value=count, unit="blocks"))
    saved, spent = value("seconds_saved_total"), value("seconds_spent_total")
    rows += [
        Row(name=f"{tier}: prefill saved", value=value("prefill_tokens_saved_total"), unit="tokens"),
        Row(name=f"{tier}: seconds saved", value=saved, unit="s"),
        Row(name=f"{tier}: seconds spent", value=spent, unit="s"),
        Row(name=f"{tier}: saved - spent", value=saved - spent, unit="s"),
    ]
    return rows


def restore_rows(page: MetricsPage) -> list[Row]:
    """How long requests waited for what a tier gave them."""
    rows = []
    for label, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
        quantile = page.quantile("kv_restore_seconds", share)
        if quantile is not None:
            rows.append(Row(name=f"restore {label}", value=quantile * 1e3, unit="ms"))
    rows.append(Row(name="late loads", value=page.value("kv_late_loads_total"), unit="prompts"))
    return rows


def verdict(page: MetricsPage, tier: str) -> str:
    """Whether the tier pays, in a sentence."""
    saved = page.value("kv_tier_seconds_saved_total", tier=tier)
    spent = page.value("kv_tier_seconds_spent_total", tier=tier)
    if not saved and not spent:
        return f"{tier}: nothing was loaded from it yet"
    if saved >= spent:
        return f"{tier}: pays; it saved {saved:.1f} s of prefill for {spent:.1f} s of waiting"
    return f"{tier}: does not pay so far; it saved {saved:.1f} s of prefill, but was waited for {spent:.1f} s"
