"""Text and bytes of the tokens that log-probabilities are given for.

A token may hold part of a character. Its bytes are always its own; its text is what it adds to the tokens before it:
empty while the character is incomplete, the whole character on the token that completes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lamella.engine.request import Logprob
from lamella.engine.text.detokenizer import Detokenizer
from lamella.engine.text.tokenizer import Tokenizer

_CONTEXT_LEN = 4
"""A character has at most four bytes, so at most three tokens before this one hold parts of it."""


class TokenLogprob(NamedTuple):
    """One candidate at one position."""

    token_id: int
    text: str
    bytes: bytes
    logprob: float


class PositionLogprobs(NamedTuple):
    """One position: the chosen token and the best ones."""

    chosen: TokenLogprob
    rank: int
    top: list[TokenLogprob]


def describe_logprobs(tokenizer: Tokenizer, logprob: Logprob, preceding_ids: Sequence[int]) -> PositionLogprobs:
    """Name the tokens of one position. preceding_ids: the sequence's tokens before it (the last few are enough)."""
    described = [
        TokenLogprob(id, token_text_after(tokenizer, id, preceding_ids), tokenizer.token_bytes(id), value)
        for id, value in zip(logprob.token_ids, logprob.logprobs)
    ]
    return PositionLogprobs(described[0], logprob.rank, described[1:])


def token_text_after(tokenizer: Tokenizer, token_id: int, preceding_ids: Sequence[int]) -> str:
    """What a token adds to the text of the tokens before it. Special tokens give their name."""
    pieces = tokenizer.pieces
    if pieces is None:
        return tokenizer.token_text(token_id)
    text = pieces.shown[token_id]
    if text is not None:
        return text
    stream = Detokenizer(tokenizer, preceding_ids[-_CONTEXT_LEN:], skip_special_tokens=False)
    return stream.push(token_id)
