"""Speculation methods side by side on a workload, in process: decode speed, tokens per step, ratio to none.

lamella bench spec smollm2 --methods ngram,suffix --rounds 5
lamella bench spec smollm2 --workload prompts.jsonl --config deep='{"method":"suffix","num_speculative_tokens":32}'
lamella bench spec smollm2 --methods arbitrary --num-speculative-tokens 3 --synthetic-acceptance-rates 0.8,0.64,0.512

A workload has one JSON object a line: "prompt" (a text or token ids) or "messages" (a chat), and if you like "group",
over which figures are summed, and "max_tokens". The one that comes along has the groups "repeats" (edits, letters,
notes, logs: answers that say again what stands in the prompt) and "plain" (stories and explanations).

Everything is greedy, and every answer is compared with the one without speculation. Each round starts every engine
anew, so no method has seen the answer that it is about to give, and prompt by prompt the methods take turns; of the
rounds the fastest counts for each prompt, since other work on the machine only ever slows one. With --apart there is
one engine at a time: for a model that fits only once.

Methods: ngram, suffix, both (suffix, and ngram where it finds nothing), arbitrary (always as many drafts as may be, of
no sense). With --synthetic-acceptance-rates or -length drafts stand by chance, whatever the model says: that shows what
a drafter of such rates would be worth. The answers are garbage then, are not compared, and go on behind end tokens; the
names of such figures say synthetic.
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

NGRAM = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5}
SUFFIX = {"method": "suffix", "suffix_decoding_max_tree_depth": 48, "suffix_decoding_max_spec_factor": 4.0}
METHODS: dict[str, dict[str, Any]] = {
    "ngram": NGRAM,
    "suffix": SUFFIX,
    "both": {**SUFFIX, "fallback": NGRAM},
    "arbitrary": {"method": "arbitrary"},
}
"""What a name in --methods stands for, without num_speculative_tokens."""
DEFAULT_METHODS = ("ngram", "suffix")
SYNTHETIC = ("synthetic_acceptance_rates", "synthetic_acceptance_length")


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
    draft_seconds: dict[int, float] = {}
    rule: str = "standard"
    """By which its drafts are kept; with another one the answers are not the model's own."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--workload", metavar="FILE", help="JSON lines (default: a small one that comes along)")
    parser.add_argument(
        "--methods",
        default=",".join(DEFAULT_METHODS),
        metavar="A,B",
        help=f"some of {', '.join(METHODS)} (default: {', '.join(DEFAULT_METHODS)})",
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
    synthetic = parser.add_mutually_exclusive_group()
    synthetic.add_argument(
        "--synthetic-acceptance-rates",
        metavar="R,R",
        help="for --methods: the first i drafts all stand with the i-th of these probabilities; one for each draft",
    )
    synthetic.add_argument(
        "--synthetic-acceptance-length",
        type=number("float", 1),
        metavar="X",
        help="for --methods: so many tokens a step on average, the next token included",
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
    named = configs_of(args.methods, args.config, args.num_speculative_tokens, synthetic_of(args))
    configs = {NONE: None, **named}
    groups = list(dict.fromkeys(item.group for item in items))
    targets = targets_of(args.target, groups)
    measured = {name: Measured(rule=rule_of(config)) for name, config in configs.items()}
    free_running = any(one.rule == "synthetic" for one in measured.values())
    several = {name: replace(options, speculative_config=config) for name, config in configs.items()}
    for _ in range(args.rounds):
        for together in [{name: one} for name, one in several.items()] if args.apart else [several]:
            measure(together, items, args.output_len, measured, ignore_eos=free_running)
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


def synthetic_of(args: argparse.Namespace) -> dict[str, Any]:
    """The keys that --methods get besides their own."""
    rates: Any = args.synthetic_acceptance_rates
    if rates is not None:
        try:
            rates = [float(rate) for rate in rates.split(",")]
        except ValueError:
            raise StartError(f"--synthetic-acceptance-rates takes numbers between commas; got {rates!r}") from None
    values = dict(zip(SYNTHETIC, (rates, args.synthetic_acceptance_length), strict=True))
    given = {key: value for key, value in values.items() if value is not None}
    return {"rejection_sample_method": "synthetic", **given} if given else {}


def rule_of(config: dict[str, Any] | None) -> str:
    """The rule by which a config keeps drafts; a config that cannot be used is named when its engine starts."""
    return "standard" if config is None else str(config.get("rejection_sample_method") or "standard")


def with_drafts(config: Mapping[str, Any], num_drafts: int) -> dict[str, Any]:
    """The config with so many drafts for each of its drafters."""
    given = {**config, "num_speculative_tokens": num_drafts}
    if "fallback" in config:
        given["fallback"] = with_drafts(config["fallback"], num_drafts)
    return given


def configs_of(
    methods: str, given: Sequence[str], num_drafts: int, synthetic: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Name -> --speculative-config. synthetic: more keys for methods that are named."""
    configs = {}
    for name in filter(None, methods.split(",")):
        if name == NONE:
            continue
        if name not in METHODS:
            raise StartError(f"--methods knows {', '.join(METHODS)}; got {name!r}. Others come with --config NAME=JSON")
        configs[name] = {**with_drafts(METHODS[name], num_drafts), **synthetic}
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
    several: Mapping[str, EngineOptions],
    items: Sequence[Item],
    output_len: int,
    measured: Mapping[str, Measured],
    *,
    ignore_eos: bool = False,
) -> None:
    """One round: fresh engines, which take turns prompt by prompt."""
    with ExitStack() as stack:
        engines = {name: stack.enter_context(lamella.LLM.from_options(options)) for name, options in several.items()}
        for llm in engines.values():
            llm.generate([[1, 2, 3]], lamella.SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
        for i, item in enumerate(items):
            for name, llm in engines.items():
                answer(llm, i, item, output_len, measured[name], ignore_eos=ignore_eos)


def answer(
    llm: lamella.LLM, place: int, item: Item, output_len: int, measured: Measured, *, ignore_eos: bool = False
) -> None:
    """Answer an item, and note what it took if that was faster than before."""
    params = lamella.SamplingParams(temperature=0.0, max_tokens=item.max_tokens or output_len, ignore_eos=ignore_eos)
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
    measured.draft_seconds[place] = after.spec_draft_seconds - before.spec_draft_seconds


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
        num_steps = sum(one.steps[i] for i in places)
        differing = sum(one.token_ids[i] != plain.token_ids[i] for i in places)
        if one.rule != "standard":
            name = f"{name} ({one.rule})"
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
                value=num_tokens / num_steps,
                unit="tokens/step",
            ),
            Row(
                name=f"drafts accepted, {group}, {name}",
                value=100 * accepted / drafted if drafted else 0.0,
                unit=f"% of {drafted}",
            ),
            Row(
                name=f"drafting, {group}, {name}",
                value=1e6 * sum(one.draft_seconds[i] for i in places) / num_steps,
                unit="us/step",
            ),
        ]
        if one.rule != "synthetic":
            rows.append(Row(name=f"answers that differ, {group}, {name}", value=differing, unit=f"of {len(places)}"))
    return rows
