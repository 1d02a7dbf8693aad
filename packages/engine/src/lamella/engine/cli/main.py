"""The command `lamella`: finds the subcommand, imports only that one, turns errors into one line and an exit code.

Exit codes: 0 done, 1 a mistake or a failure (one line on standard error), 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from lamella.engine.config.flags import Parser, misspelt_variables
from lamella.engine.errors import EngineError, StartError

COMMANDS = {
    "demo": "fetch the demo model and let it answer one question",
    "pull": "fetch a model into the cache folder, or list what can be fetched",
    "run": "answer one prompt",
    "chat": "talk to a model in the terminal",
    "serve": "OpenAI-compatible HTTP server",
    "bench": "measure latency, throughput, a running server or speculation",
    "inspect": "show how a model would be run: every choice with its reason",
    "tiers": "tiers of the KV cache: report, verify, bench",
    "top": "what a running server does at this moment",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    _open_standard_streams()
    try:
        code = _dispatch(words)
        sys.stdout.flush()  # else a full disk shows behind our back, at the exit
        return code
    except EngineError as error:
        print(f"lamella: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except OSError as error:  # a disk that is full, a file that may not be read
        print(f"lamella: {error}", file=sys.stderr)
        return 1


def _open_standard_streams() -> None:
    """Some may have been closed by whoever started us: files opened next would get their numbers, and our messages."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _dispatch(words: list[str]) -> int:
    parser = Parser(
        prog="lamella",
        description="LLM inference that can be taken apart.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="commands:\n"
        + "\n".join(f"  {name:9} {text}" for name, text in COMMANDS.items())
        + "\n\n`lamella COMMAND --help` explains a command and all its options.\n"
        "The options of the engine and the server can also be given as environment variables, LAMELLA_<OPTION>;\n"
        "what belongs to one call (prompt, sampling, the shape of a bench) cannot.",
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    parser.add_argument("command", nargs="?", metavar="COMMAND", help="one of the commands below")
    before = words[: next((i + 1 for i, w in enumerate(words) if not w.startswith("-")), len(words))]
    args = parser.parse_args(before)
    if args.version:
        package = importlib.import_module("lamella.engine.version")
        print(package.VERSION)
        return 0
    if args.command is None:
        parser.print_help()
        return 1
    if args.command not in COMMANDS:
        raise StartError(f"unknown command {args.command!r}; commands are {', '.join(COMMANDS)}")
    command = importlib.import_module(f"lamella.engine.cli.{args.command}")
    sub = Parser(
        prog=f"lamella {args.command}",
        description=command.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_arguments(sub)
    for line in misspelt_variables():
        print(f"lamella: {line}", file=sys.stderr)
    return int(command.run(sub.parse_args(words[len(before) :])))


if __name__ == "__main__":
    sys.exit(main())
