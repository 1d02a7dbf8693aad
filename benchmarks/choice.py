"""Load or recompute: what the engine's choice costs beside the better one, on prompts and stores of many sizes.

  hatch run bench choice                                     50 cases on the demo model, about 5 minutes
  hatch run bench choice --json benchmarks/results/tiers.json

Each store answers at a speed of its own, from well below to well above what computing the same tokens is worth. Every
prompt is timed twice over, once made to load and once made to recompute, until its first token; the engine then chooses
by what it has measured itself. A store's first load, which tells its speed, is not among the cases.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any, ClassVar

import lamella.engine as lamella
from lamella.engine.cli.report import Report, Row, merge_rows
from lamella.kvtier import CostModel, TierManager

STORES = (
    {"bytes_per_s": 4e6, "latency_s": 0.0},
    {"bytes_per_s": 10e6, "latency_s": 0.02},
    {"bytes_per_s": 20e6, "latency_s": 0.0},
    {"bytes_per_s": 40e6, "latency_s": 0.05},
    {"bytes_per_s": 400e6, "latency_s": 0.1},
)
LENGTHS_OF_STORE = 10
BLOCK, SHORTEST, LONGEST = 16, 64, 1536
REPEATS = 3


class SlowStore:
    """An ExternalManager in memory, as slow as it is told to be."""

    blobs: ClassVar[dict[bytes, bytes]] = {}

    def __init__(self, bytes_per_s: float, latency_s: float) -> None:
        self.bytes_per_s, self.latency_s = bytes_per_s, latency_s

    def lookup(self, names: Sequence[bytes]) -> int:
        return next((n for n, name in enumerate(names) if name not in self.blobs), len(names))

    def load(self, items: Sequence[tuple[bytes, memoryview]]) -> list[bool]:
        time.sleep(self.latency_s + sum(len(into) for _, into in items) / self.bytes_per_s)
        for name, into in items:
            into[:] = self.blobs[name]
        return [True] * len(items)

    def store(self, items: Sequence[tuple[bytes, bytes | None, memoryview]]) -> list[bool]:
        self.blobs.update((name, bytes(data)) for name, _, data in items)
        return [True] * len(items)

    def close(self) -> None:
        pass


class Case:
    """One prompt against one store."""

    def __init__(self, store: str, length: int) -> None:
        self.store = store
        self.length = length
        self.load_s: list[float] = []
        self.compute_s: list[float] = []
        self.loads = False
        """What the engine chose."""

    @property
    def ratio(self) -> float:
        load_s, compute_s = median(self.load_s), median(self.compute_s)
        return (load_s if self.loads else compute_s) / min(load_s, compute_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", metavar="FILE", help="write the rows; rows of other benches are kept")
    args = parser.parse_args()
    rng = random.Random(0)
    cases: list[Case] = []
    for options in STORES:
        cases += measure(args, options, rng)
    rows = rows_of(cases)
    report = Report.of(rows)
    print(report.table())
    if args.json:
        merge_rows(args.json, report).write(args.json)
    return 0 if all(row.ok is not False for row in rows) else 1


def measure(args: argparse.Namespace, options: dict[str, float], rng: random.Random) -> list[Case]:
    """Cases of one store."""
    name = f"{options['bytes_per_s'] / 1e6:.0f} MB/s + {options['latency_s'] * 1e3:.0f} ms"
    lengths = [
        int(SHORTEST * (LONGEST / SHORTEST) ** ((n + rng.random()) / LENGTHS_OF_STORE)) // BLOCK * BLOCK
        for n in range(LENGTHS_OF_STORE)
    ]
    cases = [Case(name, length) for length in lengths]
    with lamella.LLM(
        args.model,
        threads=args.threads,
        max_model_len=2048,
        max_num_seqs=1,
        kv_tier=["ram=256MiB", f"external=choice:SlowStore,{json.dumps(options)}"],
    ) as llm:
        prompts = [[rng.randrange(1000, 20_000) for _ in range(length + 8)] for length in (512, *lengths)]
        for prompt in prompts:
            first_token(llm, prompt)
        with choosing(llm, load=True):
            first_token(llm, prompts[0])
        for case, prompt in zip(cases, prompts[1:]):
            for _ in range(REPEATS):
                for load, seconds in ((True, case.load_s), (False, case.compute_s)):
                    with choosing(llm, load=load):
                        seconds.append(first_token(llm, prompt))
            before = loaded(llm)
            first_token(llm, prompt)
            case.loads = loaded(llm) > before
            print(
                f"{name:18} {case.length:5} tokens: load {median(case.load_s):.3f} s, compute "
                f"{median(case.compute_s):.3f} s, {'loads' if case.loads else 'computes'}: {case.ratio:.2f}",
                flush=True,
            )
    return cases


def first_token(llm: lamella.LLM, prompt: list[int]) -> float:
    """Seconds until the first token, with the prefix in the store and nowhere else. All copies have ended after it."""
    forget_near(manager_of(llm))
    params = lamella.SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
    start = time.perf_counter()
    llm.generate({"prompt_token_ids": prompt}, params)
    seconds = time.perf_counter() - start
    while llm._core.has_work:
        llm._core.run_once()
    return seconds


def manager_of(llm: lamella.LLM) -> TierManager:
    return llm._core._manager  # type: ignore[no-any-return]


def forget_near(manager: TierManager) -> None:
    """Nothing can be hit on the device or in the host any more."""
    for group in manager._all:
        manager._shelf.unlist(group, set(group.index))
    assert manager._below is not None
    for host in manager._below.host:
        host.drop_all()


@contextmanager
def choosing(llm: lamella.LLM, load: bool) -> Iterator[None]:
    """Make the engine load, or compute, and wait as long as that takes."""
    loading: Any = llm._core._scheduler.books.loading
    choose, patience = CostModel.choose, loading._patience
    loading._patience = lambda _: 1e9

    def chosen(_self: CostModel, start: int, _length: int, parts: Sequence[Any]) -> int:
        return parts[-1].end if load and parts else start

    CostModel.choose = chosen  # type: ignore[method-assign]
    try:
        yield
    finally:
        CostModel.choose = choose  # type: ignore[method-assign]
        loading._patience = patience


def loaded(llm: lamella.LLM) -> int:
    """Tokens that came from the store so far."""
    return llm.stats().tiers["SlowStore"].hit_tokens


def rows_of(cases: Sequence[Case]) -> list[Row]:
    worst = max(cases, key=lambda case: case.ratio)
    return [
        Row(
            name=f"load or recompute: worst of {len(cases)} cases",
            value=worst.ratio,
            unit="x the better",
            target="<= 1.1 x",
            ok=worst.ratio <= 1.1,
        ),
        Row(
            name="load or recompute: cases within 1.1 x",
            value=sum(case.ratio <= 1.1 for case in cases),
            unit=f"of {len(cases)}",
        ),
        Row(name="load or recompute: cases that load", value=sum(c.loads for c in cases), unit=f"of {len(cases)}"),
    ]


if __name__ == "__main__":
    raise SystemExit(main())
