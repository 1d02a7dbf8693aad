"""Time of one batch of equal requests, in process: from submission to the last token.

lamella bench latency smollm2 --input-len 512 --output-len 32 --batch-size 8
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import lamella.engine as lamella
from lamella.engine.cli.report import Report, Row, plot_lines
from lamella.engine.config.flags import add_flags, add_model, number, options_from
from lamella.engine.config.schema import EngineOptions

UNUSED_BY_RANDOM_PROMPTS = ("model", "chat_template", "scheduling_policy", "seed", "max_logprobs")
"""Options that greedy requests of token ids, all of one priority, do not notice."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        "--input-len", type=number("int", 1), default=32, metavar="N", help="prompt tokens (default: 32)"
    )
    parser.add_argument(
        "--output-len", type=number("int", 1), default=128, metavar="N", help="output tokens (default: 128)"
    )
    parser.add_argument(
        "--batch-size", type=number("int", 1), default=8, metavar="N", help="requests in the batch (default: 8)"
    )
    parser.add_argument(
        "--num-iters-warmup", type=number("int", 0), default=2, metavar="N", help="runs not counted (default: 2)"
    )
    parser.add_argument("--num-iters", type=number("int", 1), default=10, metavar="N", help="runs (default: 10)")
    add_flags(parser, EngineOptions, skip=UNUSED_BY_RANDOM_PROMPTS)


def run(args: argparse.Namespace) -> int:
    options = options_from(args, EngineOptions, model=args.model)
    rng = random.Random(0)
    with lamella.LLM.from_options(options, progress=True) as llm:
        params = lamella.SamplingParams(temperature=0.0, max_tokens=args.output_len, ignore_eos=True)
        seconds, firsts = [], []
        for iteration in range(args.num_iters_warmup + args.num_iters):
            prompts = random_prompts(rng, args.batch_size, args.input_len, llm.info.vocab_size)
            start = time.perf_counter()
            outputs = llm.generate(prompts, params)
            elapsed = time.perf_counter() - start
            if iteration >= args.num_iters_warmup:
                seconds.append(elapsed)
                firsts.append(statistics.mean(output.ttft_s for output in outputs))
    shape = f"batch {args.batch_size}, {args.input_len} in, {args.output_len} out"
    decode = [(s - f) / max(1, args.output_len - 1) for s, f in zip(seconds, firsts)]
    rows = [
        Row(name=f"latency, {shape}, median", value=statistics.median(seconds), unit="s"),
        Row(name=f"latency, {shape}, p90", value=quantile(seconds, 0.9), unit="s"),
        Row(name=f"time to first token, {shape}, median", value=statistics.median(firsts), unit="s"),
        Row(name=f"time per output token, {shape}, median", value=statistics.median(decode) * 1e3, unit="ms"),
        Row(
            name=f"output tokens, {shape}",
            value=args.batch_size * args.output_len / statistics.median(seconds),
            unit="tokens/s",
        ),
    ]
    report = Report.of(rows)
    print(report.table())
    if args.json:
        report.write(args.json)
    if args.plot:
        numbers = list(range(1, len(seconds) + 1))
        plot_lines(
            args.plot,
            f"Latency of {args.model}: {shape}",
            [("whole batch", numbers, seconds), ("first token", numbers, firsts)],
            x_label="run",
            y_label="s",
        )
    return 0


def random_prompts(rng: random.Random, count: int, length: int, vocab_size: int) -> list[list[int]]:
    """Prompts of random token ids that share no prefix; the lowest ids (special tokens) are left out."""
    low = min(256, vocab_size // 2)
    return [[rng.randrange(low, vocab_size) for _ in range(length)] for _ in range(count)]


def quantile(values: list[float], share: float) -> float:
    """The value below which `share` of the values lie, interpolated."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
