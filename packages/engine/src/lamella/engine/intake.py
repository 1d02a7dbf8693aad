"""From what a caller asks to a Request: ids, limits, checks. Pure; both the server and the Python face use it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

import msgspec

from lamella.engine.errors import RequestError
from lamella.engine.packed import ids_below
from lamella.engine.request import Request, SamplingParams, check_spec_method, check_unicode
from lamella.engine.text.tokenizer import Tokenizer
from lamella.engine.wire import CoreInfo


class Intake:
    """Makes the requests of one client. Ids are unique within it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_model_len: int,
        vocab_size: int,
        spec_methods: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """vocab_size: the model's, which may be wider than the tokenizer's. spec_methods: what one may draft by."""
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.spec_methods = tuple(spec_methods)
        self._clock = clock
        self._numbers = itertools.count(1)

    @classmethod
    def of_engine(cls, tokenizer: Tokenizer, info: CoreInfo) -> Intake:
        """For the engine that says this of itself."""
        return cls(
            tokenizer,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            spec_methods=info.speculation.methods if info.speculation is not None else (),
        )

    def request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        add_special_tokens: bool = True,
        priority: int = 0,
        cache_salt: str | None = None,
        use_prefix_cache: bool = True,
        use_kv_tiers: bool = True,
        adapter: str | None = None,
        param: str = "prompt",
        max_tokens_param: str | None = None,
    ) -> Request:
        """A checked request for a text or for token ids. `param` names the prompt in errors. max_tokens_param: the
        field in which the client asked for max_tokens, which must then fit; None: cut to what fits.

        Raises RequestError for an empty prompt, one that the context does not hold, ids outside the vocabulary, and a
        spec_method that the engine does not have. The parameters must have been validated.
        """
        check_spec_method(params.spec_method, self.spec_methods)
        if isinstance(prompt, str):
            prompt_ids = self.tokenizer.encode(prompt, add_special_tokens)
        else:
            prompt_ids = self._checked_ids(prompt, param)
        if not prompt_ids:
            raise RequestError(f"{param} has no tokens", param)
        if cache_salt is not None:
            check_unicode("cache_salt", cache_salt)
        return Request(
            request_id=f"r{next(self._numbers):x}",
            prompt_ids=prompt_ids,
            params=self._normal(params),
            max_tokens=self._max_tokens(len(prompt_ids), params, param, max_tokens_param),
            eos_ids=list(self.tokenizer.eos_ids),
            bad_words_ids=self._bad_words(params),
            priority=priority,
            arrival_s=self._clock(),
            cache_salt=cache_salt,
            adapter=adapter,
            use_prefix_cache=use_prefix_cache,
            use_kv_tiers=use_kv_tiers,
        )

    def _checked_ids(self, prompt: Sequence[int], param: str) -> list[int]:
        try:
            return msgspec.convert(prompt, ids_below(self.vocab_size))  # type: ignore[no-any-return]
        except msgspec.ValidationError:
            ids = list(prompt)
            self._check_ids(ids, param)
            return ids

    def _check_ids(self, ids: list[int], param: str) -> None:
        """Say what is wrong with them."""
        if {type(token_id) for token_id in ids} - {int}:
            raise RequestError(f"{param} must hold integers", param)
        if ids and not (min(ids) >= 0 and max(ids) < self.vocab_size):
            wrong = next(token_id for token_id in ids if not 0 <= token_id < self.vocab_size)
            raise RequestError(f"{param} has token id {wrong}, valid ids are 0 to {self.vocab_size - 1}", param)

    def _max_tokens(self, prompt_len: int, params: SamplingParams, param: str, max_tokens_param: str | None) -> int:
        room = self.max_model_len - prompt_len
        if room < 0 or (room == 0 and params.max_tokens != 0):
            needed = "" if room < 0 else " and leaves no room for an output"
            raise RequestError(
                f"{param} has {prompt_len} tokens{needed}; the context holds {self.max_model_len} tokens, prompt and "
                "output together",
                param,
            )
        if max_tokens_param is not None and params.max_tokens is not None and params.max_tokens > room:
            raise RequestError(
                f"{max_tokens_param} is {params.max_tokens}, but only {room} tokens can follow the {prompt_len} of "
                f"{param}: the context holds {self.max_model_len}; ask for at most {room}, or shorten {param}",
                max_tokens_param,
            )
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        if params.min_tokens > max_tokens:
            raise RequestError(
                f"min_tokens is {params.min_tokens}, but only {max_tokens} tokens can follow the prompt's {prompt_len}",
                "min_tokens",
            )
        return max_tokens

    def _normal(self, params: SamplingParams) -> SamplingParams:
        """Off values in one spelling, and no more candidates than there are tokens."""
        changes: dict[str, int | None] = {}
        if params.seed == -1:
            changes["seed"] = None
        if params.top_k < 0 or params.top_k >= self.vocab_size:
            changes["top_k"] = 0
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            if value is not None and value > self.vocab_size:
                changes[name] = self.vocab_size
        return msgspec.structs.replace(params, **changes) if changes else params

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        if not params.bad_words:
            return []
        sequences = self.tokenizer.encode_bad_words(params.bad_words)
        if not sequences:
            raise RequestError("bad_words has no word that the vocabulary can write", "bad_words")
        return sequences
