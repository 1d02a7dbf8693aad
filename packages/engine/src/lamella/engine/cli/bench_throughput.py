"""Many requests at once, in process: tokens per second of the whole engine.

lamella bench throughput smollm2 --num-prompts 64 --input-len 128 --output-len 128
"""

from __future__ import annotations

import argparse
import random
import time

import lamella.engine as lamella
from lamella.engine.cli.bench_latency import UNUSED_BY_RANDOM_PROMPTS, random_prompts
from lamella.engine.cli.report import Report, Row, plot_lines
from lamella.engine.config.flags import add_flags, add_model, number, options_from
from lamella.engine.config.schema import EngineOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--num-prompts", type=number("int", 1), default=64, metavar="N", help="requests (default: 64)")
    parser.add_argument(
        "--input-len", type=number("int", 1), default=128, metavar="N", help="prompt tokens (default: 128)"
    )
    parser.add_argument(
        "--output-len", type=number("int", 1), default=128, metavar="N", help="output tokens (default: 128)"
    )
    parser.add_argument(
        "--spread", type=number("float", 0, 1), default=0.0, metavar="X", help="vary both lengths by up to this share"
    )
    add_flags(parser, EngineOptions, skip=UNUSED_BY_RANDOM_PROMPTS)


def run(args: argparse.Namespace) -> int:
    options = options_from(args, EngineOptions, model=args.model)
    rng = random.Random(0)
    with lamella.LLM.from_options(options, progress=True) as llm:
        warm_up = lamella.SamplingParams(temperature=0.0, max_tokens=4)
        llm.generate(random_prompts(rng, 2, 16, llm.info.vocab_size), warm_up)
        prompts, params = [], []
        for _ in range(args.num_prompts):
            scale = 1 + args.spread * rng.uniform(-1, 1)
            prompts += random_prompts(rng, 1, max(1, round(args.input_len * scale)), llm.info.vocab_size)
            params.append(
                lamella.SamplingParams(
                    temperature=0.0, max_tokens=max(1, round(args.output_len * scale)), ignore_eos=True
                )
            )
        times, counts, done = [0.0], [0], 0
        start = time.perf_counter()
        for output in llm.generate_as_finished(prompts, params):
            done += len(output.outputs[0].token_ids)
            times.append(time.perf_counter() - start)
            counts.append(done)
        elapsed = time.perf_counter() - start
    tokens_in = sum(map(len, prompts))
    rows = [
        Row(name="requests", value=args.num_prompts / elapsed, unit="1/s"),
        Row(name="output tokens", value=done / elapsed, unit="tokens/s"),
        Row(name="all tokens", value=(done + tokens_in) / elapsed, unit="tokens/s"),
        Row(name="elapsed", value=elapsed, unit="s"),
    ]
    report = Report.of(rows)
    print(report.table())
    if args.json:
        report.write(args.json)
    if args.plot:
        plot_lines(
            args.plot,
            f"Throughput of {args.model}: {args.num_prompts} requests",
            [("output tokens of finished requests", times, counts)],
            x_label="s",
            y_label="tokens",
            stepped=True,
        )
    return 0
