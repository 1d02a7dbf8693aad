"""Fetch the demo model and let it answer one question.

  lamella demo
  lamella demo --message "Write a haiku about rivers."

The engine's options come from the environment (LAMELLA_THREADS=2), as where the other commands are not given a flag.
The model is SmolLM2-135M-Instruct (98 MB, Apache-2.0): small enough for any laptop, and small enough to be wrong often.
"""

from __future__ import annotations

import argparse

import lamella.engine as lamella
from lamella.engine.cli.run import summary
from lamella.engine.cli.sampling_flags import add_sampling_flags, sampling_params
from lamella.engine.config.flags import options_from
from lamella.engine.config.schema import EngineOptions
from lamella.engine.console import dim, note
from lamella.engine.errors import EngineError

MODEL = "smollm2"
QUESTION = "Name three reasons to drink water, one sentence each."
MAX_TOKENS = 160


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--message", default=QUESTION, metavar="TEXT", help=f"what to ask (default: {QUESTION!r})")
    add_sampling_flags(parser, max_tokens=MAX_TOKENS)


def run(args: argparse.Namespace) -> int:
    # --seed is the answer's own; a revision in the environment is meant for hub ids
    options = options_from(argparse.Namespace(), EngineOptions, model=MODEL, revision=None)
    sampling_params(args, {})
    with lamella.LLM.from_options(options, progress=True) as llm:
        params = sampling_params(args, {"temperature": 0.0, "max_tokens": MAX_TOKENS, **llm.sampling_defaults})
        note(dim(f"\n> {args.message}\n"))
        stream = llm.stream_chat([{"role": "user", "content": args.message}], params)
        for piece in stream:
            print(piece, end="", flush=True)
        print()
        if stream.output.error is not None:
            raise EngineError(f"the answer broke off: {stream.output.error}")
        note(dim("\n" + summary(stream.output)))
    note(
        "\nNext:\n"
        "  lamella chat smollm2                 talk to it\n"
        "  lamella serve smollm2                OpenAI-compatible server on port 8000\n"
        "  lamella inspect smollm2              how it is run, and why"
    )
    return 0
