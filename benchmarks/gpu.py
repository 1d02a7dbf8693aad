"""The engine on a GPU beside vLLM's figures: decode, prefill, mixed load, time to first token, start-up.

  hatch run bench gpu --json benchmarks/results/h200.json      all rows, at most six minutes
  hatch run bench gpu --only llama,start                       rows whose names hold one of these words
  hatch run bench gpu --tiny                                   every row on the CPU with tiny models: a trial run
  python benchmarks/gpu.py --json out.json                     where the packages' src folders are on PYTHONPATH

Random weights, prompts of token ids. The rows of a model share a process; one that dies is started again for the rest,
and what was measured is in the file by then. The peer is vLLM 0.26 on an H200, and the targets are for that card.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
FOREVER = 1e9


class Job(NamedTuple):
    """A row: what is measured on which model, and what it is compared with."""

    model: str
    kind: str
    shape: dict[str, Any]
    unit: str
    peer: float | None = None
    target: float | None = None
    floor: float | None = None
    """What the card's ceilings allow."""

    @property
    def name(self) -> str:
        return f"{self.model} {_TITLES[self.kind].format(**self.shape)}"

    @property
    def lower_is_better(self) -> bool:
        return self.unit not in ("tokens/s", "GB/s")


_TITLES = {
    "decode": "decode step, batch {batch}, context {context} + {steps}",
    "prefill": "prefill, {batch} x {length}",
    "ttft": "first token, 1 x {length}",
    "hit": "first token, device prefix hit of {length}",
    "mixed": "mixed, {requests} requests",
    "start": "process start to first token",
}


def _decode(model: str, batch: int, peer: float, target: float, floor: float) -> Job:
    return Job(model, "decode", {"batch": batch, "context": 1024, "steps": 128}, "ms", peer, target, floor)


LLAMA, QWEN = "llama-3.1-8b", "qwen3-30b-a3b"
JOBS = (
    _decode(LLAMA, 1, 4.93, 3.8, 3.28),
    _decode(LLAMA, 8, 5.25, 4.1, 3.50),
    _decode(LLAMA, 32, 6.24, 4.9, 4.24),
    _decode(LLAMA, 128, 10.9, 8.4, 7.2),
    _decode(LLAMA, 256, 18.3, 14.8, 12.8),
    Job(LLAMA, "ttft", {"length": 1024}, "ms", 26.0, 22.0, 19.0),
    Job(LLAMA, "hit", {"length": 32768}, "ms", 53.0, 12.0),
    Job(LLAMA, "prefill", {"batch": 8, "length": 4096}, "tokens/s", 40_900, 43_000),
    Job(LLAMA, "mixed", {"requests": 384, "inputs": [64, 2048], "outputs": [32, 512]}, "tokens/s", 5_379, 6_300, 7_700),
    _decode(QWEN, 1, 4.15, 1.9, 1.32),
    _decode(QWEN, 32, 16.1, 13.5, 12.2),
    _decode(QWEN, 256, 26.5, 21.5, 19.0),
    Job(QWEN, "prefill", {"batch": 8, "length": 4096}, "tokens/s", 66_800, 75_000),
    Job(LLAMA, "start", {}, "s", 148.0, 8.0),
)
OPTIONS = {"load_format": "dummy", "max_model_len": 33280, "max_num_seqs": 256, "generation_config": "none"}

TINY_JOBS = tuple(
    job
    for model in ("tiny-llama", "tiny-qwen3-moe")
    for job in (
        Job(model, "decode", {"batch": 1, "context": 24, "steps": 6}, "ms", 1.0, FOREVER),
        Job(model, "decode", {"batch": 3, "context": 24, "steps": 6}, "ms", 1.0, 0.0),
        Job(model, "ttft", {"length": 40}, "ms"),
        Job(model, "hit", {"length": 128}, "ms"),
        Job(model, "prefill", {"batch": 2, "length": 48}, "tokens/s", 1.0, FOREVER),
        Job(model, "mixed", {"requests": 6, "inputs": [8, 32], "outputs": [2, 6]}, "tokens/s", 1.0, 0.0),
        Job(model, "start", {}, "s", 148.0, 8.0),
    )
)
TINY_OPTIONS = {
    "load_format": "dummy",
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "kv_cache_memory": 8 << 20,
    "threads": 1,
    "generation_config": "none",
}


class Limits(NamedTuple):
    """Seconds."""

    end: float
    """time.monotonic() at which nothing goes on."""
    row: float
    """Of one row, and of loading."""

    @property
    def left(self) -> float:
        return self.end - time.monotonic()


class Results:
    """The rows so far, on disk after each. A row of the same name replaces an older one, unless it failed."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.rows: list[dict[str, Any]] = []
        self.machine = "unknown"
        self._commit = commit()
        self._old: dict[str, Any] = {}
        if path is not None and path.exists():
            self._old = json.loads(path.read_text())

    def add(self, job: Job, figures: dict[str, Any]) -> None:
        """Judge and write the figures of a row; those of one that failed hold "error" and no value."""
        row = {**judged(job, figures), "commit": self._commit}
        self.rows.append(row)
        print(f"{row['name']}: {row.get('error') or _shown(row)}", flush=True)
        if self._path is None:
            return
        old = {kept["name"]: kept for kept in self._old.get("rows", [])}
        for new in self.rows:
            if "error" not in new or old.get(new["name"], {}).get("value") is None:
                old[new["name"]] = new
        facts = {"machine": self.machine, "commit": self._commit, "date": datetime.date.today().isoformat()}
        text = json.dumps({**self._old, **facts, "rows": list(old.values())}, indent=1, ensure_ascii=False)
        partial = self._path.with_suffix(".partial")
        partial.write_text(text + "\n")
        partial.replace(self._path)


def judged(job: Job, figures: dict[str, Any]) -> dict[str, Any]:
    """A row as `bench --json` has it: ratio above 1 is faster than the peer."""
    row: dict[str, Any] = {"name": job.name, "unit": job.unit, "peer": job.peer, "target": job.target}
    if job.floor is not None:
        row["floor"] = job.floor
    value = figures.get("value")
    if value is None:
        return {**row, "value": None, "ratio": None, "ok": None if job.target is None else False, **figures}
    ratio = ok = None
    if job.peer is not None:
        ratio = job.peer / value if job.lower_is_better else value / job.peer
    if job.target is not None:
        ok = value <= job.target if job.lower_is_better else value >= job.target
    return {**row, **figures, "ratio": ratio, "ok": ok}


def commit() -> str:
    """LAMELLA_COMMIT where the tree has no history."""
    given = os.environ.get("LAMELLA_COMMIT")
    if given:
        return given
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return asked.stdout.strip()[:12] or "unknown"


def measure_model(
    model: str, jobs: list[Job], options: dict[str, Any], results: Results, limits: Limits, folder: Path
) -> None:
    """Rows of one engine; a process that ends early is followed by another for the rows behind."""
    attempt = 0
    while jobs and limits.left > 0:
        attempt += 1
        out = folder / f"{model}-{attempt}.jsonl"
        spec = folder / f"{model}-{attempt}.json"
        spec.write_text(
            json.dumps(
                {
                    "folder": str(HERE / "configs" / model),
                    "options": options,
                    "jobs": [{"name": job.name, "kind": job.kind, **job.shape} for job in jobs],
                    "out": str(out),
                    "row_limit_s": limits.row,
                }
            )
        )
        out.touch()
        known = {job.name: job for job in jobs}
        log = folder / f"{model}-{attempt}.log"
        under_way, reason = "engine", ""
        for line in follow([sys.executable, str(HERE / "gpu_engine.py"), str(spec)], out, log, limits):
            if "started" in line:
                under_way = line["started"]
            elif "name" in line:
                results.add(known.pop(line.pop("name")), line)
                under_way = ""
            elif "machine" in line:
                results.machine = line["machine"]
                print(f"{model}: engine in {line['engine_s']:.1f} s; {line['report']['device']}", flush=True)
                under_way = ""
            elif "ended" in line:
                reason = line["ended"]
        if reason:
            print("\n".join(log.read_text(errors="replace").splitlines()[-15:]), flush=True)
        if under_way == "engine":  # it would not start again either
            for job in known.values():
                results.add(job, {"error": f"the engine did not start: {reason or last_line(log)}"})
            return
        if under_way in known:
            results.add(known.pop(under_way), {"error": f"the process ended in this row: {reason}"})
        elif known and not reason:
            reason = "the process left rows out"
        jobs = list(known.values())
    for job in jobs:
        results.add(job, {"error": "no time was left"})


def follow(command: list[str], out: Path, log: Path, limits: Limits) -> Iterator[dict[str, Any]]:
    """Run a command; the JSON lines that it writes, as they come, and {"ended": why} if it did not end by itself with
    exit code 0. It is killed when it has been silent for twice a row's time, or the time is over."""
    with log.open("w") as log_file, out.open() as lines:
        process = subprocess.Popen(command, stdout=log_file, stderr=subprocess.STDOUT, env=environment())
        heard = time.monotonic()
        pending = ""
        while True:
            ended = process.poll() is not None
            while line := lines.readline():
                pending += line
                if pending.endswith("\n"):
                    heard = time.monotonic()
                    yield json.loads(pending)
                    pending = ""
            if ended:
                if process.returncode:
                    yield {"ended": f"exit code {process.returncode}"}
                return
            silent = time.monotonic() - heard
            if limits.left <= 0 or silent > 2 * limits.row:
                process.kill()
                process.wait()
                yield {"ended": "the time is over" if limits.left <= 0 else f"silent for {silent:.0f} s"}
                return
            time.sleep(0.1)


def measure_start(job: Job, options: dict[str, Any], results: Results, limits: Limits, folder: Path) -> None:
    """The start-up row: a fresh process with empty caches of compilers, whose files are counted behind it."""
    caches = folder / "caches"
    kinds = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor", "CUDA_CACHE_PATH": "driver"}
    env = {**environment(), **{name: str(caches / kind) for name, kind in kinds.items()}}
    model = HERE / "configs" / job.model
    command = [sys.executable, str(HERE / "gpu_start.py"), str(time.monotonic()), str(model), json.dumps(options)]
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=min(limits.row, max(1.0, limits.left)), check=True
        )
        figures = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired as error:
        figures = {"error": f"no token after {error.timeout:.0f} s"}
    except subprocess.CalledProcessError as error:
        figures = {"error": f"exit code {error.returncode}: {(error.stderr.strip().splitlines() or ['?'])[-1]}"}
    figures["files_compiled"] = sum(path.is_file() for path in caches.rglob("*"))
    results.add(job, figures)


def environment() -> dict[str, str]:
    """Child processes see the packages of this tree first: where they are installed, these are the same."""
    paths = [str(path) for path in sorted((ROOT / "packages").glob("*/src"))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}


def last_line(log: Path) -> str:
    return (log.read_text(errors="replace").strip().splitlines() or ["?"])[-1]


def _shown(row: dict[str, Any]) -> str:
    parts = [f"{row['value']:,.4g} {row['unit']}"]
    if row["target"] is not None:
        parts.append(f"target {row['target']:,.4g}{'' if row['ok'] else ' MISSED'}")
    if row["ratio"] is not None:
        parts.append(f"{row['ratio']:.2f} x vLLM")
    parts += [f"{key} {row[key]:.3g}" for key in ("host_ms", "kernels_per_step", "gpu_busy") if key in row]
    return ", ".join(parts)


def main() -> int:
    """Measure; exit code 1 if a row failed or missed its target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the rows go; rows of other benches are kept")
    parser.add_argument("--only", default="", metavar="WORDS", help="rows whose names hold one of these, by commas")
    parser.add_argument("--device", default="cuda", help="as for `lamella serve` (default: cuda)")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=JSON", help="an engine option, such as "
                        "enforce_eager=true; may be repeated")  # fmt: skip
    parser.add_argument("--limit", type=float, default=360.0, metavar="S", help="seconds in all (default: 360)")
    parser.add_argument("--row-limit", type=float, default=60.0, metavar="S", help="seconds of a row (default: 60)")
    parser.add_argument("--tiny", action="store_true", help="tiny models and shapes on the CPU")
    parser.add_argument("--list", action="store_true", help="print the rows' names and end")
    args = parser.parse_args()
    words = [word for word in args.only.split(",") if word]
    jobs = [job for job in (TINY_JOBS if args.tiny else JOBS) if not words or any(word in job.name for word in words)]
    if args.list:
        print("\n".join(job.name for job in jobs))
        return 0
    options = {**(TINY_OPTIONS if args.tiny else OPTIONS), "device": "cpu" if args.tiny else args.device}
    for name, _, value in (option.partition("=") for option in args.option):
        options[name] = json.loads(value)
    results = Results(args.json)
    limits = Limits(time.monotonic() + args.limit, args.row_limit)
    with tempfile.TemporaryDirectory(prefix="lamella-bench-") as made:
        folder = Path(made)
        for model in dict.fromkeys(job.model for job in jobs):
            mine = [job for job in jobs if job.model == model and job.kind != "start"]
            measure_model(model, mine, options, results, limits, folder)
        for job in jobs:
            if job.kind == "start":
                measure_start(job, options, results, limits, folder)
    missed = [row["name"] for row in results.rows if row["ok"] is False or "error" in row]
    print(f"{len(missed)} of {len(results.rows)} rows miss their target" if missed else "all targets are met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
