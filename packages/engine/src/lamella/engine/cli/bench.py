"""Measure latency, throughput, a running server or methods of speculation.

  lamella bench latency smollm2 --input-len 512 --output-len 32 --batch-size 1
  lamella bench throughput smollm2 --num-prompts 64 --input-len 128 --output-len 128
  lamella bench spec smollm2 --methods ngram,suffix --rounds 5
  lamella bench serve --base-url http://127.0.0.1:8000 --num-prompts 64 --max-concurrency 16

Each prints a table; --json FILE writes {"machine", "commit", "date", "rows": [...]}, --plot FILE draws a picture.
`lamella bench WHAT --help` lists the options of each.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util

from lamella.engine.config.flags import Parser, output_file
from lamella.engine.errors import StartError

WHAT = {
    "latency": "time of one batch, in process",
    "throughput": "many requests at once, in process",
    "serve": "load on a running server",
    "spec": "methods of speculation on a workload, in process",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=tuple(WHAT), help="; ".join(f"{k}: {v}" for k, v in WHAT.items()))
    rest = parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    rest.required = False  # else it is named as missing together with the first


def plot_file(text: str) -> str:
    """An argparse type: a file to draw into. Without matplotlib it is refused here, before anything is measured."""
    path: str = output_file(".png", ".svg", ".pdf", ".html")(text)
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("a plot needs matplotlib: pip install 'lamella-engine[plot]'")
    return path


def run(args: argparse.Namespace) -> int:
    if args.what not in WHAT:
        raise StartError(f"bench knows {', '.join(WHAT)}; got {args.what!r}")
    bench = importlib.import_module(f"lamella.engine.cli.bench_{args.what}")
    parser = Parser(
        prog=f"lamella bench {args.what}",
        description=bench.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    bench.add_arguments(parser)
    parser.add_argument("--json", type=output_file(), metavar="FILE", help="write the rows as JSON")
    parser.add_argument("--plot", type=plot_file, metavar="FILE", help="draw into a .png, .svg, .pdf or .html file")
    return int(bench.run(parser.parse_args(args.rest)))
