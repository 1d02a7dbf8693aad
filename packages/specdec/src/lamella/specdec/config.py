"""Options of speculative decoding, in the words of vLLM's `--speculative-config`.

    {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}

Every key is used or refused by name: nothing is accepted and ignored. `match` is our own key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lamella.specdec.errors import ConfigError

Match = Literal["rightmost", "earliest"]

MAX_DRAFTS = 128
MAX_LOOKUP = 64
DEFAULT_LOOKUP = 5

NGRAM_KEYS = ("method", "model", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min", "match")

OTHER_METHODS = (
    "ngram_gpu", "suffix", "draft_model", "eagle", "eagle3", "mtp", "medusa", "mlp_speculator", "dflash", "dspark",
    "custom_class", "extract_hidden_states",
)  # fmt: skip
"""Names of methods that exist elsewhere."""

OTHER_KEYS = (
    "draft_tensor_parallel_size", "quantization", "moe_backend", "attention_backend", "kv_cache_dtype", "max_model_len",
    "revision", "code_revision", "draft_load_config", "rejection_sample_method", "draft_sample_method",
    "synthetic_acceptance_rates", "synthetic_acceptance_length", "parallel_drafting",
    "num_speculative_tokens_per_batch_size", "enable_adaptive_verification", "use_local_argmax_reduction",
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

    num_speculative_tokens: int
    prompt_lookup_min: int = DEFAULT_LOOKUP
    prompt_lookup_max: int = DEFAULT_LOOKUP
    match: Match = "rightmost"

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


def parse_speculative_config(value: str | Mapping[str, object]) -> NgramConfig:
    """The config that a JSON text or an already parsed object describes. A key with value null counts as absent.

    Raises ConfigError naming the key that is unknown, unsupported, missing or out of range. If only one of
    prompt_lookup_min and prompt_lookup_max is given, the other copies it.
    """
    options = {key: given for key, given in _as_mapping(value).items() if given is not None}
    method = _method(options)
    if method != "ngram":
        known = "it is not supported yet" if method in OTHER_METHODS else "there is no such method"
        raise ConfigError(f'speculative config: method is {method!r}, {known}; supported: "ngram"')
    for key in options:
        if key in OTHER_KEYS:
            raise ConfigError(f'speculative config: {key!r} is not supported with method "ngram"')
        if key not in NGRAM_KEYS:
            raise ConfigError(f"speculative config: unknown key {key!r}; known: {', '.join(NGRAM_KEYS)}")
    if "num_speculative_tokens" not in options:
        raise ConfigError('speculative config: num_speculative_tokens is missing; method "ngram" needs it')
    longest = options.get("prompt_lookup_max", options.get("prompt_lookup_min", DEFAULT_LOOKUP))
    shortest = options.get("prompt_lookup_min", longest)
    try:
        return NgramConfig(
            num_speculative_tokens=_integer("num_speculative_tokens", options["num_speculative_tokens"]),
            prompt_lookup_min=_integer("prompt_lookup_min", shortest),
            prompt_lookup_max=_integer("prompt_lookup_max", longest),
            match=options.get("match", "rightmost"),  # type: ignore[arg-type]  # checked by NgramConfig
        )
    except ConfigError as error:
        raise ConfigError(f"speculative config: {error}") from None


def _as_mapping(value: str | Mapping[str, object]) -> Mapping[str, object]:
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
    model = options.get("model")
    if model is not None and model not in ("ngram", "[ngram]"):
        raise ConfigError(f"speculative config: model is {model!r}, but draft models are not supported yet")
    if "method" not in options and model is None:
        raise ConfigError('speculative config: method is missing; supported: "ngram"')
    return options.get("method", "ngram")


def _integer(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be an integer, got {value!r}")
    return value


def _within(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} must be in [{low}, {high}], got {value}")
