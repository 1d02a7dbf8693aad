"""Fields that both generation endpoints share, and how they become SamplingParams.

A field that is absent or null takes the model's own default (generation_config), else that of the API.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from lamella.engine.errors import RequestError
from lamella.engine.request import MAX_LOGIT_BIAS, SamplingParams

MAX_TOKENS = 2**31 - 1


class StreamOptions(msgspec.Struct):
    """What a stream carries besides the text."""

    include_usage: bool | None = None
    """A last chunk with the usage and no choices."""
    continuous_usage_stats: bool | None = None
    """The usage so far with each chunk."""


class GenerationFields(msgspec.Struct, kw_only=True):
    """What a completion and a chat completion have in common."""

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    """Another name of max_tokens, which it wins over."""
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    use_prefix_cache: bool | None = None
    use_kv_tiers: bool | None = None
    disable_spec_decode: bool | None = None
    num_speculative_tokens: int | None = None
    spec_method: str | None = None


DIRECT = (
    "n",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "bad_words",
    "allowed_token_ids",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "seed",
    "prompt_logprobs",
    "skip_special_tokens",
    "disable_spec_decode",
    "num_speculative_tokens",
    "spec_method",
)
"""Fields that mean the same in SamplingParams."""


def asked_max_tokens(fields: GenerationFields, least: int) -> tuple[str | None, int | None]:
    """The field that limits the answer, and its value, at least `least`; None: no field says. Raises RequestError."""
    for name in ("max_completion_tokens", "max_tokens"):
        value: int | None = getattr(fields, name)
        if value is not None:
            if not least <= value <= MAX_TOKENS:
                raise RequestError(f"{name} must be in [{least}, {MAX_TOKENS}], got {value}", name)
            return name, value
    return None, None


def sampling_params(
    fields: GenerationFields,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    vocab_size: int,
    max_logprobs: int,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Checked parameters; max_tokens None: the model's default, else as many as fit. Raises RequestError naming the
    field.

    prompt_logprobs applies where the field of that name is absent.
    """
    values: dict[str, Any] = dict(defaults)
    for name in DIRECT:
        value = getattr(fields, name)
        if value is not None:
            values[name] = value
    if max_tokens is not None:
        values["max_tokens"] = max_tokens
    else:
        values.setdefault("max_tokens", None)
    if fields.stop is not None:
        values["stop"] = [fields.stop] if isinstance(fields.stop, str) else fields.stop
    if fields.logit_bias is not None:
        values["logit_bias"] = _biases(fields.logit_bias)
    values["logprobs"] = logprobs
    values.setdefault("prompt_logprobs", prompt_logprobs)
    params = SamplingParams(**values)
    params.validate(vocab_size, max_logprobs)
    return params


def check_stream_options(fields: GenerationFields) -> None:
    """Options of a stream without a stream are a mistake."""
    if fields.stream_options is not None and not fields.stream:
        raise RequestError("stream_options needs stream: true", "stream_options")
    if fields.stream and fields.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs does not go with stream", "prompt_logprobs")
    if fields.priority is not None and not -(2**31) <= fields.priority < 2**31:
        raise RequestError(f"priority must fit 32 bits, got {fields.priority}", "priority")


def _biases(given: dict[str, float]) -> dict[int, float]:
    if len(given) > MAX_LOGIT_BIAS:
        raise RequestError(f"logit_bias has {len(given)} entries, the limit is {MAX_LOGIT_BIAS}", "logit_bias")
    biases = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 12):
            raise RequestError(f"logit_bias has the key {key[:20]!r}, which is not a token id", "logit_bias")
        biases[int(key)] = value
    return biases
