"""What a client asks, and what it gets back while it runs: plain data that crosses the process border.

A request owns n sequences (index 0 .. n-1). No torch here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from lamella.engine.errors import RequestError

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_N = 128
MAX_STOP = 64
MAX_STOP_CHARS = 16_384
"""Of all stop strings together, and of all bad words together."""
MAX_STOP_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_IDS = 1024
MAX_BAD_WORDS = 256
MAX_LOGPROBS = 20


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to sample, in the terms that users know.

    Off values: top_k 0 or -1, top_p 1, min_p 0, penalties 1/0/0; temperature 0 means greedy. max_tokens None: as many
    as the context holds; where it holds fewer than max_tokens, the answer ends there, with finish_reason "length" (over
    HTTP a request that asks for more is refused). logprobs/prompt_logprobs: None = none, k = the k best and the chosen
    token, -1 = all. seed -1 is none, as None is. The model's own defaults apply where no SamplingParams are given.

    Speculation, on an engine that has it: disable_spec_decode, or num_speculative_tokens 0, turns it off for this
    request; num_speculative_tokens is the largest number of drafts in a step, up to the engine's own; spec_method is
    the one of its methods to draft by. By the standard rule of keeping drafts none of them changes a token.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    disable_spec_decode: bool = False
    num_speculative_tokens: int | None = None
    spec_method: str | None = None

    def typed(self) -> SamplingParams:
        """The same with every field of its type: Python checks none when it makes one. A text given for stop or
        bad_words is the only entry of its list. Raise RequestError naming the first field of another type."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        for name in ("stop", "bad_words"):
            if isinstance(fields[name], str):
                fields[name] = [fields[name]]
        try:
            return msgspec.convert(fields, SamplingParams)
        except msgspec.ValidationError as error:
            what, _, where = str(error).partition(" - at ")
            found = re.search(r"\$\.(\w+)", where)
            name = found.group(1) if found else "sampling_params"
            raise RequestError(f"{name}: {what[:1].lower()}{what[1:]}", name) from None

    def validate(self, vocab_size: int | None = None, max_logprobs: int = MAX_LOGPROBS) -> None:
        """Raise RequestError naming the first field that is out of range. max_logprobs -1: any number, and all."""
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise RequestError(f"{name} must be a finite number, got {getattr(self, name)}", name)
        _within("n", self.n, 1, MAX_N)
        if self.max_tokens is not None:
            _within("max_tokens", self.max_tokens, 0, 2**31 - 1)
        _within("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}", "min_tokens")
        _within("temperature", self.temperature, 0.0, 100.0)
        _within("top_k", self.top_k, -1, 2**31 - 1)
        if not 0.0 < self.top_p <= 1.0:
            raise RequestError(f"top_p must be in (0, 1], got {self.top_p}", "top_p")
        _within("min_p", self.min_p, 0.0, 1.0)
        # smaller ones push logits out of what a float holds
        _within("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        if self.n > 1 and self.temperature < 1e-5:
            raise RequestError(f"n is {self.n}, but temperature 0 would give the same answer each time", "n")
        if self.seed is not None:
            _within("seed", self.seed, -(2**63), 2**63 - 1)
        _count("stop", self.stop, MAX_STOP)
        if any(not s for s in self.stop):
            raise RequestError("stop must not contain an empty string", "stop")
        _chars("stop", self.stop)
        if self.stop and not self.detokenize:
            raise RequestError("stop needs detokenize: strings are found in text", "stop")
        _count("stop_token_ids", self.stop_token_ids, MAX_STOP_IDS)
        _ids("stop_token_ids", self.stop_token_ids, vocab_size)
        if self.logit_bias is not None:
            _count("logit_bias", self.logit_bias, MAX_LOGIT_BIAS)
            _ids("logit_bias", self.logit_bias, vocab_size)
            for value in self.logit_bias.values():
                if not -100.0 <= value <= 100.0:
                    raise RequestError(f"logit_bias values must be in [-100, 100], got {value}", "logit_bias")
        if self.bad_words is not None:
            _count("bad_words", self.bad_words, MAX_BAD_WORDS)
            if any(not w for w in self.bad_words):
                raise RequestError("bad_words must not contain an empty string", "bad_words")
            _chars("bad_words", self.bad_words)
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise RequestError("allowed_token_ids must not be empty", "allowed_token_ids")
            _count("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_IDS)
            _ids("allowed_token_ids", self.allowed_token_ids, vocab_size)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                check_logprobs(name, value, max_logprobs)
        if self.num_speculative_tokens is not None:
            _within("num_speculative_tokens", self.num_speculative_tokens, 0, 2**31 - 1)
        for name in ("num_speculative_tokens", "spec_method"):
            if self.disable_spec_decode and getattr(self, name):
                raise RequestError(
                    f"{name} is {getattr(self, name)!r}, but disable_spec_decode turns drafts off: leave one out", name
                )


def check_spec_method(name: str | None, methods: Sequence[str]) -> None:
    """Raise RequestError for a spec_method that is none of the engine's."""
    if name is None or name in methods:
        return
    if not methods:
        raise RequestError(
            f"spec_method is {name!r:.100}, but this engine has no speculation: leave it out, or start the engine with "
            "--speculative-config (speculative_config in Python)",
            "spec_method",
        )
    raise RequestError(
        f"spec_method is {name!r:.100}, but this engine drafts by {', '.join(methods)}: name one of them", "spec_method"
    )


def draft_limit(params: SamplingParams, max_drafts: int, *, exact: bool) -> tuple[int, str | None]:
    """Most drafts of a sequence in a step, and why there are none, if so: "request" (it asks for none) or "logprobs".

    exact: the engine keeps drafts by the standard rule. Under another one a draft may stand that the target did not
    choose, of which there are no log-probabilities.
    """
    if params.disable_spec_decode or params.num_speculative_tokens == 0:
        return 0, "request"
    if not exact and params.logprobs is not None:
        return 0, "logprobs"
    asked = params.num_speculative_tokens
    return (max_drafts if asked is None else min(asked, max_drafts)), None


def check_logprobs(name: str, value: int, max_logprobs: int) -> None:
    """Raise RequestError for more than max_logprobs. -1 stands for all, in both."""
    if max_logprobs == -1:
        _within(name, value, -1, 2**31 - 1)
    elif value == -1:
        raise RequestError(f"{name} -1 (all) is not allowed here, the limit is {max_logprobs}", name)
    else:
        _within(name, value, 0, max_logprobs)


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise RequestError(f"{name} must be in [{low}, {high}], got {value}", name)


def _count(name: str, values: Any, limit: int) -> None:
    if len(values) > limit:
        raise RequestError(f"{name} has {len(values)} entries, the limit is {limit}", name)


def _chars(name: str, values: list[str]) -> None:
    length = sum(len(value) for value in values)
    if length > MAX_STOP_CHARS:
        raise RequestError(f"{name} has {length} characters in all, the limit is {MAX_STOP_CHARS}", name)
    for value in values:
        check_unicode(name, value)


def check_unicode(name: str, text: str) -> None:
    """Raise RequestError for half a surrogate pair: nothing can be encoded that holds one."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name} is not valid Unicode: an unpaired surrogate U+{ord(text[error.start]):04X} at position "
            f"{error.start}",
            name,
        ) from None


def _ids(name: str, values: Any, vocab_size: int | None) -> None:
    for value in values:
        if value < 0 or (vocab_size is not None and value >= vocab_size):
            raise RequestError(f"{name} has token id {value}, valid ids are 0 to {(vocab_size or 2**31) - 1}", name)


class Request(msgspec.Struct, array_like=True, gc=False):
    """What goes to the core. Fields are only ever appended: the encoding is positional."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    max_tokens: int
    """Resolved: at most what the context holds behind the prompt; 0: only score the prompt."""
    eos_ids: list[int]
    bad_words_ids: list[list[int]] = []
    priority: int = 0
    """Lower is sooner."""
    arrival_s: float = 0.0
    cache_salt: str | None = None
    adapter: str | None = None
    use_prefix_cache: bool = True
    """False: neither reads the prefix cache nor leaves blocks in it."""
    use_kv_tiers: bool = True
    """False: the tiers below the device neither serve nor keep its blocks."""


class Logprob(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities at one position: the chosen token first, then the best ones."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class Delta(msgspec.Struct, array_like=True, gc=False):
    """What a step added to one sequence of a request."""

    request_id: str
    index: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    """The stop or end id that ended it; None for an end-of-sequence id."""
    logprobs: list[Logprob] | None = None
    prompt_logprobs: list[Logprob | None] | None = None
    """Once, with the first delta; the first entry is None."""
    cached_len: int = 0
    """Prompt tokens that the prefix cache gave; with the first delta."""
    error: str | None = None
    queued_s: float = 0.0
    """Seconds from arrival in the core to the first step; with the first delta."""
    prefill_s: float = 0.0
    """Seconds from the first step to the first token; with the first delta."""
    error_status: int = 500
    """What an HTTP client sees of the error: 400 if the request itself is to blame, 503 if it came at a bad time."""
    restored_len: int = 0
    """Prompt tokens among cached_len that came from a tier below the device; with the first delta."""
    restore_s: float = 0.0
    """Seconds that the request waited for them before it was admitted; with the first delta."""
    accepted_drafts: int = 0
    """Of token_ids, those that had been drafted."""
    rejected_drafts: int = 0
    """Drafts that were verified in this step and did not stand."""
    draft_rule: str | None = None
    """The rule by which drafts are kept, where that is not the target's law; with the first delta."""
