"""What planning a step, building its inputs and committing it cost, with a model that costs nothing.

    python packages/engine/bench/scheduler_overhead.py [--json FILE]

64 running sequences, blocks of 16 tokens, prefix caching on: each step 4 of them fill a block (a key is computed, a new
block is taken). The model gives every row the same id, or accepts some of its drafts. Times are per step; the median is
over rounds of 50 steps.

plan            the scheduler's
input building  the runner's rows, tables and BatchBuilder, on the CPU: what comes before the model's forward
commit          with the deltas and the gauges sent with them
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from typing import Any

import numpy as np
import torch

from lamella.engine.cli.report import Report, Row
from lamella.engine.core import kv_tokens, tier_layout
from lamella.engine.request import Request, SamplingParams
from lamella.engine.scheduler.config import SchedulerConfig
from lamella.engine.scheduler.scheduler import Scheduler
from lamella.kvtier import TierManager
from lamella.runner_v2.batch import BatchBuilder, BatchLayout
from lamella.runner_v2.block_tables import BlockTables
from lamella.runner_v2.state import SequenceState
from lamella.runner_v2.step import KvGroup, KvLayout, RankReport, Step, StepOutput, Work

TARGET_MS = 0.5
TARGET_WITH_INPUTS_MS = 1.0
TOKEN = 5
MAX_LEN, MAX_NUM_TOKENS, BLOCK_SIZE = 4096, 8192, 16


class ConstantRunner:
    """Answers each step at once: one id per sampling row, or all drafts but one accepted."""

    def __init__(self) -> None:
        self.known: dict[int, int] = {}
        self.generations: dict[int, int] = {}
        self.work = Work((), (), (), ())

    def step(self, step: Step) -> StepOutput:
        for new in step.added:
            self.known[new.row] = len(new.token_ids) - new.computed_len
            self.generations[new.row] = new.generation
        work = self.work = step.work or self.work
        counts = []
        for row, query_len, verify_len in zip(work.rows, work.query_lens, work.verify_lens):
            left = self.known[row] - query_len
            self.known[row] = left if left > 0 else 0
            counts.append(0 if left > 0 else max(1, verify_len))
        proposes = any(work.propose_lens)
        return StepOutput(
            step_id=step.step_id,
            rows=work.rows,
            generations=tuple(self.generations[row] for row in work.rows),
            num_tokens=counts,
            token_ids=[TOKEN] * sum(counts),
            num_drafts=list(work.propose_lens) if proposes else None,
        )


class RealInputs:
    """A runner's persistent rows, and the inputs of each step, without a model between them."""

    def __init__(self, num_rows: int, num_groups: int, max_num_drafts: int) -> None:
        self.state = SequenceState(num_rows, MAX_LEN, max_num_drafts, "cpu", keep_host_ids=False)
        self.tables = BlockTables(num_groups, num_rows, self.state.width, BLOCK_SIZE, "cpu")
        self.builder = BatchBuilder(self.state, self.tables, MAX_NUM_TOKENS, "cpu")

    @torch.inference_mode()
    def build(self, step: Step) -> BatchLayout:
        """What is measured: from a step to all that forward and sampler read."""
        for row, generation in step.removed:
            self.state.remove(row, generation)
        for new in step.added:
            self.state.add(new)
            self.tables.reset(new.row, new.blocks)
        for blocks in step.new_blocks:
            self.tables.write(blocks.row, blocks.group, blocks.start, blocks.block_ids)
        layout = self.builder.layout(step.work)
        batch = self.builder.build(layout)
        self.builder.logits_rows(layout, batch.drafts)
        return layout

    @torch.inference_mode()
    def advance(self, layout: BatchLayout, output: StepOutput) -> None:
        """The rows after the step, so that the next one finds what it expects."""
        counts = np.array(output.num_tokens, dtype=np.int32)[layout.sampled]
        steps = layout.device_query_lens.clone()
        steps[layout.device_sampled] -= torch.from_numpy(layout.verify_lens[layout.sampled] - (counts - 1)).int()
        self.state.plan_ahead(layout.rows, layout.query_lens)
        ids = torch.full((len(layout.sampled),), TOKEN, dtype=torch.int32)
        self.state.advance(layout.device_rows, steps, layout.device_sampled, ids)
        self.state.commit(layout.rows[layout.sampled], layout.verify_lens[layout.sampled] - (counts - 1))


def make_scheduler(num_sequences: int, windows: tuple[int | None, ...], max_num_drafts: int) -> Scheduler:
    groups = tuple(
        KvGroup(f"g{n}", "full" if w is None else "sliding", BLOCK_SIZE, 1024, (n,), window=w)
        for n, w in enumerate(windows)
    )
    report = RankReport(0, groups, 0, 0, 1000, "none")
    layout = KvLayout(tuple(num_sequences * 300 for _ in groups))
    assert kv_tokens(report, layout) > num_sequences * 2048
    config = SchedulerConfig(
        max_model_len=MAX_LEN,
        max_num_seqs=num_sequences,
        max_num_batched_tokens=MAX_NUM_TOKENS,
        max_chunk_len=MAX_LEN,
        max_num_drafts=max_num_drafts,
    )
    return Scheduler(config, TierManager(tier_layout(report, layout, "")), clock=time.monotonic, draw_seed=lambda: 1)


def measure(num_sequences: int, windows: tuple[int | None, ...], max_num_drafts: int, num_steps: int) -> dict[str, Any]:
    """Milliseconds per step of a steady decode."""
    scheduler = make_scheduler(num_sequences, windows, max_num_drafts)
    runner = ConstantRunner()
    inputs = RealInputs(num_sequences, len(windows), max_num_drafts)
    for n in range(num_sequences):
        prompt = [n + 1] * (40 + n % 16)  # so that blocks fill up in different steps
        params = SamplingParams(max_tokens=3000, temperature=0.0)
        scheduler.add(Request(f"request-{n}", prompt, params, 3000, [2]))
    gc.collect()
    gc.freeze()
    plans: list[float] = []
    builds: list[float] = []
    commits: list[float] = []
    for n in range(num_steps + 50):
        t0 = time.perf_counter()
        step = scheduler.plan()
        t1 = time.perf_counter()
        assert step is not None
        layout = inputs.build(step)
        t2 = time.perf_counter()
        output = runner.step(step)
        inputs.advance(layout, output)
        t3 = time.perf_counter()
        deltas = scheduler.commit(output)
        scheduler.snapshot()
        t4 = time.perf_counter()
        if n >= 50:
            assert len(deltas) == num_sequences
            plans.append(t1 - t0)
            builds.append(t2 - t1)
            commits.append(t4 - t3)
    gc.unfreeze()
    computed = inputs.state.computed_len.tolist()
    assert computed == inputs.state.planned_len.tolist(), "the runner's rows are not where the scheduler thinks"

    def median_ms(times: list[float]) -> float:
        rounds = [statistics.fmean(times[n : n + 50]) for n in range(0, len(times), 50)]
        return 1e3 * statistics.median(rounds)

    return {"plan_ms": median_ms(plans), "build_ms": median_ms(builds), "commit_ms": median_ms(commits)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the rows there")
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args()
    cases: list[tuple[str, int, tuple[int | None, ...], int]] = [
        ("64 sequences", 64, (None,), 0),
        ("64 sequences, full + sliding", 64, (None, 512), 0),
        ("64 sequences, 4 drafts each", 64, (None,), 4),
        ("256 sequences", 256, (None,), 0),
    ]
    rows = []
    for name, num_sequences, windows, drafts in cases:
        result = measure(num_sequences, windows, drafts, options.steps)
        core = result["plan_ms"] + result["commit_ms"]
        whole = core + result["build_ms"]
        bound = (num_sequences, drafts) == (64, 0)
        for what, value, target in (
            ("schedule + commit", core, TARGET_MS),
            ("schedule + commit + input building", whole, TARGET_WITH_INPUTS_MS),
        ):
            rows.append(
                Row(
                    name=f"{what}, {name}",
                    value=round(value, 4),
                    unit="ms/step",
                    target=f"<= {target} ms" if bound else None,
                    ok=value <= target if bound else None,
                )
            )
        print(
            f"{name:32} plan {result['plan_ms']:.3f} ms   input building {result['build_ms']:.3f} ms   "
            f"commit {result['commit_ms']:.3f} ms   sum {whole:.3f} ms"
        )
    if options.json:
        Report.of(rows).write(options.json)


if __name__ == "__main__":
    main()
