"""From the ids of one sequence to what its reader gets: text, kept token ids, log-probabilities, the reason of the end.

    tokens   [0, released)            told to the reader: their text is certain
             [released, num_tokens)   wait: their text may be the beginning of a stop string
    text     [0, released_len) | held back by the detokenizer (half a character) or the stop checker

A token is told together with its text. So nothing of a stop string leaves, not even as an id or a log-probability, and
what a stream gives piece by piece is what the whole output holds. `num_tokens` counts all tokens up to the end, those
of the stop string included: they were computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from lamella.engine.request import Delta, FinishReason, Logprob, SamplingParams
from lamella.engine.text.detokenizer import Detokenizer
from lamella.engine.text.logprobs import PositionLogprobs, describe_logprobs
from lamella.engine.text.stop import StopChecker
from lamella.engine.text.tokenizer import Tokenizer

_CONTEXT_LEN = 4
"""Tokens before a position that its description may need."""


class Piece(msgspec.Struct, gc=False):
    """What one delta added, as far as it is certain."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None
    """One per token id; None unless asked for."""
    offsets: list[int] | None
    """Where in the whole text each token's text begins; None unless log-probabilities are asked for."""
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    """The stop string or stop id that ended it."""
    still_runs: bool
    """The end was found here: the core does not know of it and must be told to abort the sequence."""


class _Waiting(NamedTuple):
    token_id: int
    start: int
    logprob: Logprob | None


class OutputBuilder:
    """Takes the deltas of one sequence, gives pieces, and keeps the whole.

    `text`, `token_ids`, `logprobs` and `offsets` hold what was told; `finish_reason` is None until the end.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], params: SamplingParams, index: int = 0) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.logprobs: list[PositionLogprobs] | None = None if params.logprobs is None else []
        self.offsets: list[int] = []
        """Where in the text each token's text begins; filled if logprobs are asked for."""
        self.cumulative_logprob = 0.0
        self.num_tokens = 0
        """Tokens up to the end, whether told or not."""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._tokenizer = tokenizer
        self._context = list(prompt_ids[-_CONTEXT_LEN:])
        self._shows_stop = params.include_stop_str_in_output
        self._detokenizer: Detokenizer | None = None
        if params.detokenize:
            self._detokenizer = Detokenizer(tokenizer, prompt_ids, params.skip_special_tokens)
        self._checker: StopChecker | None = None
        if params.stop:
            self._checker = StopChecker(
                params.stop, include_stop_str=params.include_stop_str_in_output, min_tokens=params.min_tokens
            )
        self._plain = self._detokenizer is not None and self._checker is None and self.logprobs is None
        """Text goes out as it comes, so that a delta that ends nothing can take a short way."""
        self._parts: list[str] = []
        self._pushed_len = 0
        self._released_len = 0
        self._waiting: list[_Waiting] = []

    @property
    def text(self) -> str:
        """All text that was told."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def push(self, delta: Delta) -> Piece:
        """Take a delta. After the end nothing more may be pushed."""
        assert self.finish_reason is None
        if self._plain and delta.finish_reason is None:
            return self._push_plain(delta.token_ids)
        texts: list[str] = []
        last = len(delta.token_ids) - 1
        hidden = last if delta.finish_reason == "stop" and not self._shows_stop else None
        hit = None
        for i, token_id in enumerate(delta.token_ids):
            self.num_tokens += 1
            self._waiting.append(_Waiting(token_id, self._pushed_len, delta.logprobs[i] if delta.logprobs else None))
            text = "" if i == hidden or self._detokenizer is None else self._detokenizer.push(token_id)
            hit = self._take(text, texts)
            if hit is not None:
                break
        if hit is None and delta.finish_reason is not None:
            hit = self._flush(texts)
        if hit is not None:
            self.finish_reason, self.stop_reason = "stop", hit
        elif delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        released = "".join(texts) if len(texts) != 1 else texts[0]
        if released:
            self._parts.append(released)
        told = len(self.offsets)
        token_ids, logprobs = self._release(hit)
        return Piece(
            self.index,
            released,
            token_ids,
            logprobs,
            None if logprobs is None else self.offsets[told:],
            self.finish_reason,
            self.stop_reason,
            hit is not None and delta.finish_reason is None,
        )

    def _push_plain(self, token_ids: list[int]) -> Piece:
        """The same as below, for the usual case."""
        assert self._detokenizer is not None
        push = self._detokenizer.push
        text = push(token_ids[0]) if len(token_ids) == 1 else "".join([push(token_id) for token_id in token_ids])
        self.num_tokens += len(token_ids)
        self.token_ids += token_ids
        if text:
            self._parts.append(text)
            self._pushed_len += len(text)
            self._released_len = self._pushed_len
        return Piece(self.index, text, token_ids, None, None, None, None, False)

    def _take(self, text: str, texts: list[str]) -> str | None:
        """Pass text on as far as it is certain; the stop string if one completed."""
        self._pushed_len += len(text)
        stop = None
        if self._checker is not None:
            text, stop = self._checker.push(text, self.num_tokens)
        if text:
            texts.append(text)
            self._released_len += len(text)
        return stop

    def _flush(self, texts: list[str]) -> str | None:
        """The sequence ended in the core: pass on what was held back."""
        if self._detokenizer is not None:
            stop = self._take(self._detokenizer.flush(), texts)
            if stop is not None:
                return stop
        if self._checker is not None:
            rest = self._checker.flush()
            if rest:
                texts.append(rest)
                self._released_len += len(rest)
        return None

    def _release(self, hit: str | None) -> tuple[list[int], list[PositionLogprobs] | None]:
        """Move waiting tokens whose text is certain to the told ones; at the end drop the others."""
        waiting = self._waiting
        if self._checker is None or (self.finish_reason is not None and hit is None):
            count = len(waiting)
        else:
            # one that begins where the certain text ends may be the stop string's first
            count = 0
            while count < len(waiting) and waiting[count].start < self._released_len:
                count += 1
        told = waiting[:count]
        self._waiting = waiting[count:] if self.finish_reason is None else []
        token_ids = [token.token_id for token in told]
        logprobs: list[PositionLogprobs] | None = None
        if self.logprobs is not None:
            logprobs = [self._describe(token) for token in told]
            self.logprobs += logprobs
        self.token_ids += token_ids
        return token_ids, logprobs

    def _describe(self, token: _Waiting) -> PositionLogprobs:
        assert token.logprob is not None
        described = describe_logprobs(self._tokenizer, token.logprob, self._context)
        self._context = [*self._context[1 - _CONTEXT_LEN :], token.token_id]
        self.offsets.append(token.start)
        self.cumulative_logprob += described.chosen.logprob
        return described
