"""What the n-gram drafter costs: microseconds per new token and per proposal, by context length.

    python packages/specdec/bench/ngram.py [--json FILE] [--contexts N ...]

The peer is the same drafter's Python reference, and, for a proposal, a scan over the whole context in native code
(bytes.rfind), which is what an index saves.
"""

from __future__ import annotations

import argparse
import random
import struct
import time
from collections.abc import Callable

from report import write_report

from lamella.specdec import NgramConfig, NgramDrafter, Rows
from lamella.specdec.drafters.ngram import native
from lamella.specdec.drafters.ngram_index import ReferenceNgramIndex

CONTEXTS = (1_000, 10_000, 100_000)
ROWS = 64
CONFIG = NgramConfig(num_speculative_tokens=5, prompt_lookup_min=1, prompt_lookup_max=5)
STEP_TARGET_US = 200.0
"""64 rows, one new token each: a fifth of the millisecond that a step's host work may take."""


def text(num_tokens: int, seed: int) -> list[int]:
    """Ids with the repetitions of text: half of them copy a run from before."""
    rng = random.Random(seed)
    ids: list[int] = []
    while len(ids) < num_tokens:
        if len(ids) > 50 and rng.random() < 0.2:
            start = rng.randrange(len(ids) - 20)
            ids += ids[start : start + rng.randrange(5, 20)]
        else:
            ids += [min(int(rng.paretovariate(0.8)), 50_000) for _ in range(10)]
    return ids[:num_tokens]


def seconds(run: Callable[[], object], repeat: int) -> float:
    """Median time of one call."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def make(kind: str) -> NgramDrafter:
    if kind == "native":
        return NgramDrafter(CONFIG)
    return NgramDrafter(CONFIG, ReferenceNgramIndex(CONFIG.prompt_lookup_min, CONFIG.prompt_lookup_max, False))


def measure_context(kind: str, num_tokens: int) -> tuple[float, float, float]:
    """(us per prompt token, us per step of ROWS rows with one new token each, us per proposal of one row)."""
    ids = text(num_tokens, seed=1)
    drafter = make(kind)
    start = time.perf_counter()
    drafter.observe(Rows.single(ids))
    per_token = (time.perf_counter() - start) / num_tokens
    # 64 dictionaries over 100,000 ids would take gigabytes; the reference does not depend on the length either
    contexts = [text(num_tokens if kind == "native" else min(num_tokens, 10_000), seed) for seed in range(ROWS)]
    view = Rows(range(ROWS), [0] * ROWS, contexts)
    drafter = make(kind)
    drafter.observe(view)

    def step() -> None:
        for row_ids in contexts:
            row_ids.append(row_ids[len(row_ids) // 2])
        drafter.observe(view)
        drafter.propose(view, CONFIG.num_speculative_tokens)

    per_step = seconds(step, 50)
    per_proposal = seconds(lambda: drafter.propose(view, CONFIG.num_speculative_tokens), 50) / ROWS
    return per_token * 1e6, per_step * 1e6, per_proposal * 1e6


def measure_scan(num_tokens: int) -> float:
    """us for one row's longest match by searching the whole context in native code."""
    packed = struct.pack(f"{num_tokens}i", *text(num_tokens, seed=1))

    def scan() -> int:
        for n in range(CONFIG.prompt_lookup_max, CONFIG.prompt_lookup_min - 1, -1):
            found = packed.rfind(packed[-4 * n :], 0, len(packed) - 4)
            if found >= 0:
                return found
        return -1

    return seconds(scan, 20) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="also write the rows as JSON")
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, metavar="N", help="context lengths")
    args = parser.parse_args()
    if native is None:
        raise SystemExit("lamella.specdec was built without its native module: nothing to measure")
    rows: list[dict[str, object]] = []

    def add(name: str, value: float, peer: str, peer_value: float, target: float | None, ok: bool) -> None:
        ratio = peer_value / value
        rows.append(
            {
                "name": name,
                "value": value,
                "unit": "us",
                "peer": peer,
                "ratio": ratio,
                "target": None if target is None else f"<= {target:g} us",
                "ok": ok,
            }
        )
        print(
            f"{name:42} {value:10.2f} us   {peer} {peer_value:10.2f} us   {ratio:7.1f} x   {'ok' if ok else 'MISSED'}"
        )

    for num_tokens in args.contexts:
        token_us, step_us, propose_us = measure_context("native", num_tokens)
        reference_token_us, reference_step_us, _ = measure_context("reference", num_tokens)
        ok = step_us <= STEP_TARGET_US
        add(f"observe, per prompt token, {num_tokens} ids", token_us, "python", reference_token_us, None, True)
        add(f"step of {ROWS} rows, {num_tokens} ids each", step_us, "python", reference_step_us, STEP_TARGET_US, ok)
        add(f"propose, per row, {num_tokens} ids", propose_us, "scan", measure_scan(num_tokens), None, True)
    if args.json:
        write_report(args.json, rows)


if __name__ == "__main__":
    main()
