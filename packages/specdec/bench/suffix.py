"""What the suffix drafter costs: nanoseconds per id, microseconds per proposal (medians), bytes per id.

    python packages/specdec/bench/suffix.py [--json FILE] [--context N] [--outputs N] [--output-len N]

The peer is the same drafter's Python reference, on a part of the work: its windows are many times larger.
"""

from __future__ import annotations

import argparse
import random
import time

from report import write_report

from lamella.specdec import Rows, SuffixConfig, SuffixDrafter
from lamella.specdec.drafters.suffix import index_arguments, native
from lamella.specdec.drafters.suffix_index import ReferenceSuffixIndex

ROWS = 64
CONFIG = SuffixConfig(num_speculative_tokens=8, max_cached_tokens=50_000_000)
PROPOSE_TARGET_US = 20.0
NODE_BYTES = 48
"""A node and its places in the table, on average."""
OUTPUT_NODE_BYTES = 52
"""The same where nodes leave, with the number of its lives."""
REFERENCE_SHARE = 50
"""The reference gets one id of so many."""


def text(num_tokens: int, rng: random.Random, phrases: list[list[int]]) -> list[int]:
    """Ids with the repetitions of text: half of them are phrases that others use too."""
    ids: list[int] = []
    while len(ids) < num_tokens:
        if rng.random() < 0.5:
            ids += rng.choice(phrases)
        else:
            ids += [min(int(rng.paretovariate(0.8)), 50_000) for _ in range(10)]
    return ids[:num_tokens]


def phrases_of(rng: random.Random) -> list[list[int]]:
    return [[min(int(rng.paretovariate(0.8)), 50_000) for _ in range(rng.randrange(5, 40))] for _ in range(2000)]


class Measured:
    """One kind of index under a load: `num_outputs` finished outputs, then ROWS rows that decode beside them."""

    def __init__(self, kind: str, context_len: int, num_outputs: int, output_len: int) -> None:
        rng = random.Random(1)
        phrases = phrases_of(rng)
        arguments = index_arguments(CONFIG)
        index = native.SuffixIndex(*arguments) if kind == "native" else ReferenceSuffixIndex(*arguments)
        drafter = SuffixDrafter(CONFIG, index)
        context = text(context_len, rng, phrases)
        start = time.perf_counter()
        drafter.observe(Rows([0], [0], [context]))
        self.prompt_ns = (time.perf_counter() - start) / context_len * 1e9
        self.row_bytes = index.num_nodes * NODE_BYTES / context_len
        drafter.forget([0])

        kept_s = 0.0
        for generation in range(num_outputs):
            ids = [0, *text(output_len, rng, phrases)]
            drafter.observe(Rows([0], [generation], [ids[:1]]))
            drafter.observe(Rows([0], [generation], [ids]))
            start = time.perf_counter()
            drafter.forget([0])
            kept_s += time.perf_counter() - start
        self.keep_ns = kept_s / (num_outputs * output_len) * 1e9
        self.output_bytes = index.num_nodes * OUTPUT_NODE_BYTES / max(1, index.num_cached_tokens)

        rows = [text(500, rng, phrases) for _ in range(ROWS)]
        future = [text(60, rng, phrases) for _ in range(ROWS)]
        view = Rows(range(ROWS), [0] * ROWS, rows)
        drafter.observe(view)
        observed, proposed, afresh = [], [], []
        for step in range(60):
            for row, ids in zip(rows, future):
                row.append(ids[step])
            start = time.perf_counter()
            drafter.observe(view)
            middle = time.perf_counter()
            drafter.propose(view, CONFIG.num_speculative_tokens)
            end = time.perf_counter()
            observed.append(middle - start)
            proposed.append(end - middle)
        self.append_ns = sorted(observed)[30] / ROWS * 1e9
        self.propose_us = sorted(proposed)[30] / ROWS * 1e6
        # a change of the finished outputs makes every row look its end up anew
        for generation in range(20):
            drafter.observe(Rows([999], [generation], [[1]]))
            drafter.observe(Rows([999], [generation], [[1, 2, 3]]))
            drafter.forget([999])
            start = time.perf_counter()
            drafter.propose(view, CONFIG.num_speculative_tokens)
            afresh.append(time.perf_counter() - start)
        self.afresh_us = sorted(afresh)[10] / ROWS * 1e6
        self.slowest_us = max(afresh) / ROWS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="also write the rows as JSON")
    parser.add_argument("--context", type=int, default=100_000, metavar="N", help="ids of the long prompt")
    parser.add_argument("--outputs", type=int, default=10_000, metavar="N", help="finished outputs")
    parser.add_argument("--output-len", type=int, default=200, metavar="N", help="ids of each")
    args = parser.parse_args()
    if native is None:
        raise SystemExit("lamella.specdec was built without its native module: nothing to measure")
    ours = Measured("native", args.context, args.outputs, args.output_len)
    small = max(1, args.outputs // REFERENCE_SHARE)
    peer = Measured("reference", max(1, args.context // REFERENCE_SHARE), small, args.output_len)
    rows: list[dict[str, object]] = []

    def add(name: str, unit: str, value: float, peer_value: float, target: float | None = None) -> None:
        ok = target is None or value <= target
        shown = None if target is None else f"<= {target:g} {unit}"
        row = {"name": name, "value": value, "unit": unit, "peer": "python", "ratio": peer_value / value}
        rows.append({**row, "target": shown, "ok": ok})
        print(f"{name:52} {value:10.2f} {unit:5} python {peer_value:10.2f}   {'ok' if ok else 'MISSED'}")

    held = f"{args.outputs} outputs held"
    add(f"observe, per prompt id of {args.context}", "ns", ours.prompt_ns, peer.prompt_ns)
    add(f"observe, per new id, {ROWS} rows", "ns", ours.append_ns, peer.append_ns)
    add("forget, per id of a kept output", "ns", ours.keep_ns, peer.keep_ns)
    add(f"propose, per row, {held}", "us", ours.propose_us, peer.propose_us, PROPOSE_TARGET_US)
    add(f"propose after an output came, {held}", "us", ours.afresh_us, peer.afresh_us, PROPOSE_TARGET_US)
    slowest = f"the slowest of 20 such proposals, {held}"
    add(slowest, "us", ours.slowest_us, peer.slowest_us, PROPOSE_TARGET_US)
    add("nodes of a row, per id", "bytes", ours.row_bytes, peer.row_bytes)
    add("nodes of finished outputs, per id", "bytes", ours.output_bytes, peer.output_bytes)
    if args.json:
        write_report(args.json, rows)


if __name__ == "__main__":
    main()
