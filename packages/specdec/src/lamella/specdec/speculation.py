"""A whole `--speculative-config`: one drafter or several, the rule by which drafts are kept, whether lengths adapt.

    {"method": "suffix", "num_speculative_tokens": 16,
     "fallback": {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 2}}

    {"method": "arbitrary", "num_speculative_tokens": 3,
     "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.8, 0.64, 0.512]}

A `fallback` is one more drafter with keys of its own, and may have another. The rule's keys (`RULE_KEYS`) and
`enable_adaptive_verification` are said once, at the outermost place, and hold for all drafters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lamella.specdec.config import (
    ADAPTIVE,
    NetworkConfig,
    SpeculativeConfig,
    as_mapping,
    parse_speculative_config,
    read_integer,
    read_number,
)
from lamella.specdec.errors import ConfigError
from lamella.specdec.rules import STANDARD, Relaxed, Rule, Synthetic, Threshold, Typical, rates_of_length

RULE = "rejection_sample_method"
FALLBACK = "fallback"
RULE_OPTIONS: dict[str, tuple[str, ...]] = {
    "standard": (),
    "synthetic": ("synthetic_acceptance_rates", "synthetic_acceptance_length"),
    "typical": ("posterior_threshold", "posterior_alpha"),
    "relaxed": ("relaxed_topk", "relaxed_delta"),
    "threshold": ("accept_threshold_single", "accept_threshold_acc"),
}
"""Rule -> its keys."""
RULE_KEYS = (RULE, *(key for keys in RULE_OPTIONS.values() for key in keys))
OTHER_RULES = {
    "block": "drafts that are chosen, not drawn, are kept as often by the standard rule",
    "fly": "it is not supported",
}
MAX_DRAFTERS = 8


@dataclass(frozen=True, slots=True)
class Speculation:
    """What a speculative config says."""

    drafters: tuple[SpeculativeConfig, ...]
    """In order of preference; each of another method."""
    rule: Rule = STANDARD
    adaptive: bool = True
    """Verify as many drafts as pay, none included; else all that were found."""

    @property
    def num_speculative_tokens(self) -> int:
        """Most drafts of a row in one step, by any drafter."""
        return max(drafter.num_speculative_tokens for drafter in self.drafters)

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the drafters' methods, in their order."""
        return tuple(drafter.method for drafter in self.drafters)

    @property
    def network(self) -> NetworkConfig | None:
        """The drafter among them that drafts with a network, if there is one."""
        return next((drafter for drafter in self.drafters if isinstance(drafter, NetworkConfig)), None)


def parse_speculation(value: str | Mapping[str, object]) -> Speculation:
    """The speculation that a JSON text or an already parsed object describes. A key with value null counts as absent.

    Raises ConfigError naming the key that is unknown, unsupported, missing, out of range, or at the wrong place.
    """
    options = {key: given for key, given in as_mapping(value).items() if given is not None}
    rule_options = {key: options.pop(key) for key in RULE_KEYS if key in options}
    drafters: list[SpeculativeConfig] = []
    place: Mapping[str, object] | None = options
    path = ""
    while place is not None:
        behind = place.get(FALLBACK)
        drafters.append(_drafter({key: given for key, given in place.items() if key != FALLBACK}, path))
        path += FALLBACK + ": "
        place = None if behind is None else _fallback(behind, path)
        if len(drafters) == MAX_DRAFTERS and place is not None:
            raise ConfigError(f"speculative config: more than {MAX_DRAFTERS} drafters")
    methods = [drafter.method for drafter in drafters]
    for method in methods:
        if methods.count(method) > 1:
            raise ConfigError(f'speculative config: method "{method}" is named more than once')
    if sum(isinstance(drafter, NetworkConfig) for drafter in drafters) > 1:
        raise ConfigError("speculative config: one drafter may have a network, several have: " + ", ".join(methods))
    try:
        rule = _rule(rule_options, max(drafter.num_speculative_tokens for drafter in drafters))
    except ConfigError as error:
        raise ConfigError(f"speculative config: {error}") from None
    return Speculation(tuple(drafters), rule, drafters[0].adaptive)


def _drafter(options: Mapping[str, object], path: str) -> SpeculativeConfig:
    try:
        return parse_speculative_config(options)
    except ConfigError as error:
        if not path:
            raise
        said = str(error).removeprefix("speculative config: ")
        raise ConfigError(f"speculative config: {path}{said}") from None


def _fallback(value: object, path: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"speculative config: {path[:-2]} must be an object as the whole config is, got {value!r}")
    options = {str(key): given for key, given in value.items() if given is not None}
    for key in (*RULE_KEYS, ADAPTIVE):
        if key in options:
            raise ConfigError(f"speculative config: {path}{key!r} holds for all drafters: say it outside of {FALLBACK}")
    return options


def _rule(options: Mapping[str, object], num_drafts: int) -> Rule:
    name = options.get(RULE, "standard")
    if not isinstance(name, str) or name not in RULE_OPTIONS:
        why = OTHER_RULES.get(name, "there is no such rule") if isinstance(name, str) else "it must be a name"
        known = ", ".join(f'"{rule}"' for rule in RULE_OPTIONS)
        raise ConfigError(f"{RULE} is {name!r}, {why}; supported: {known}")
    for key in options:
        if key != RULE and key not in RULE_OPTIONS[name]:
            wanted = next(rule for rule, keys in RULE_OPTIONS.items() if key in keys)
            raise ConfigError(f'{key!r} belongs to {RULE} "{wanted}", which is "{name}"')
    return _READERS[name](options, num_drafts)


def _read_synthetic(options: Mapping[str, object], num_drafts: int) -> Rule:
    rates, length = (options.get(key) for key in RULE_OPTIONS["synthetic"])
    if (rates is None) == (length is None):
        raise ConfigError(
            f'{RULE} "synthetic" needs either synthetic_acceptance_rates or synthetic_acceptance_length'
            + ("" if rates is None else ", not both")
        )
    if rates is None:
        return Synthetic(tuple(rates_of_length(read_number("synthetic_acceptance_length", length), num_drafts)))
    if not isinstance(rates, list | tuple) or len(rates) != num_drafts:
        raise ConfigError(
            f"synthetic_acceptance_rates must be a list of {num_drafts} numbers, one for each draft, got {rates!r}"
        )
    return Synthetic(tuple(read_number(f"synthetic_acceptance_rates[{i}]", rate) for i, rate in enumerate(rates)))


def _read_relaxed(options: Mapping[str, object], num_drafts: int) -> Rule:
    for key in RULE_OPTIONS["relaxed"]:
        if key not in options:
            raise ConfigError(f'{key} is missing; {RULE} "relaxed" needs it')
    return Relaxed(
        read_integer("relaxed_topk", options["relaxed_topk"]), read_number("relaxed_delta", options["relaxed_delta"])
    )


def _numbers(name: str, options: Mapping[str, object]) -> dict[str, float]:
    return {key: read_number(key, options[key]) for key in RULE_OPTIONS[name] if key in options}


_READERS: dict[str, Callable[[Mapping[str, object], int], Rule]] = {
    "standard": lambda options, num_drafts: STANDARD,
    "synthetic": _read_synthetic,
    "typical": lambda options, num_drafts: Typical(**_numbers("typical", options)),
    "relaxed": _read_relaxed,
    "threshold": lambda options, num_drafts: Threshold(**_numbers("threshold", options)),
}
