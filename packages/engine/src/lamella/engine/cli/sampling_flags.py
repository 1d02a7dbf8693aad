"""Sampling parameters as flags, shared by `run`, `chat` and `demo`."""

from __future__ import annotations

import argparse
from typing import Any

from lamella.engine.config.flags import number
from lamella.engine.request import SamplingParams


def add_sampling_flags(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    """Add --max-tokens, --temperature and so on; None means the model's own default, else max_tokens."""
    group = parser.add_argument_group("sampling (defaults: the model's generation_config)")
    group.add_argument(
        "--max-tokens",
        type=number("int"),
        metavar="N",
        help=f"most output tokens (default: the model's max_new_tokens, else {max_tokens})",
    )
    group.add_argument("--min-tokens", type=number("int"), metavar="N", help="no end before this many output tokens")
    group.add_argument("--temperature", type=number("float"), metavar="X", help="0 takes the likeliest token each time")
    group.add_argument("--top-k", type=number("int"), metavar="N", help="only the N likeliest tokens; 0 is off")
    group.add_argument(
        "--top-p", type=number("float"), metavar="X", help="likeliest tokens that together reach X; 1 is off"
    )
    group.add_argument(
        "--min-p", type=number("float"), metavar="X", help="tokens at least X times as likely as the best"
    )
    group.add_argument("--repetition-penalty", type=number("float"), metavar="X", help="above 1 repeats less; 1 is off")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text (repeatable)")
    group.add_argument("--seed", type=number("int"), metavar="N", help="same seed, same answer; -1 is none")
    group.add_argument("--ignore-eos", action="store_true", default=None, help="go on behind the end token")


NAMES = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "stop",
    "seed",
    "ignore_eos",
)


def sampling_params(args: argparse.Namespace, defaults: Any) -> SamplingParams:
    """The parameters that the flags and the defaults give. Raises RequestError.

    With no defaults at all it checks the flags, before a model is loaded for them.
    """
    values = {"max_tokens": None, **defaults}
    values.update({name: getattr(args, name) for name in NAMES if getattr(args, name) is not None})
    params = SamplingParams(**values)
    params.validate()
    return params
