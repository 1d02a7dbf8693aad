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

MAX_TOKENS = 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_sampling_flags(parser, max_tokens=MAX_TOKENS)
    # one request at a time, whose seed is a sampling flag
    add_flags(parser, EngineOptions, skip=("model", "seed", "scheduling_policy", "max_logprobs"))


def run(args: argparse.Namespace) -> int:
    refuse_broken_text()
    if sys.stdin.isatty():
        importlib.import_module("readline")  # line editing for input()
    options = options_from(args, EngineOptions, model=args.model)
    sampling_params(args, {})
    with lamella.LLM.from_options(options, progress=True) as llm:
        chat = Chat(llm, sampling_params(args, {"max_tokens": MAX_TOKENS, **llm.sampling_defaults}), args.system)
        note(dim("Ctrl-D ends, /clear forgets, /system TEXT sets the system message, /stats shows figures"))
        while (text := read_line()) is not None and text not in ("/exit", "/quit"):
            if text.startswith("/"):
                chat.obey(text)
            elif text:
                chat.answer(text)
    return 0


def read_line() -> str | None:
    """What was typed; nothing after Ctrl-C or bytes that are no text; None at the end of the input. Raises StartError
    where standard input is a file that holds such bytes."""
    try:
        return input("> ").strip()
    except EOFError:
        print()
        return None
    except KeyboardInterrupt:
        print()
    except UnicodeDecodeError as error:
        if not sys.stdin.isatty():
            raise StartError(f"standard input is not valid {error.encoding}: {error.reason}") from None
        note(f"that was not valid {error.encoding}")
    return ""


class Chat:
    """A conversation, from one turn to the next."""

    def __init__(self, llm: lamella.LLM, params: lamella.SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._system = system
        self._turns: list[dict[str, str]] = []
        self._last = ""

    def obey(self, command: str) -> None:
        """Run a command of the chat; /system begins anew."""
        word, _, rest = command.partition(" ")
        if word == "/clear":
            self._turns = []
        elif word == "/stats":
            note(self._last or "no answer yet")
        elif word == "/system":
            self._system = rest.strip() or None
            self._turns = []
        else:
            note(f"unknown command {word}; commands are /clear /system /stats /exit")

    def answer(self, text: str) -> None:
        """Print the answer as it comes. Ctrl-C stops it: what came stays in the conversation; where nothing came, the
        question is forgotten."""
        self._turns.append({"role": "user", "content": text})
        head = [{"role": "system", "content": self._system}] if self._system else []
        pieces: list[str] = []
        stream = None
        try:
            stream = self._llm.stream_chat(head + self._turns, self._params)
            for piece in stream:
                pieces.append(piece)
                print(piece, end="", flush=True)
        except RequestError as error:
            note(f"{error} (use /clear to begin anew)")
            self._turns.pop()
            return
        except KeyboardInterrupt:
            if stream is not None:
                stream.close()
        print()
        if stream is not None and stream.output.error is not None:
            note(f"the answer broke off: {stream.output.error}")
        if stream is not None and stream.finished:
            self._last = summary(stream.output)
        if pieces or (stream is not None and stream.finished):
            self._turns.append({"role": "assistant", "content": "".join(pieces)})
        else:
            self._turns.pop()
