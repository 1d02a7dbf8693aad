"""Measures one model on one device: the process that benchmarks/gpu.py starts for the rows of a model.

    python gpu_engine.py SPEC.json

SPEC.json: {"folder", "options", "jobs", "out", "row_limit_s"}. A job is a row's name, kind and shape. To `out` goes one
JSON line before each row and one behind it, so that whoever reads knows what was under way when the process ended.
"""

from __future__ import annotations

import importlib
import itertools
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lamella.engine.compose.build import build_core
from lamella.engine.compose.core_config import CoreConfig
from lamella.engine.config.schema import EngineOptions
from lamella.engine.errors import EngineError
from lamella.engine.request import Delta, Request, SamplingParams

SETTLE_ROUNDS = 4
"""Rounds after the last prompt that are not measured: steps of prompts may still be in flight."""
TRACED_ROUNDS = 12
TTFT_RUNS, PREFILL_RUNS, HIT_RUNS = 9, 3, 5

Row = dict[str, Any]


class Bench:
    """A core with random weights, and what is measured on it. Prompts are random ids that share no prefix."""

    def __init__(self, folder: str, options: dict[str, Any], row_limit_s: float) -> None:
        self.core = build_core(
            CoreConfig(options=EngineOptions(model=folder, **options), model_path=folder, progress=False), print
        )
        self._row_limit_s = row_limit_s
        self._deadline_s = 0.0
        self._numbers = itertools.count()
        self._rng = random.Random(1)
        self._waited_s = 0.0
        executor = self.core._executor
        self._poll: Callable[[float | None], Any] = executor.poll
        executor.poll = self._timed_poll
        self.on_gpu = self.core.info.report["device"]["device"] != "cpu"
        self._kinds: dict[str, Callable[..., Row]] = {
            "decode": self.decode,
            "prefill": self.prefill,
            "ttft": self.ttft,
            "hit": self.hit,
            "mixed": self.mixed,
        }

    def measure(self, job: dict[str, Any]) -> Row:
        """The figures of one row. Leaves no request behind."""
        self._deadline_s = time.monotonic() + self._row_limit_s
        shape = {key: value for key, value in job.items() if key not in ("name", "kind")}
        return self._kinds[job["kind"]](**shape)

    def decode(self, batch: int, context: int, steps: int) -> Row:
        """Milliseconds of a step in which each of `batch` sequences gets a token, over `steps` of them behind prompts
        of `context` tokens. The first sequences have decoded a little while the last prompts were computed."""
        rounds = -(-batch * context // self.core.info.max_num_batched_tokens) + 2 * SETTLE_ROUNDS
        max_tokens = steps + rounds + 2 * TRACED_ROUNDS
        names = {self.submit(self.prompt(context), max_tokens) for _ in range(batch)}
        try:
            waiting = set(names)
            while waiting:
                waiting -= {delta.request_id for delta in self.round() if delta.token_ids}
            for _ in range(SETTLE_ROUNDS):
                self.round()
            before, self._waited_s = self.core.stats(), 0.0
            started, num_tokens = time.perf_counter(), 0
            for _ in range(steps):
                num_tokens += sum(len(delta.token_ids) for delta in self.round())
            elapsed, waited = time.perf_counter() - started, self._waited_s
            after = self.core.stats()
            if num_tokens != batch * steps:
                raise RuntimeError(
                    f"{num_tokens} tokens in {steps} rounds of {batch} sequences: something held them up"
                )
            ms = 1e3 / steps
            row = {
                "value": elapsed * ms,
                "tokens_per_s": num_tokens / elapsed,
                "host_ms": (elapsed - waited) * ms,
                "schedule_ms": (after.schedule_seconds - before.schedule_seconds) * ms,
                "runner_ms": (after.step_seconds - before.step_seconds) * ms,
            }
            if self.on_gpu:
                row.update(self._graph_nodes(batch))
                row.update(self._traced(elapsed / steps))
            return row
        finally:
            self.core.abort(sorted(names))
            self.drain()

    def prefill(self, batch: int, length: int) -> Row:
        """Prompt tokens per second of so many prompts at once, each of which gets one token."""
        runs = []
        for _ in range(1 + PREFILL_RUNS):
            prompts = [self.prompt(length) for _ in range(batch)]
            started = time.perf_counter()
            for prompt in prompts:
                self.submit(prompt, 1)
            self.drain()
            runs.append(batch * length / (time.perf_counter() - started))
        return {"value": statistics.median(runs[1:]), "runs": runs[1:]}

    def ttft(self, length: int) -> Row:
        """Milliseconds from the submission of one prompt to its first token, in an idle engine."""
        runs = [self._first_token_ms(self.prompt(length))[0] for _ in range(2 + TTFT_RUNS)][2:]
        return {"value": statistics.median(runs), "runs": runs}

    def hit(self, length: int) -> Row:
        """The same for a prompt that the prefix cache of the device holds."""
        prompt = self.prompt(length)
        cold_ms, _ = self._first_token_ms(prompt, use_cache=True)
        warm = [self._first_token_ms(prompt, use_cache=True) for _ in range(1 + HIT_RUNS)][1:]
        cached_len = min(delta.cached_len for _, delta in warm)
        if cached_len < length - 2 * self.core.info.block_size:
            raise RuntimeError(f"only {cached_len} of {length} tokens were taken from the cache")
        runs = [ms for ms, _ in warm]
        return {"value": statistics.median(runs), "runs": runs, "cold_ms": cold_ms, "cached_len": cached_len}

    def mixed(self, requests: int, inputs: list[int], outputs: list[int]) -> Row:
        """Output tokens per second of requests that come all at once, with lengths drawn evenly from two ranges."""
        rng = random.Random(1)
        input_lens = [rng.randint(*inputs) for _ in range(requests)]
        output_lens = [rng.randint(*outputs) for _ in range(requests)]
        prompts = [self.prompt(length) for length in input_lens]
        before, self._waited_s = self.core.stats(), 0.0
        started = time.perf_counter()
        for prompt, output_len in zip(prompts, output_lens):
            self.submit(prompt, output_len)
        done = self.drain()
        elapsed, waited = time.perf_counter() - started, self._waited_s
        after = self.core.stats()
        if done != sum(output_lens):
            raise RuntimeError(f"{done} tokens came, {sum(output_lens)} were asked for")
        steps = after.steps - before.steps
        return {
            "value": done / elapsed,
            "elapsed_s": elapsed,
            "tokens_in": sum(input_lens),
            "tokens_out": done,
            "steps": steps,
            "host_ms": (elapsed - waited) / max(1, steps) * 1e3,
            "preemptions": after.preemptions - before.preemptions,
        }

    # ---- requests --------------------------------------------------------------------------------------------------

    def prompt(self, length: int) -> list[int]:
        """Random ids without the lowest ones, which are special."""
        vocab_size = self.core.info.vocab_size
        return self._rng.choices(range(min(256, vocab_size // 2), vocab_size), k=length)

    def submit(self, prompt: list[int], max_tokens: int, *, use_cache: bool = False) -> str:
        """A greedy request that ends by its length; returns its id."""
        name = f"bench-{next(self._numbers)}"
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        self.core.submit(Request(name, prompt, params, max_tokens, [], use_prefix_cache=use_cache))
        return name

    def round(self) -> list[Delta]:
        """One round of the core. RuntimeError if a request failed, TimeoutError behind the row's deadline."""
        if time.monotonic() > self._deadline_s:
            raise TimeoutError(f"the row took more than {self._row_limit_s:.0f} s")
        batch = self.core.run_once()
        deltas = [] if batch is None else batch.deltas
        for delta in deltas:
            if delta.error is not None:
                raise RuntimeError(f"request {delta.request_id} failed: {delta.error}")
        return deltas

    def drain(self) -> int:
        """Run until nothing is left; how many tokens came."""
        count = 0
        while self.core.has_work:
            count += sum(len(delta.token_ids) for delta in self.round())
        return count

    def recover(self) -> None:
        """After a row that failed: end what it left. EngineError if that cannot be done."""
        self._deadline_s = time.monotonic() + self._row_limit_s
        self.core.abort([f"bench-{n}" for n in range(next(self._numbers))])
        self.drain()

    def _first_token_ms(self, prompt: list[int], *, use_cache: bool = False) -> tuple[float, Delta]:
        started = time.perf_counter()
        self.submit(prompt, 1, use_cache=use_cache)
        while True:
            for delta in self.round():
                if delta.token_ids:
                    elapsed_ms = (time.perf_counter() - started) * 1e3
                    self.drain()
                    return elapsed_ms, delta

    # ---- what the device and the host do ---------------------------------------------------------------------------

    def _timed_poll(self, timeout_s: float | None) -> Any:
        started = time.perf_counter()
        try:
            return self._poll(timeout_s)
        finally:
            self._waited_s += time.perf_counter() - started

    def _graph_nodes(self, batch: int) -> Row:
        """Nodes of the two recordings that a step of so many sequences replays, where the driver tells."""
        graphs = self.core._executor._worker.runner._graphs
        parts = [graphs.num_nodes(part) for part in ("logits", "sample")]
        fitting = [size for size in sorted(parts[0]) if size >= batch]
        if not fitting or fitting[0] not in parts[1]:
            return {}
        return {"graph_nodes": sum(part[fitting[0]] for part in parts), "graph_rows": fitting[0]}

    def _traced(self, step_s: float) -> Row:
        """Kernels per step and the share of time in which one runs, by the profiler, which slows the host down: idle
        time between steps is compared with a step that is not watched. Without a profiler: why there is none."""
        torch = importlib.import_module("torch")
        profiler = importlib.import_module("torch.profiler")
        try:
            with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as profile:
                for _ in range(TRACED_ROUNDS):
                    self.round()
                torch.cuda.synchronize()
            events = [
                (event.time_range.start, event.time_range.end, event.name)
                for event in profile.events()
                if event.device_type == torch.autograd.DeviceType.CUDA and not getattr(event, "is_user_annotation", 0)
            ]
        except (RuntimeError, AttributeError, TypeError) as error:
            return {"trace": f"no profiler: {error}"}
        return traced_figures(events, step_s, TRACED_ROUNDS)


def traced_figures(events: list[tuple[float, float, str]], step_s: float, rounds: int) -> Row:
    """events: (start, end, kernel) in microseconds, of about so many steps: those in flight when the trace begins and
    ends blur its borders, but a kernel that runs once per step tells how many there were."""
    if not events:
        return {"trace": "the profiler saw no kernel"}
    counts = Counter(name for _, _, name in events)
    num_steps = min((count for count in counts.values() if count >= rounds - 1), default=rounds)
    spans = sorted((start, end) for start, end, _ in events)
    busy_us = covered(spans)
    return {
        "kernels_per_step": len(spans) / num_steps,
        "gpu_ms": busy_us / num_steps / 1e3,
        "gpu_busy": min(1.0, busy_us / num_steps / 1e6 / step_s),
        "gpu_busy_traced": busy_us / (max(end for _, end in spans) - spans[0][0]),
    }


def covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of spans, which are sorted by their starts: kernels overlap."""
    total, reach = 0.0, float("-inf")
    for start, end in spans:
        total += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return total


@contextmanager
def lines_to(path: Path) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A writer of JSON lines, each of which is on disk when it returns."""
    with path.open("a", encoding="utf-8") as file:

        def write(value: dict[str, Any]) -> None:
            file.write(json.dumps(value) + "\n")
            file.flush()

        yield write


def describe_device() -> str:
    torch = importlib.import_module("torch")
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}"
    return f"CPU, torch {torch.__version__}"


def main(spec_path: str) -> int:
    """All jobs of the spec; exit code 1 if the engine died under them."""
    spec = json.loads(Path(spec_path).read_text())
    with lines_to(Path(spec["out"])) as write:
        write({"started": "engine"})
        started = time.perf_counter()
        bench = Bench(spec["folder"], spec["options"], spec["row_limit_s"])
        write(
            {"engine_s": time.perf_counter() - started, "machine": describe_device(), "report": bench.core.info.report}
        )
        for job in spec["jobs"]:
            write({"started": job["name"]})
            try:
                write({"name": job["name"], **bench.measure(job)})
            except (RuntimeError, TimeoutError, AssertionError, EngineError) as error:
                write({"name": job["name"], "error": f"{type(error).__name__}: {error}"})
                try:
                    bench.recover()
                except Exception as second:  # noqa: BLE001 - whatever it was: the next rows need another engine
                    print(f"the engine is lost: {second!r}", file=sys.stderr)
                    return 1
        bench.core.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
