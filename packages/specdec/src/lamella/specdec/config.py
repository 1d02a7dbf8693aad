"""Options of speculative decoding, in the words of vLLM's `--speculative-config`.

    {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    {"method": "suffix", "num_speculative_tokens": 8, "suffix_decoding_max_tree_depth": 24}
    {"method": "arbitrary", "num_speculative_tokens": 3}
    {"method": "draft_model", "model": "smaller-model", "num_speculative_tokens": 4}

One drafter here; several of them, and the rule by which drafts are kept, are in `speculation`.

Every key is used or refused by name: nothing is accepted and ignored. Our own are the keys `match`,
`suffix_decoding_max_spec_offset` and `suffix_decoding_max_cached_tokens`, and the method `arbitrary`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from lamella.specdec.errors import ConfigError

Match = Literal["rightmost", "earliest"]

MAX_DRAFTS = 128
MAX_LOOKUP = 64
DEFAULT_LOOKUP = 5
MAX_TREE_DEPTH = 128
MAX_CACHED_REQUESTS = 2**31 - 1
MAX_CACHED_TOKENS = 50_000_000
"""The native trees number their nodes in 32 bits, and an id may need MAX_TREE_DEPTH / 2 of them."""
MAX_SPEC = 1000.0
DEFAULT_TREE_DEPTH = 24

SUPPORTED = '"ngram", "suffix", "arbitrary", "draft_model"'
ADAPTIVE = "enable_adaptive_verification"
NGRAM_KEYS = (
    "method", "model", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min", "match", ADAPTIVE,
)  # fmt: skip

SUFFIX_PREFIX = "suffix_decoding_"
SUFFIX_OPTIONS = (
    "max_tree_depth", "max_cached_requests", "max_cached_tokens", "max_spec_factor", "max_spec_offset",
    "min_token_prob",
)  # fmt: skip
"""Fields of SuffixConfig whose keys have SUFFIX_PREFIX before them."""
SUFFIX_KEYS = ("method", "num_speculative_tokens", ADAPTIVE, *(SUFFIX_PREFIX + name for name in SUFFIX_OPTIONS))

ARBITRARY_KEYS = ("method", "num_speculative_tokens", ADAPTIVE)

NETWORK_KEYS = ("method", "model", "num_speculative_tokens", ADAPTIVE)
NETWORK_METHODS = ("draft_model",)
"""They draft with a network."""

OTHER_METHODS = (
    "ngram_gpu", "eagle", "eagle3", "mtp", "medusa", "mlp_speculator", "dflash", "dspark",
    "custom_class", "extract_hidden_states",
)  # fmt: skip
"""Names of methods that exist elsewhere."""

OTHER_KEYS = (
    "draft_tensor_parallel_size", "quantization", "moe_backend", "attention_backend", "kv_cache_dtype", "max_model_len",
    "revision", "code_revision", "draft_load_config", "rejection_sample_method", "draft_sample_method",
    "synthetic_acceptance_rates", "synthetic_acceptance_length", "parallel_drafting",
    "num_speculative_tokens_per_batch_size", "use_local_argmax_reduction",
    "use_heterogeneous_vocab", "index_share_for_mtp_iteration", "disable_padded_drafter_batch",
    "disable_eagle_block_drop", "disable_lookahead_block_hashes", "draft_lm_head_quantization", "dspark_draft_topk",
    "xpress_topc",
)  # fmt: skip
"""Keys that other methods know."""


@dataclass(frozen=True, slots=True)
class NgramConfig:
    """Drafts from the sequence's own earlier text: what followed the last n-gram when it occurred before.

    The longest n-gram of prompt_lookup_min to prompt_lookup_max tokens that occurred before wins. Among its
    occurrences `match` chooses: "rightmost" (most recent; chats, agents, loops) or "earliest" (edits of a long prompt).
    """

    method: ClassVar[str] = "ngram"

    num_speculative_tokens: int
    prompt_lookup_min: int = DEFAULT_LOOKUP
    prompt_lookup_max: int = DEFAULT_LOOKUP
    match: Match = "rightmost"
    adaptive: bool = True
    """Verify as many drafts as pay, none included; else all that were found."""

    def __post_init__(self) -> None:
        _within("num_speculative_tokens", self.num_speculative_tokens, 1, MAX_DRAFTS)
        _within("prompt_lookup_max", self.prompt_lookup_max, 1, MAX_LOOKUP)
        _within("prompt_lookup_min", self.prompt_lookup_min, 1, MAX_LOOKUP)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min is {self.prompt_lookup_min}, above prompt_lookup_max {self.prompt_lookup_max}"
            )
        if self.match not in ("rightmost", "earliest"):
            raise ConfigError(f'match must be "rightmost" or "earliest", got {self.match!r}')


@dataclass(frozen=True, slots=True)
class SuffixConfig:
    """Drafts what most often followed the sequence's end, in the sequence itself and in finished outputs.

    A match is a run of up to max_tree_depth - 1 ids at the sequence's end that occurred before. Behind it at most
    match length · max_spec_factor + max_spec_offset ids are drafted, within max_tree_depth ids together with the match,
    and as long as the product of their frequencies is at least min_token_prob. Of all matches the one counts whose
    products sum to most.

    Finished outputs: the newest max_cached_requests (0: none), of together at most max_cached_tokens ids.
    """

    method: ClassVar[str] = "suffix"

    num_speculative_tokens: int
    max_tree_depth: int = DEFAULT_TREE_DEPTH
    max_cached_requests: int = 10_000
    max_cached_tokens: int = 1_000_000
    max_spec_factor: float = 1.0
    max_spec_offset: float = 0.0
    min_token_prob: float = 0.1
    adaptive: bool = True
    """Verify as many drafts as pay, none included; else all that were found."""

    def __post_init__(self) -> None:
        _within("num_speculative_tokens", self.num_speculative_tokens, 1, MAX_DRAFTS)
        _within("max_tree_depth", self.max_tree_depth, 2, MAX_TREE_DEPTH)
        _within("max_cached_requests", self.max_cached_requests, 0, MAX_CACHED_REQUESTS)
        _within("max_cached_tokens", self.max_cached_tokens, 1, MAX_CACHED_TOKENS)
        _within("max_spec_factor", self.max_spec_factor, 0.0, MAX_SPEC)
        _within("max_spec_offset", self.max_spec_offset, -MAX_SPEC, MAX_SPEC)
        _within("min_token_prob", self.min_token_prob, 0.0, 1.0)
        if (self.max_tree_depth - 1) * self.max_spec_factor + self.max_spec_offset < 1:
            raise ConfigError(
                f"max_spec_factor {self.max_spec_factor} and max_spec_offset {self.max_spec_offset} allow no draft "
                f"behind any match of up to {self.max_tree_depth - 1} tokens"
            )


@dataclass(frozen=True, slots=True)
class ArbitraryConfig:
    """Drafts whatever comes to hand, always as many ids as it may: for measuring."""

    method: ClassVar[str] = "arbitrary"

    num_speculative_tokens: int
    adaptive: bool = True
    """Verify as many drafts as pay, none included; else all."""

    def __post_init__(self) -> None:
        _within("num_speculative_tokens", self.num_speculative_tokens, 1, MAX_DRAFTS)


@dataclass(frozen=True, slots=True)
class NetworkConfig:
    """Drafts with a network: a smaller language model of the same tokenizer (draft_model)."""

    method: str
    """One of NETWORK_METHODS."""
    num_speculative_tokens: int
    model: str
    """Where its checkpoint is, in whatever words the caller knows models by."""
    adaptive: bool = True
    """Make and verify as many drafts as pay, none included; else always num_speculative_tokens."""

    def __post_init__(self) -> None:
        if self.method not in NETWORK_METHODS:
            raise ConfigError(f"method is {self.method!r}, which is none of {', '.join(NETWORK_METHODS)}")
        _within("num_speculative_tokens", self.num_speculative_tokens, 1, MAX_DRAFTS)
        if not self.model:
            raise ConfigError("model is empty; it says where the network's checkpoint is")


SpeculativeConfig = NgramConfig | SuffixConfig | ArbitraryConfig | NetworkConfig


def parse_speculative_config(value: str | Mapping[str, object]) -> SpeculativeConfig:
    """The config that a JSON text or an already parsed object describes. A key with value null counts as absent.

    Raises ConfigError naming the key that is unknown, unsupported, missing or out of range.
    """
    options = {key: given for key, given in as_mapping(value).items() if given is not None}
    method = _method(options)
    if method == "ngram":
        _check_keys(options, method, NGRAM_KEYS)
        read = _read_ngram
    elif method == "suffix":
        _check_keys(options, method, SUFFIX_KEYS)
        read = _read_suffix
    elif method == "arbitrary":
        _check_keys(options, method, ARBITRARY_KEYS)
        read = _read_arbitrary
    elif method in NETWORK_METHODS:
        _check_keys(options, str(method), NETWORK_KEYS)
        read = _read_network
    else:
        known = "it is not supported yet" if method in OTHER_METHODS else "there is no such method"
        raise ConfigError(f"speculative config: method is {method!r}, {known}; supported: {SUPPORTED}")
    try:
        return read(options)
    except ConfigError as error:
        raise ConfigError(f"speculative config: {error}") from None


def _read_ngram(options: Mapping[str, object]) -> SpeculativeConfig:
    """If only one of prompt_lookup_min and prompt_lookup_max is given, the other copies it."""
    if "num_speculative_tokens" not in options:
        raise ConfigError('num_speculative_tokens is missing; method "ngram" needs it')
    longest = options.get("prompt_lookup_max", options.get("prompt_lookup_min", DEFAULT_LOOKUP))
    shortest = options.get("prompt_lookup_min", longest)
    return NgramConfig(
        num_speculative_tokens=read_integer("num_speculative_tokens", options["num_speculative_tokens"]),
        prompt_lookup_min=read_integer("prompt_lookup_min", shortest),
        prompt_lookup_max=read_integer("prompt_lookup_max", longest),
        match=options.get("match", "rightmost"),  # type: ignore[arg-type]  # checked by NgramConfig
        adaptive=_boolean(ADAPTIVE, options.get(ADAPTIVE, True)),
    )


def _read_suffix(options: Mapping[str, object]) -> SpeculativeConfig:
    """num_speculative_tokens, if absent, is the tree's depth, as in vLLM: the match and the counts set the length."""
    depth = read_integer(
        SUFFIX_PREFIX + "max_tree_depth", options.get(SUFFIX_PREFIX + "max_tree_depth", DEFAULT_TREE_DEPTH)
    )
    given: dict[str, int | float] = {}
    for name in SUFFIX_OPTIONS:
        key = SUFFIX_PREFIX + name
        if key in options:
            counts = name in ("max_tree_depth", "max_cached_requests", "max_cached_tokens")
            given[name] = read_integer(key, options[key]) if counts else read_number(key, options[key])
    num_drafts = read_integer("num_speculative_tokens", options.get("num_speculative_tokens", depth))
    adaptive = _boolean(ADAPTIVE, options.get(ADAPTIVE, True))
    return SuffixConfig(num_drafts, adaptive=adaptive, **given)  # type: ignore[arg-type]  # ints where read_integer read


def _read_arbitrary(options: Mapping[str, object]) -> SpeculativeConfig:
    if "num_speculative_tokens" not in options:
        raise ConfigError('num_speculative_tokens is missing; method "arbitrary" needs it')
    return ArbitraryConfig(
        read_integer("num_speculative_tokens", options["num_speculative_tokens"]),
        _boolean(ADAPTIVE, options.get(ADAPTIVE, True)),
    )


def _read_network(options: Mapping[str, object]) -> SpeculativeConfig:
    method = options["method"]
    for key in ("model", "num_speculative_tokens"):
        if key not in options:
            raise ConfigError(f'{key} is missing; method "{method}" needs it')
    model = options["model"]
    if not isinstance(model, str):
        raise ConfigError(f"model must be a text, got {model!r}")
    return NetworkConfig(
        str(method),
        read_integer("num_speculative_tokens", options["num_speculative_tokens"]),
        model,
        _boolean(ADAPTIVE, options.get(ADAPTIVE, True)),
    )


def _check_keys(options: Mapping[str, object], method: str, keys: tuple[str, ...]) -> None:
    for key in options:
        if key in keys:
            continue
        if key in OTHER_KEYS or key in NGRAM_KEYS or key in SUFFIX_KEYS:
            raise ConfigError(f'speculative config: {key!r} is not supported with method "{method}"')
        raise ConfigError(f"speculative config: unknown key {key!r}; known: {', '.join(keys)}")


def as_mapping(value: str | Mapping[str, object]) -> Mapping[str, object]:
    """A config as an object. Raises ConfigError if the text is none."""
    if isinstance(value, Mapping):
        return value
    try:
        parsed = json.loads(value)
    except json.JSONDecodeError as error:
        raise ConfigError(f"speculative config is not valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ConfigError(f"speculative config must be a JSON object, got {value!r}")
    return parsed


def _method(options: Mapping[str, object]) -> object:
    """vLLM also takes "ngram" and "[ngram]" as the name of the draft model."""
    model, method = options.get("model"), options.get("method")
    if method is None and model not in ("ngram", "[ngram]"):
        named = "" if model is None else f", and model {model!r} alone does not say it"
        raise ConfigError(f"speculative config: method is missing{named}; supported: {SUPPORTED}")
    if method == "ngram" and model not in (None, "ngram", "[ngram]"):
        raise ConfigError(f'speculative config: model is {model!r}, but method "ngram" drafts without one')
    return "ngram" if method is None else method


def read_integer(name: str, value: object) -> int:
    """Raises ConfigError unless it is one."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be an integer, got {value!r}")
    return value


def _boolean(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, got {value!r}")
    return value


def read_number(name: str, value: object) -> float:
    """Raises ConfigError unless it is a finite one."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{name} must be a number, got {value!r}")
    return float(value)


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} must be in [{low}, {high}], got {value}")
