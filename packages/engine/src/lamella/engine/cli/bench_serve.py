"""Load on a running server: arrivals at a rate or as many as are allowed at once.

  lamella bench serve --base-url http://127.0.0.1:8000 --num-prompts 64 --max-concurrency 16
  lamella bench serve --request-rate 4 --num-prompts 100 --no-stream --plot load.png

ttft: time to first token; tpot: time per output token after the first; itl: gap between chunks; e2el: whole request,
the only one of them that is known with --no-stream.
The client's own CPU share is printed: near 100 % of a core, the figures are the client's and not the server's.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time

import msgspec

from lamella.engine.cli.bench_latency import quantile, random_prompts
from lamella.engine.cli.load_client import Answer, LoadClient, LoadError
from lamella.engine.cli.report import Report, Row, plot_lines
from lamella.engine.config.flags import number
from lamella.engine.errors import StartError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", metavar="URL", help="where the server listens")
    parser.add_argument("--model", metavar="NAME", help="served name (default: the first that the server lists)")
    parser.add_argument("--api-key", metavar="KEY", help="key to send")
    parser.add_argument("--num-prompts", type=number("int", 1), default=64, metavar="N", help="requests (default: 64)")
    parser.add_argument(
        "--max-concurrency", type=number("int", 1), default=16, metavar="N", help="at once (default: 16)"
    )
    parser.add_argument(
        "--request-rate", type=number("float", 1e-6, 1e9), metavar="X", help="Poisson arrivals per second"
    )
    parser.add_argument(
        "--input-len", type=number("int", 1), default=128, metavar="N", help="prompt tokens (default: 128)"
    )
    parser.add_argument(
        "--output-len", type=number("int", 1), default=64, metavar="N", help="output tokens (default: 64)"
    )
    parser.add_argument("--stream", action=argparse.BooleanOptionalAction, default=True, help="stream (default: on)")
    parser.add_argument(
        "--seed", type=number("int"), default=0, metavar="N", help="of prompts and arrivals (default: 0)"
    )


class Load(msgspec.Struct):
    """Outcome of a load."""

    answers: list[Answer]
    elapsed_s: float
    client_cpu_share: float
    """CPU time of this process over elapsed time."""


def run(args: argparse.Namespace) -> int:
    load = asyncio.run(measure(args))
    good = [answer for answer in load.answers if answer.error is None]
    failed = len(load.answers) - len(good)
    if not good:
        raise StartError(f"all {failed} requests failed: {load.answers[0].error}")
    rows = [
        Row(name="requests", value=len(good) / load.elapsed_s, unit="1/s"),
        Row(name="output tokens", value=sum(a.output_tokens for a in good) / load.elapsed_s, unit="tokens/s"),
        Row(name="failed requests", value=failed, unit="", target="0", ok=failed == 0),
        Row(name="client CPU", value=load.client_cpu_share * 100, unit="% of a core"),
    ]
    for name, values in latencies(good).items():
        for label, share in (("median", 0.5), ("p90", 0.9), ("p99", 0.99)):
            rows.append(Row(name=f"{name} {label}", value=quantile(values, share) * 1e3, unit="ms"))
    report = Report.of(rows)
    print(report.table())
    if args.json:
        report.write(args.json)
    if args.plot:
        shares = [i / 100 for i in range(101)]
        plot_lines(
            args.plot,
            f"{len(good)} requests, {args.max_concurrency} at once",
            [(name, shares, [quantile(v, s) * 1e3 for s in shares]) for name, v in latencies(good).items()],
            x_label="share of requests",
            y_label="ms",
        )
    return 0 if not failed else 1


def latencies(answers: list[Answer]) -> dict[str, list[float]]:
    """Seconds by kind, over all requests (itl: over all chunks). All but the whole are of streamed answers: another one
    does not say when its tokens came, and neither does one that came in a single chunk."""
    streamed = [a for a in answers if a.chunk_times]
    several = [a for a in streamed if len(a.chunk_times) > 1]
    kinds: dict[str, list[float]] = {
        "ttft": [a.ttft_s for a in streamed],
        "tpot": [(a.chunk_times[-1] - a.ttft_s) / (a.output_tokens - 1) for a in several if a.output_tokens > 1],
        "itl": [b - a for answer in several for a, b in zip(answer.chunk_times, answer.chunk_times[1:])],
        "e2el": [a.total_s for a in answers],
    }
    return {name: values for name, values in kinds.items() if values}


async def measure(args: argparse.Namespace) -> Load:
    """Send the requests; returns when all are answered. Raises StartError where the server is not there."""
    try:
        probe = LoadClient(args.base_url, args.api_key)
    except LoadError as error:
        raise StartError(str(error)) from None
    try:
        model = args.model or await probe.first_model()
    except LoadError as error:
        raise StartError(f"no server to measure at {args.base_url}: {error}") from None
    probe.close()
    rng = random.Random(args.seed)
    # ids below 1,024 exist in every vocabulary that is worth serving
    prompts = random_prompts(rng, args.num_prompts, args.input_len, 1024)
    arrivals = [0.0] * args.num_prompts
    if args.request_rate:
        clock = 0.0
        for i in range(args.num_prompts):
            arrivals[i] = clock
            clock += rng.expovariate(args.request_rate)
    free: asyncio.Queue[LoadClient] = asyncio.Queue()
    for _ in range(min(args.max_concurrency, args.num_prompts)):
        free.put_nowait(LoadClient(args.base_url, args.api_key))

    async def one(prompt: list[int], arrival: float, start: float) -> Answer:
        await asyncio.sleep(max(0.0, start + arrival - time.perf_counter()))
        client = await free.get()
        body = {"model": model, "prompt": prompt, "max_tokens": args.output_len, "temperature": 0, "ignore_eos": True}
        if args.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        try:
            return await client.post("/v1/completions", body)
        except LoadError as error:
            client.close()
            return Answer(error=str(error))
        finally:
            free.put_nowait(client)

    cpu, start = time.process_time(), time.perf_counter()
    answers = await asyncio.gather(*(one(p, a, start) for p, a in zip(prompts, arrivals)))
    elapsed = time.perf_counter() - start
    share = (time.process_time() - cpu) / elapsed
    while not free.empty():
        free.get_nowait().close()
    return Load(answers=list(answers), elapsed_s=elapsed, client_cpu_share=share)
