"""Text of a sequence while its tokens arrive.

    prompt ids | output ids ...                    only the output's text is given
               ^ primed: the prompt's tail decides on the first space and may end inside a character

Never gives half a character: bytes wait until the character is whole. Bytes that cannot become a character give U+FFFD,
an unfinished one does so at the end (`flush`). The pieces together are what `Tokenizer.decode` gives for all the ids.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from lamella.engine.text.pieces import PieceTable
from lamella.engine.text.tokenizer import Tokenizer

_MAX_CHARACTER_TOKENS = 8
"""Tokens of a prompt's tail that may hold parts of its last character (at most four bytes; some tokens are empty)."""


class Detokenizer:
    """The text stream of one sequence."""

    push: Callable[[int], str]
    """push(token_id) -> the text that became certain with this token; empty while a character is incomplete."""
    flush: Callable[[], str]
    """flush() -> what still waits, at the end of the sequence."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> None:
        stream: _ByteStream | _WindowStream
        if tokenizer.pieces is not None:
            stream = _ByteStream(tokenizer.pieces, prompt_ids, skip_special_tokens)
        else:
            stream = _WindowStream(tokenizer, prompt_ids, skip_special_tokens)
        self.push = stream.push
        self.flush = stream.flush


class _ByteStream:
    """For vocabularies with a piece table: each token's bytes follow those before."""

    def __init__(self, pieces: PieceTable, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._pieces = pieces
        self._texts = pieces.skipping if skip_special_tokens else pieces.shown
        self._decoder: codecs.IncrementalDecoder | None = None
        """Holds the bytes of an incomplete character; None while there are none."""
        self._may_strip = pieces.strips_leading_space and not any(self._texts[id] != "" for id in prompt_ids)
        """Nothing was written yet, and the vocabulary puts a space of its own in front of a text."""
        self._prime([id for id in prompt_ids[-_MAX_CHARACTER_TOKENS:] if self._texts[id] != ""])

    def push(self, token_id: int) -> str:
        text = self._texts[token_id]
        if text is None or self._decoder is not None or self._may_strip:
            return self._push_bytes(token_id, text)
        return text

    def flush(self) -> str:
        decoder, self._decoder = self._decoder, None
        return self._stripped(decoder.decode(b"", final=True)) if decoder is not None else ""

    def _push_bytes(self, token_id: int, text: str | None) -> str:
        if text is None or (text and self._decoder is not None):
            text = self._feed(self._pieces.bytes_of(token_id))
        return self._stripped(text)

    def _feed(self, piece: bytes) -> str:
        decoder = self._decoder or _new_decoder(errors="replace")
        text = decoder.decode(piece)
        self._decoder = decoder if decoder.getstate()[0] else None
        return text

    def _stripped(self, text: str) -> str:
        if not text or not self._may_strip:
            return text
        self._may_strip = False
        return text[1:] if text.startswith(" ") else text

    def _prime(self, tail: list[int]) -> None:
        if tail and self._texts[tail[-1]] is None:
            for id in tail:
                self._feed(self._pieces.bytes_of(id))


class _WindowStream:
    """For other decoders: a window of recent tokens is decoded with and without the new one, and the rest is the news.

    [prefix, read)  tokens whose text was given, kept so that the decoder sees what stands before
    [read, end)     tokens whose text still ends in an incomplete character
    """

    _CONTEXT_LEN = 5

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids = list(prompt_ids[-self._CONTEXT_LEN :])
        self._prefix = 0
        self._read = len(self._ids)

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._news()
        # A decoder's U+FFFD may still become a character, but not after four more tokens.
        if not text or (text.endswith("\ufffd") and len(self._ids) - self._read < 4):
            return ""
        self._advance()
        return text

    def flush(self) -> str:
        text = self._news()
        self._advance()
        return text

    def _news(self) -> str:
        before = self._decode(self._ids[self._prefix : self._read])
        return self._decode(self._ids[self._prefix :])[len(before) :]

    def _advance(self) -> None:
        del self._ids[: self._read]
        self._prefix, self._read = 0, len(self._ids)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)


_new_decoder = codecs.getincrementaldecoder("utf-8")
