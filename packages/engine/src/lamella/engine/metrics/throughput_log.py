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


async def run(stats: Callable[[], Stats], interval_s: float) -> None:
    """Log until cancelled. An interval in which nothing ran, after one in which nothing ran, is passed over."""
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


def acceptance(stats: Stats) -> AcceptanceStats:
    """What the core says of drafts, in the words of who counts them."""
    return AcceptanceStats(
        stats.spec_drafts, stats.spec_draft_tokens, stats.spec_accepted_tokens, stats.spec_accepted_per_pos
    )
