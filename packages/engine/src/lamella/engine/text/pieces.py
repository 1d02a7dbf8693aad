"""What each token adds to a text, in bytes.

Two ways of writing tokens cover the models in use: byte-level (every byte is one printable character) and SentencePiece
(a lower bar for a space, <0xNN> for a byte). With either, a text is the UTF-8 reading of its tokens' bytes in a row,
so a stream needs no look at earlier tokens. Other decoders (word pieces, say) have no such table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import tokenizers

_SPACE = "\u2581"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_characters() -> dict[str, int]:
    """The byte that each character of a byte-level token stands for.

    Printable Latin-1 stands for itself; the other 68 bytes take the characters from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_characters()


class TextMap(dict[int, str | None]):
    """id -> text of a token, filled as ids are met; None where its bytes are not whole characters.

    Ids outside the vocabulary, and skipped ids, have no text.
    """

    def __init__(self, pieces: PieceTable, skipped: frozenset[int]) -> None:
        super().__init__()
        self._pieces = pieces
        self._skipped = skipped

    def __missing__(self, token_id: int) -> str | None:
        if not 0 <= token_id < self._pieces.vocab_size:
            return ""
        text: str | None
        if token_id in self._skipped:
            text = ""
        else:
            try:
                text = self._pieces.bytes_of(token_id).decode()
            except UnicodeDecodeError:
                text = None
        self[token_id] = text
        return text


class PieceTable:
    """Bytes of every token of one vocabulary."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        vocab_size: int,
        special_ids: frozenset[int],
        *,
        byte_level: bool,
        strips: bool,
    ) -> None:
        self._backend = backend
        self._byte_level = byte_level
        self._added = frozenset(backend.get_added_tokens_decoder())
        self._special_ids = special_ids
        self.vocab_size = vocab_size
        self.strips_leading_space = strips
        """The first space of a text was put there by the tokenizer, and is taken away again."""
        self.shown = TextMap(self, frozenset())
        """Texts, special tokens included."""
        self.skipping = TextMap(self, special_ids)
        """Texts without special tokens."""

    def bytes_of(self, token_id: int) -> bytes:
        """Empty for ids outside the vocabulary."""
        token = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        if token is None:
            return b""
        if self._byte_level:
            if token_id not in self._added:
                try:
                    return bytes([_BYTE_OF[character] for character in token])
                except KeyError:
                    pass  # a token that was not written byte by byte is its own text
            return token.encode()
        byte = _BYTE.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE, " ").encode()

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool) -> str:
        """The text of a whole sequence; bytes that are no UTF-8 become U+FFFD."""
        texts = self.skipping if skip_special_tokens else self.shown
        skipped = self._special_ids if skip_special_tokens else frozenset()
        ids = list(token_ids)
        parts = [texts[id] for id in ids]
        if None in parts:
            text = b"".join(self.bytes_of(id) for id in ids if id not in skipped).decode(errors="replace")
        else:
            text = "".join(part for part in parts if part)
        return text[1:] if self.strips_leading_space and text.startswith(" ") else text


def read_pieces(backend: tokenizers.Tokenizer, vocab_size: int, special_ids: frozenset[int]) -> PieceTable | None:
    """The table of a vocabulary, None where its decoder joins tokens in another way."""
    if backend.decoder is None:
        return None
    steps = _steps(json.loads(backend.decoder.__getstate__()))
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return PieceTable(backend, vocab_size, special_ids, byte_level=True, strips=False)
    if not steps or not _is_replaced_space(steps[0]):
        return None
    rest = steps[1:]
    strips = bool(rest) and rest[-1] == {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    if strips:
        rest = rest[:-1]
    if [step["type"] for step in rest] != ["ByteFallback", "Fuse"]:
        return None
    return PieceTable(backend, vocab_size, special_ids, byte_level=False, strips=strips)


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _steps(inner)]


def _is_replaced_space(step: dict[str, Any]) -> bool:
    return step["type"] == "Replace" and step.get("pattern") == {"String": _SPACE} and step.get("content") == " "
