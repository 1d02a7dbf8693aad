"""What choosing the tokens of a step costs: 64 rows, whole vocabularies, everything from logits to ids.

    python packages/runner-v2/bench/sampling.py [--threads 2] [--rows 64] [--vocab 49152,151936] [--json FILE]

Two kinds of logits: "peaked" as a language model gives them (some hundred likely tokens over a wide tail), and "flat"
(normal, so that a nucleus holds thousands of tokens). The best of several rounds counts: other work on the machine only
ever slows one. The peer is torch on the same threads: argmax, and sort + softmax + cumsum + multinomial.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from lamella.runner_v2.sampling.host import pick_kernels
from lamella.runner_v2.sampling.params import RowParams
from lamella.runner_v2.sampling.rows import LogitsRows
from lamella.runner_v2.sampling.sampler import Sampler

try:
    from lamella.runner_v2 import _C
except ImportError:  # built without a compiler: the torch reference is measured
    _C = None

PROMPT_LEN = 512

CASES: list[tuple[str, RowParams, float | None]] = [
    ("greedy", RowParams(0.0), 1.0),
    ("temperature", RowParams(0.8), None),
    ("temperature, top-k 50", RowParams(0.8, top_k=50), 5.0),
    ("temperature, top-k 50, top-p 0.9", RowParams(0.8, top_k=50, top_p=0.9), 5.0),
    ("temperature, top-p 0.9", RowParams(0.8, top_p=0.9), 5.0),
    ("temperature, min-p 0.05", RowParams(0.8, min_p=0.05), 5.0),
    ("greedy, all penalties", RowParams(0.0, 0, 1.0, 0.0, 1.1, 0.2, 0.1), None),
    ("greedy, 5 logprobs", RowParams(0.0, num_logprobs=5), None),
]
"""Name, parameters of every row, milliseconds allowed for 64 rows of 49,152 tokens."""
TARGET_ROWS, TARGET_VOCAB = 64, 49_152


def logits_of(kind: str, num_rows: int, vocab_size: int) -> torch.Tensor:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((num_rows, vocab_size), dtype=np.float32)
    if kind == "peaked":
        x = x * 2.0 - 3.0
        likely = rng.integers(0, vocab_size, (num_rows, 200))
        np.put_along_axis(x, likely, rng.exponential(3.0, likely.shape).astype(np.float32) + 1.0, axis=1)
    return torch.from_numpy(x)


def best_ms(work: Callable[[], object], prepare: Callable[[], object], rounds: int) -> float:
    best = float("inf")
    for _ in range(rounds + 1):  # the first is a warm-up, and never the best
        prepare()
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return 1e3 * best


def measure(params: RowParams, logits: torch.Tensor, rounds: int) -> float:
    """Milliseconds of Sampler.sample and advance."""
    num_rows, vocab_size = logits.shape
    sampler = Sampler(vocab_size, num_rows, "cpu")
    rng = np.random.default_rng(1)
    for row in range(num_rows):
        sampler.add(row, params, rng.integers(0, vocab_size, PROMPT_LEN).tolist(), [])
    rows, ones = list(range(num_rows)), [1] * num_rows
    layout = LogitsRows.of(rows, [PROMPT_LEN] * num_rows)
    scratch = logits.clone()

    def step() -> None:
        sampler.advance(rows, ones, sampler.sample(scratch, layout).ids.tolist())

    return best_ms(step, lambda: scratch.copy_(logits), rounds)


def measure_peer(params: RowParams, logits: torch.Tensor, rounds: int) -> tuple[str, float] | None:
    """The same in plain torch."""
    if params == RowParams(0.0):
        return "torch.argmax", best_ms(lambda: logits.argmax(dim=-1), lambda: None, rounds)
    if (params.top_k == 0 and params.top_p == 1.0) or params.min_p > 0.0:
        return None

    def sort() -> None:
        values, ids = (logits / params.temperature).sort(dim=-1, descending=True)
        if params.top_k:
            values[:, params.top_k :] = -torch.inf
        p = values.softmax(dim=-1)
        p = p.masked_fill(p.cumsum(dim=-1) - p >= params.top_p, 0.0)
        ids.gather(1, p.multinomial(1))

    return "torch sort", best_ms(sort, lambda: None, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, default=TARGET_ROWS)
    parser.add_argument("--vocab", default="49152,151936", help="sizes of vocabularies, separated by commas")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", metavar="FILE", help="write the rows there; - is standard output")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    kernels = pick_kernels("cpu").name
    if _C is not None:
        _C.set_num_threads(args.threads)
    table = sys.stderr if args.json == "-" else sys.stdout
    print(f"{args.rows} rows, {args.threads} threads, kernels: {kernels}", file=table)
    rows: list[dict[str, object]] = []
    for vocab_size in map(int, args.vocab.split(",")):
        for kind in ("peaked", "flat"):
            logits = logits_of(kind, args.rows, vocab_size)
            for name, params, allowed_ms in CASES:
                value = measure(params, logits, args.rounds)
                # flat logits are no model's: they show the worst case
                counts = (vocab_size, args.rows, kind) == (TARGET_VOCAB, TARGET_ROWS, "peaked")
                peer = measure_peer(params, logits, args.rounds) if vocab_size == TARGET_VOCAB else None
                row = {
                    "name": f"sampling, {name}, {args.rows} x {vocab_size} {kind}",
                    "value": round(value, 3),
                    "unit": "ms/step",
                    "peer": peer[0] if peer else None,
                    "ratio": round(peer[1] / value, 2) if peer else None,
                    "target": f"<= {allowed_ms:g} ms" if counts and allowed_ms else None,
                    "ok": value <= allowed_ms if counts and allowed_ms else None,
                }
                rows.append(row)
                beside = f"{row['peer']} {peer[1]:.1f} ms, {row['ratio']} x" if peer else ""
                verdict = {True: "ok", False: "MISSED", None: ""}[row["ok"]]  # type: ignore[index]
                print(f"{row['name']:70} {value:8.2f} ms   {row['target'] or '':10} {verdict:7} {beside}", file=table)
    if args.json:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
        report = {
            "machine": f"{platform.machine()} {platform.system()}",
            "commit": commit.stdout.strip(),
            "date": datetime.date.today().isoformat(),
            "rows": rows,
        }
        text = json.dumps(report, indent=1)
        if args.json == "-":
            print(text)
        else:
            with open(args.json, "w") as file:
                file.write(text + "\n")


if __name__ == "__main__":
    main()
