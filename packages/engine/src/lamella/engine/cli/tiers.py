"""The tiers of the KV cache: does one pay, is a folder sound, how fast could it be?

  lamella tiers report --base-url http://127.0.0.1:8000        figures of a running server, and what each tier is worth
  lamella tiers verify /var/tmp/kv                             read every record of a disk tier and check it
  lamella tiers bench /var/tmp/kv                              speed of a folder, through the tier and without it

A server gets tiers with `lamella serve MODEL --kv-tier ram=4GiB,disk=/folder:100GiB`.
`lamella tiers report --help` lists the options.
"""

from __future__ import annotations

import argparse
import importlib

from lamella.engine.config.flags import Parser
from lamella.engine.errors import StartError

WHAT = {
    "report": "what the tiers of a running server hold, give and cost",
    "verify": "check every record of a disk tier's folder",
    "bench": "measure a folder",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=tuple(WHAT), help="; ".join(f"{k}: {v}" for k, v in WHAT.items()))
    rest = parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    rest.required = False  # else it is named as missing together with the first


def run(args: argparse.Namespace) -> int:
    if args.what not in WHAT:
        raise StartError(f"tiers knows {', '.join(WHAT)}; got {args.what!r}")
    command = importlib.import_module(f"lamella.engine.cli.tiers_{args.what}")
    parser = Parser(
        prog=f"lamella tiers {args.what}",
        description=command.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_arguments(parser)
    return int(command.run(parser.parse_args(args.rest)))
