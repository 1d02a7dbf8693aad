"""KV tiers below a GPU: copies, time to first token of restored prompts, what running requests feel, start-up.

  hatch run bench gpu_tiers --json benchmarks/results/h200-tiers.json      all parts, under four minutes
  hatch run bench gpu_tiers --only link,restore                            some of them
  hatch run bench gpu_tiers --tiny                                         on the CPU with a tiny model: a trial run
  python benchmarks/gpu_tiers.py --json out.json           where the packages' src folders are on PYTHONPATH

Each part is a process with a time limit of its own; what it measured before it failed is in the file. A row stands
only where the bytes that it is about were right. Random weights, prompts of token ids; targets are for an H200, and the
peer, vLLM 0.26 without CUDA graphs, is only indicative.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from gpu import HERE, OPTIONS, TINY_OPTIONS, Limits, Results, follow, last_line

GIB = 1 << 30


class Figure(NamedTuple):
    """A row: what it is compared with."""

    name: str
    unit: str
    peer: float | None = None
    target: float | None = None
    floor: float | None = None

    @property
    def lower_is_better(self) -> bool:
        return self.unit != "GB/s"


class Part(NamedTuple):
    """A process: what gpu_tiers_parts.py does, with what, for how long."""

    kind: str
    seconds: float
    shape: dict[str, Any]


LLAMA, TINY = str(HERE / "configs" / "llama-3.1-8b"), str(HERE / "configs" / "tiny-llama")
GPU_OPTIONS = {**OPTIONS, "device": "cuda"}
BLOCK_BYTES = 64 * 131072
"""Of 64 tokens of llama-3.1-8b, all layers."""
PARTS = (
    Part(
        "link",
        45,
        {
            "layouts": {
                "llama-3.1-8b": {"layers": 32, "piece": 131072, "sizes": [64 << 20, GIB], "scattered": [False, True]},
                "16 KiB blocks": {"layers": 32, "piece": 16384, "sizes": [GIB], "scattered": [True]},
            },
            "targets": {"16 KiB blocks": 48.0},
        },
    ),
    Part(
        "restore",
        75,
        {
            "folder": LLAMA,
            "options": {**GPU_OPTIONS, "kv_tier": ["ram=20GiB"], "kv_cache_memory": 524 * BLOCK_BYTES},
            "lengths": [
                {"length": 32768, "prompts": 3, "runs": 6, "peer": 167.0, "target": 95.0, "floor": 77.0},
                {"length": 4096, "prompts": 12, "runs": 9, "peer": 52.0, "target": 20.0},
            ],
        },
    ),
    Part(
        "decode",
        70,
        {
            "folder": LLAMA,
            "options": {**GPU_OPTIONS, "kv_tier": ["ram=24GiB"], "kv_cache_memory": 1250 * BLOCK_BYTES},
            "batch": 32,
            "context": 1024,
            "length": 32768,
            "stored": 16384,
            "target": 3.0,
        },
    ),
    Part(
        "start",
        60,
        {"folder": LLAMA, "options": GPU_OPTIONS, "tier": "ram=40GiB", "runs": 2, "target": 0.5},
    ),
)
TINY_TIER = {**TINY_OPTIONS, "device": "cpu", "kv_tier": ["ram=16MiB"], "kv_cache_memory": 96 << 10}
TINY_PARTS = (
    Part(
        "restore",
        60,
        {
            "folder": TINY,
            "options": TINY_TIER,
            "always_loads": True,
            "lengths": [{"length": 200, "prompts": 4, "runs": 3}],
        },
    ),
    Part(
        "decode",
        60,
        {
            "folder": TINY,
            "options": {**TINY_TIER, "kv_cache_memory": 208 << 10},
            "always_loads": True,
            "batch": 2,
            "context": 24,
            "length": 200,
            "stored": 100,
            "prompts": 6,
            "quiet": 5,
            "restores": 3,
            "write_backs": 2,
            "last_rounds": 0,
        },
    ),
    Part("start", 60, {"folder": TINY, "options": {**TINY_OPTIONS, "device": "cpu"}, "tier": "ram=64MiB", "runs": 1}),
)


def run(part: Part, results: Results, limits: Limits, folder: Path) -> None:
    """Measure a part; what it could not is a row with an error."""
    out, spec, log = (folder / f"{part.kind}.{end}" for end in ("jsonl", "json", "log"))
    spec.write_text(json.dumps({"kind": part.kind, "out": str(out), **part.shape}))
    out.touch()
    mine = Limits(min(limits.end, time.monotonic() + part.seconds), part.seconds)
    under_way, done = part.kind, False
    for line in follow([sys.executable, str(HERE / "gpu_tiers_parts.py"), str(spec)], out, log, mine):
        if "row" in line:
            row = line["row"]
            figure = Figure(*(row.pop(name, None) for name in Figure._fields))
            results.add(figure, row)
        elif "machine" in line:
            results.machine = line["machine"]
        elif "says" in line:
            print(f"{part.kind}: {line['says']}", flush=True)
            under_way = line["says"]
        elif "done" in line:
            done = True
        elif "ended" in line and not done:
            print("\n".join(log.read_text(errors="replace").splitlines()[-25:]), flush=True)
            error = f"the process ended ({line['ended']}) after: {under_way}; {last_line(log)}"
            results.add(Figure(f"part {part.kind}", ""), {"error": error})


def main() -> int:
    """Measure; exit code 1 if a row failed or missed its target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the rows go; rows of other benches are kept")
    parser.add_argument("--only", default="", metavar="PARTS", help="link, restore, decode, start: some, by commas")
    parser.add_argument("--limit", type=float, default=235.0, metavar="S", help="seconds in all (default: 235)")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    args = parser.parse_args()
    words = [word for word in args.only.split(",") if word]
    results, limits = Results(args.json), Limits(time.monotonic() + args.limit, args.limit)
    with tempfile.TemporaryDirectory(prefix="lamella-bench-") as made:
        for part in TINY_PARTS if args.tiny else PARTS:
            if words and part.kind not in words:
                continue
            print(f"part {part.kind}, at most {min(part.seconds, limits.left):.0f} s", flush=True)
            started = time.monotonic()
            run(part, results, limits, Path(made))
            print(f"part {part.kind}: {time.monotonic() - started:.1f} s", flush=True)
    missed = [row["name"] for row in results.rows if row["ok"] is False or "error" in row]
    print(f"{len(missed)} of {len(results.rows)} rows miss their target" if missed else "all targets are met")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
