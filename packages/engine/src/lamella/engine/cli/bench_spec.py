"""Speculation methods side by side on a workload, in process: decode speed, tokens per step, ratio to none.

lamella bench spec smollm2 --methods ngram,suffix --rounds 5
lamella bench spec smollm2 --workload prompts.jsonl --config deep='{"method":"suffix","num_speculative_tokens":32}'

A workload has one JSON object a line: "prompt" (a text or token ids) or "messages" (a chat), and if you like "group",
over which figures are summed, and "max_tokens". The one that comes along has the groups "repeats" (edits, letters,
notes, logs: answers that say again what stands in the prompt) and "plain" (stories and explanations).

Everything is greedy, and every answer is compared with the one without speculation. Each round starts every engine
anew, so no method has seen the answer that it is about to give, and prompt by prompt the methods take turns; of the
rounds the fastest counts for each prompt, since other work on the machine only ever slows one. With --apart there is
one engine at a time: for a model that fits only once.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

import lamella.engine as lamella
from lamella.engine.cli.report import Report, Row, plot_columns
from lamella.engine.config.flags import add_flags, add_model, number, options_from
from lamella.engine.config.schema import EngineOptions
from lamella.engine.errors import StartError

NONE = "none"
WORKLOAD = Path(__file__).with_name("spec_workload.jsonl")
UNUSED = ("model", "speculative_config", "seed", "scheduling_policy", "max_logprobs")
"""Options that greedy requests of one priority do not notice, and the one that is compared."""

METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5},
    "suffix": {"method": "suffix", "suffix_decoding_max_tree_depth": 48, "suffix_decoding_max_spec_factor": 4.0},
}
"""What a name in --methods stands for, without num_speculative_tokens."""


class Item(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A line of a workload."""

    prompt: str | list[int] | None = None
    messages: list[dict[str, str]] | None = None
    group: str = "all"
    name: str = ""
    """For readers of the file."""
    max_tokens: int | None = None


class Measured(msgspec.Struct):
    """What a method did with the workload; the fastest round of each item."""

    seconds: dict[int, float] = {}
    """Item -> seconds behind its first token."""
    token_ids: dict[int, list[int]] = {}
    steps: dict[int, int] = {}
    """Steps that made the answer: of the round whose seconds count."""
    drafted: dict[int, int] = {}
    accepted: dict[int, int] = {}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--workload", metavar="FILE", help="JSON lines (default: a small one that comes along)")
    parser.add_argument(
        "--methods", default=",".join(METHODS), metavar="A,B", help=f"some of {', '.join(METHODS)} (default: all)"
    )
    parser.add_argument(
        "--config", action="append", default=[], metavar="NAME=JSON", help="one more --speculative-config to compare"
    )
    parser.add_argument(
        "--num-speculative-tokens", type=number("int", 1), default=32, metavar="N", help="most drafts (default: 32)"
    )
    parser.add_argument(
        "--output-len", type=number("int", 2), default=128, metavar="N", help="most output tokens (default: 128)"
    )
    parser.add_argument("--apart", action="store_true", help="one engine at a time instead of all in turns")
    parser.add_argument("--rounds", type=number("int", 1), default=3, metavar="N", help="rounds (default: 3)")
    parser.add_argument(
        "--target", action="append", default=[], metavar="GROUP=X", help="ratio to none that a group should reach"
    )
    add_flags(parser, EngineOptions, skip=UNUSED)


def run(args: argparse.Namespace) -> int:
    options = options_from(args, EngineOptions, model=args.model)
    items = read_workload(args.workload or WORKLOAD)
    configs = {NONE: None, **configs_of(args.methods, args.config, args.num_speculative_tokens)}
    groups = list(dict.fromkeys(item.group for item in items))
    targets = targets_of(args.target, groups)
    measured = {name: Measured() for name in configs}
    several = {name: replace(options, speculative_config=config) for name, config in configs.items()}
    for _ in range(args.rounds):
        for together in [{name: one} for name, one in several.items()] if args.apart else [several]:
            measure(together, items, args.output_len, measured)
    rows = [row for group in groups for row in rows_of(group, items, measured, targets.get(group))]
    report = Report.of(rows)
    print(report.table())
    if args.json:
        report.write(args.json)
    if args.plot:
        speeds = {
            name: [decode_speed(one, [i for i, item in enumerate(items) if item.group == group]) for group in groups]
            for name, one in measured.items()
        }
        plot_columns(args.plot, f"Speculation on {args.model}", groups, speeds, y_label="decoded tokens/s")
    return 0


def read_workload(path: str | Path) -> list[Item]:
    """Raises StartError naming the line that cannot be used."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"cannot read the workload {path}: {error}") from None
    items = []
    for number_, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            item = msgspec.json.decode(line, type=Item)
        except msgspec.MsgspecError as error:
            raise StartError(f"{path}, line {number_}: {error}") from None
        if (item.prompt is None) == (item.messages is None):
            raise StartError(f"{path}, line {number_}: give either prompt or messages")
        if item.max_tokens is not None and item.max_tokens < 2:
            raise StartError(f"{path}, line {number_}: max_tokens is {item.max_tokens}, the least is 2")
        items.append(item)
    if not items:
        raise StartError(f"the workload {path} has no prompts")
    return items


def configs_of(methods: str, given: Sequence[str], num_drafts: int) -> dict[str, dict[str, Any]]:
    """Name -> --speculative-config."""
    configs = {}
    for name in filter(None, methods.split(",")):
        if name == NONE:
            continue
        if name not in METHODS:
            raise StartError(f"--methods knows {', '.join(METHODS)}; got {name!r}. Others come with --config NAME=JSON")
        configs[name] = {**METHODS[name], "num_speculative_tokens": num_drafts}
    for text in given:
        name, _, value = text.partition("=")
        if not re.fullmatch(r"[\w.-]+", name) or name == NONE or name in configs:
            raise StartError(f"--config takes NAME=JSON with a name of its own; got {text!r}")
        try:
            configs[name] = json.loads(value)
        except json.JSONDecodeError as error:
            raise StartError(f"--config {name}: not valid JSON: {error}") from None
        if not isinstance(configs[name], dict):
            raise StartError(f"--config {name}: a JSON object is needed, got {value!r}")
    if not configs:
        raise StartError("nothing to compare: name some --methods, or a --config NAME=JSON")
    return configs


def targets_of(given: Sequence[str], groups: Sequence[str]) -> dict[str, float]:
    """Group -> ratio."""
    targets = {}
    for text in given:
        group, _, value = text.partition("=")
        try:
            targets[group] = float(value)
        except ValueError:
            raise StartError(f"--target takes GROUP=X with a number X; got {text!r}") from None
        if group not in groups:
            raise StartError(f"--target {text}: the workload has the groups {', '.join(groups)}")
    return targets


def measure(
    several: Mapping[str, EngineOptions], items: Sequence[Item], output_len: int, measured: Mapping[str, Measured]
) -> None:
    """One round: fresh engines, which take turns prompt by prompt."""
    with ExitStack() as stack:
        engines = {name: stack.enter_context(lamella.LLM.from_options(options)) for name, options in several.items()}
        for llm in engines.values():
            llm.generate([[1, 2, 3]], lamella.SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
        for i, item in enumerate(items):
            for name, llm in engines.items():
                answer(llm, i, item, output_len, measured[name])


def answer(llm: lamella.LLM, place: int, item: Item, output_len: int, measured: Measured) -> None:
    """Answer an item, and note what it took if that was faster than before."""
    params = lamella.SamplingParams(temperature=0.0, max_tokens=item.max_tokens or output_len)
    before = llm.stats()
    if item.messages is not None:
        (output,) = llm.chat([item.messages], params)
    else:
        (output,) = llm.generate([item.prompt or []], params)
    after = llm.stats()
    if output.error is not None:
        raise StartError(f"item {place + 1} of the workload failed: {output.error}")
    token_ids = output.outputs[0].token_ids
    seconds = (len(token_ids) - 1) / output.tokens_per_s if output.tokens_per_s else 0.0
    if seconds >= measured.seconds.get(place, float("inf")):
        return
    measured.seconds[place] = seconds
    measured.token_ids[place] = token_ids
    measured.steps[place] = after.steps - before.steps
    measured.drafted[place] = after.spec_draft_tokens - before.spec_draft_tokens
    measured.accepted[place] = after.spec_accepted_tokens - before.spec_accepted_tokens


def decode_speed(measured: Measured, places: Sequence[int]) -> float:
    """Tokens per second of these items, behind their first tokens."""
    seconds = sum(measured.seconds[i] for i in places)
    return sum(len(measured.token_ids[i]) - 1 for i in places) / seconds if seconds else 0.0


def rows_of(group: str, items: Sequence[Item], measured: Mapping[str, Measured], target: float | None) -> list[Row]:
    """A group's figures, for each method."""
    places = [i for i, item in enumerate(items) if item.group == group]
    plain = measured[NONE]
    base = decode_speed(plain, places)
    rows = [Row(name=f"decode, {group}, {NONE}", value=base, unit="tokens/s")]
    for name, one in measured.items():
        if name == NONE:
            continue
        speed = decode_speed(one, places)
        ratio = speed / base if base else None
        met = None if target is None or ratio is None else ratio >= target
        shown = None if target is None else f">= {target:g} x {NONE}"
        drafted, accepted = (sum(counts[i] for i in places) for counts in (one.drafted, one.accepted))
        num_tokens = sum(len(one.token_ids[i]) for i in places)
        differing = sum(one.token_ids[i] != plain.token_ids[i] for i in places)
        rows += [
            Row(
                name=f"decode, {group}, {name}",
                value=speed,
                unit="tokens/s",
                peer=NONE,
                ratio=ratio,
                target=shown,
                ok=met,
            ),
            Row(
                name=f"acceptance length, {group}, {name}",
                value=num_tokens / sum(one.steps[i] for i in places),
                unit="tokens/step",
            ),
            Row(
                name=f"drafts accepted, {group}, {name}",
                value=100 * accepted / drafted if drafted else 0.0,
                unit=f"% of {drafted}",
            ),
            Row(name=f"answers that differ, {group}, {name}", value=differing, unit=f"of {len(places)}"),
        ]
    return rows
