"""A replay of chats on KV tiers beside the same pool without them: prompt tokens computed, and whether answers agree.

  hatch run bench tiers                                  50 sessions of 8 turns on the demo model, about 20 minutes
  hatch run bench tiers --sessions 6 --turns 4           a smaller one
  hatch run bench tiers --json benchmarks/results/tiers.json --plot tiers.png

User turns and replies have 64 tokens each. Sessions take turns, so that each one's blocks have left the device pool,
which holds four sessions, before its next turn comes. The RAM tier holds a tenth of all KV, the disk tier all of it.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lamella.engine as lamella
from lamella.engine.cli.report import Report, Row, merge_rows, plot_bars

TURN_LEN = 64
RESIDENT_SESSIONS = 4


class Replay(NamedTuple):
    """What one run did."""

    answers: list[list[int]]
    """Of each turn of each session, in the order of the replay."""
    prompt_tokens: int
    """Run through the model."""
    seconds: float
    tiers: dict[str, Any]


def main() -> int:
    """Run both and print the table; exit code 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--sessions", type=int, default=50)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--folder", help="where the disk tier's folder is made (default: the system's temporary one)")
    parser.add_argument("--json", metavar="FILE", help="write the rows; rows of other benches are kept")
    parser.add_argument("--plot", metavar="FILE")
    args = parser.parse_args()
    session_len = args.turns * 2 * TURN_LEN
    token_bytes = bytes_per_token(args)
    pool = token_bytes * (RESIDENT_SESSIONS * session_len + 512)
    whole = token_bytes * args.sessions * session_len
    without = replay(args, pool, session_len, [])
    folder = Path(tempfile.mkdtemp(prefix="lamella-tiers-", dir=args.folder))
    try:
        tiers = [f"ram={whole // 10},disk={folder}:{2 * whole}"]
        with_tiers = replay(args, pool, session_len, tiers)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    rows = rows_of(without, with_tiers, args)
    report = Report.of(rows)
    print(report.table())
    if args.json:
        merge_rows(args.json, report).write(args.json)
    if args.plot:
        plot_bars(args.plot, f"{args.sessions} sessions of {args.turns} turns", rows)
    return 0 if all(row.ok is not False for row in rows) else 1


def bytes_per_token(args: argparse.Namespace) -> int:
    """Of KV in all groups."""
    with lamella.LLM(args.model, threads=args.threads, dtype=args.dtype, max_model_len=512, max_num_seqs=1) as llm:
        table = llm.info.report["KV groups"]
    columns = table[0]
    return sum(
        int(row[columns.index("bytes per block")]) // int(row[columns.index("tokens per block")]) for row in table[1:]
    )


def replay(args: argparse.Namespace, pool: int, session_len: int, tiers: Sequence[str]) -> Replay:
    """All turns of all sessions, session after session within a turn."""
    rng = random.Random(0)
    params = lamella.SamplingParams(temperature=0.0, max_tokens=TURN_LEN, ignore_eos=True, detokenize=False)
    with lamella.LLM(
        args.model,
        threads=args.threads,
        dtype=args.dtype,
        kv_cache_memory=pool,
        max_model_len=session_len,
        max_num_seqs=RESIDENT_SESSIONS,
        kv_tier=list(tiers),
    ) as llm:
        vocab_size = llm.info.vocab_size
        chats: list[list[int]] = [[] for _ in range(args.sessions)]
        answers: list[list[int]] = []
        started = time.perf_counter()
        for _ in range(args.turns):
            for chat in chats:
                chat += [rng.randrange(vocab_size // 2, vocab_size) for _ in range(TURN_LEN)]
            outputs = llm.generate([{"prompt_token_ids": chat} for chat in chats], params)
            for chat, output in zip(chats, outputs):
                answer = list(output.outputs[0].token_ids)
                chat += answer
                answers.append(answer)
        seconds = time.perf_counter() - started
        stats = llm.stats()
    return Replay(answers, stats.computed_prompt_tokens, seconds, dict(stats.tiers))


def rows_of(without: Replay, with_tiers: Replay, args: argparse.Namespace) -> list[Row]:
    """Ratios to the pool alone."""
    where = f"{args.sessions} sessions x {args.turns} turns"
    fewer = without.prompt_tokens / with_tiers.prompt_tokens
    differing = sum(a != b for a, b in zip(without.answers, with_tiers.answers))
    rows = [
        Row(
            name=f"prompt tokens computed, {where}",
            value=with_tiers.prompt_tokens,
            unit="tokens",
            peer="prefix cache alone",
            ratio=fewer,
            target=">= 5 x fewer" if args.turns >= 8 else None,
            ok=fewer >= 5 if args.turns >= 8 else None,
        ),
        Row(name=f"answers that differ, {where}", value=differing, unit="", target="0", ok=differing == 0),
        Row(
            name=f"time, {where}",
            value=with_tiers.seconds,
            unit="s",
            peer="prefix cache alone",
            ratio=without.seconds / with_tiers.seconds,
        ),
    ]
    for tier, figures in with_tiers.tiers.items():
        rows += [
            Row(name=f"{tier}: tokens hit, {where}", value=figures.hit_tokens, unit="tokens"),
            Row(
                name=f"{tier}: seconds saved - spent, {where}",
                value=figures.seconds_saved - figures.seconds_spent,
                unit="s",
            ),
        ]
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
