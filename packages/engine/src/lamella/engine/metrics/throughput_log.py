"""Every few seconds, while there is something to tell, a line on throughput, and one on drafts if there are any."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec

from lamella.engine.wire import Stats
from lamella.specdec import AcceptanceStats

log = logging.getLogger("lamella.stats")


async def run(stats: Callable[[], Stats], interval_s: float, rule: str = "standard") -> None:
    """Log until cancelled. An interval in which nothing ran, after one in which nothing ran, is passed over.

    rule: by which drafts are kept.
    """
    before, since, quiet = msgspec.structs.replace(stats()), time.monotonic(), True
    while True:
        await asyncio.sleep(interval_s)
        now, after = time.monotonic(), msgspec.structs.replace(stats())
        idle = after.steps == before.steps and not after.num_running and not after.num_waiting
        if not (idle and quiet):
            log.info(line(before, after, now - since))
            drafts = acceptance(after).since(acceptance(before))
            if drafts.num_drafts:
                log.info(drafts.log_line(now - since))
            if after.spec_lens and after.spec_lens != before.spec_lens:
                log.info(control_line(before, after, rule))
        before, since, quiet = after, now, idle


def line(before: Stats, after: Stats, seconds: float) -> str:
    """What happened between two states."""
    queries = after.prefix_queries - before.prefix_queries
    hits = after.prefix_hits - before.prefix_hits
    parts = (
        f"prompt {(after.computed_prompt_tokens - before.computed_prompt_tokens) / seconds:.1f} tokens/s",
        f"generation {(after.generation_tokens - before.generation_tokens) / seconds:.1f} tokens/s",
        f"running {after.num_running}",
        f"waiting {after.num_waiting}",
        f"KV cache {100 * after.kv_usage:.1f} %",
        f"prefix hits {100 * hits / queries if queries else 0:.1f} %",
    )
    return ", ".join(parts)


def control_line(before: Stats, after: Stats, rule: str = "standard") -> str:
    """What was decided about drafts between two states, and what they took."""
    earlier = before.spec_lens + [0] * (len(after.spec_lens) - len(before.spec_lens))
    lens = [now - then for now, then in zip(after.spec_lens, earlier)]
    off = {reason: count - before.spec_off.get(reason, 0) for reason, count in after.spec_off.items()}
    rows = sum(lens)
    parts = [
        f"Mean length: {sum(n * count for n, count in enumerate(lens)) / rows if rows else 0.0:.2f}",
        f"Unverified: {after.spec_unverified_tokens - before.spec_unverified_tokens} tokens",
        f"Draft time: {after.spec_draft_seconds - before.spec_draft_seconds:.3f} s",
        f"Verify time: {after.spec_verify_seconds - before.spec_verify_seconds:.3f} s",
    ]
    shares = [f"{reason} {100 * count / rows:.0f} %" for reason, count in sorted(off.items()) if count and rows]
    if shares:
        parts.append(f"Without drafts: {', '.join(shares)}")
    if rule != "standard":
        parts.append(f"Rule: {rule} (the output is not the model's own)")
    return "SpecDecoding control: " + ", ".join(parts)


def acceptance(stats: Stats) -> AcceptanceStats:
    """What the core says of drafts, in the words of who counts them."""
    return AcceptanceStats(
        stats.spec_drafts, stats.spec_draft_tokens, stats.spec_accepted_tokens, stats.spec_accepted_per_pos
    )
