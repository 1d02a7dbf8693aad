"""Talk to a model in the terminal.

  lamella chat smollm2
  lamella chat smollm2 --system "Answer in one sentence."

Keeps the conversation; its prefix is not computed again. Commands in the chat: /clear forgets it, /system TEXT sets the
system message, /stats shows the last answer's figures, /exit (or Ctrl-D) ends. Ctrl-C stops an answer.
"""

from __future__ import annotations

import argparse
import importlib
import sys

import lamella.engine as lamella
from lamella.engine.cli.run import summary
from lamella.engine.cli.sampling_flags import add_sampling_flags, sampling_params
from lamella.engine.config.flags import add_flags, add_model, options_from
from lamella.engine.config.schema import EngineOptions
from lamella.engine.console import dim, note, refuse_broken_text
from lamella.engine.errors import RequestError, StartError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_sampling_flags(parser, max_tokens=512)
    # one request at a time, whose seed is a sampling flag
    add_flags(parser, EngineOptions, skip=("model", "seed", "scheduling_policy", "max_logprobs"))


def run(args: argparse.Namespace) -> int:
    refuse_broken_text()
    if sys.stdin.isatty():
        importlib.import_module("readline")  # line editing for input()
    options = options_from(args, EngineOptions, model=args.model)
    sampling_params(args, {})
    with lamella.LLM.from_options(options, progress=True) as llm:
        params = sampling_params(args, llm.sampling_defaults)
        note(dim("Ctrl-D ends, /clear forgets, /system TEXT sets the system message, /stats shows figures"))
        system, last = args.system, ""
        turns: list[dict[str, str]] = []
        while True:
            try:
                text = input("> ").strip()
            except EOFError:
                print()
                return 0
            except KeyboardInterrupt:
                print()
                continue
            except UnicodeDecodeError as error:
                if not sys.stdin.isatty():
                    raise StartError(f"standard input is not valid {error.encoding}: {error.reason}") from None
                note(f"that was not valid {error.encoding}")
                continue
            if not text:
                continue
            if text in ("/exit", "/quit"):
                return 0
            if text == "/clear":
                turns = []
                continue
            if text == "/stats":
                note(last or "no answer yet")
                continue
            if text.startswith("/system"):
                system = text.removeprefix("/system").strip() or None
                turns = []
                continue
            if text.startswith("/"):
                note(f"unknown command {text.split()[0]}; commands are /clear /system /stats /exit")
                continue
            turns.append({"role": "user", "content": text})
            head = [{"role": "system", "content": system}] if system else []
            try:
                stream = llm.stream_chat(head + turns, params)
            except RequestError as error:
                note(f"{error} (use /clear to begin anew)")
                turns.pop()
                continue
            pieces = []
            try:
                for piece in stream:
                    pieces.append(piece)
                    print(piece, end="", flush=True)
            except KeyboardInterrupt:
                stream.close()
            print()
            if stream.output.error is not None:
                note(f"the answer broke off: {stream.output.error}")
            if stream.finished:
                last = summary(stream.output)
            turns.append({"role": "assistant", "content": "".join(pieces)})
