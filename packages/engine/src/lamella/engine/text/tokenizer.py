"""Text to token ids and back, for one model's vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from lamella.engine.errors import RequestError, StartError
from lamella.engine.text.gguf_tokenizer import read_gguf
from lamella.engine.text.hf_tokenizer import read_folder
from lamella.engine.text.pieces import read_pieces
from lamella.engine.text.tokenizer_parts import TokenizerParts


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a model folder or a .gguf file; StartError naming what is missing and the remedy."""
    path = Path(path)
    if path.suffix.lower() == ".gguf" or path.is_file():
        return Tokenizer(read_gguf(path))
    if not path.exists():
        raise StartError(f"{path} does not exist; give a model folder or a .gguf file")
    return Tokenizer(read_folder(path))


class Tokenizer:
    """One vocabulary. Never changes after construction; safe to use from several threads.

    Ids outside the vocabulary (a model's output layer is often wider) have no text. Decoding with
    skip_special_tokens leaves out control tokens such as BOS or end of turn.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self.backend = parts.backend
        self.source = parts.source
        self.vocab_size = parts.vocab_size
        self.bos_id = parts.bos_id
        self.eos_ids = parts.eos_ids
        """Ids that end a sequence; the first one is the tokenizer's own EOS."""
        self.unk_id = parts.unk_id
        self.pad_id = parts.pad_id
        self.special_ids = parts.special_ids
        self.chat_templates: Mapping[str, str] = parts.chat_templates
        """Jinja sources by name; the usual one is called "default"."""
        self.pieces = read_pieces(parts.backend, parts.vocab_size, parts.special_ids)
        """Bytes of every token, None where the decoder joins tokens otherwise."""
        self._front: list[int] | None = None
        self._back: list[int] = []
        if parts.add_bos is not None or parts.add_eos is not None:
            self._front = [parts.bos_id] if parts.add_bos and parts.bos_id is not None else []
            self._back = [parts.eos_ids[0]] if parts.add_eos and parts.eos_ids else []

    @property
    def chat_template(self) -> str | None:
        """Source of the usual chat template."""
        return self.chat_templates.get("default")

    @property
    def eos_id(self) -> int | None:
        return self.eos_ids[0] if self.eos_ids else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text. Special tokens written in it are recognised.

        add_special_tokens puts BOS in front (and EOS behind) where the model's files say so. Raises RequestError for
        text that is not valid Unicode. Releases the interpreter lock while it works.
        """
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Ids of several texts, encoded side by side."""
        by_backend = add_special_tokens and self._front is None
        try:
            encoded = self.backend.encode_batch_fast(list(texts), add_special_tokens=by_backend)
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(f"text is not valid Unicode: {_surrogate(texts)}") from error
        if by_backend or not add_special_tokens or self._front is None:
            return [encoding.ids for encoding in encoded]
        return [[*self._front, *encoding.ids, *self._back] for encoding in encoded]

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence. Raises RequestError for negative ids."""
        ids = list(token_ids)
        if ids and min(ids) < 0:
            raise RequestError(f"token id {min(ids)} is negative", "tokens")
        if self.pieces is not None:
            return self.pieces.decode(ids, skip_special_tokens)
        known = [id for id in ids if id < self.vocab_size]
        return self.backend.decode(known, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text; part of a character is possible. Special tokens give their name."""
        if self.pieces is not None:
            return self.pieces.bytes_of(token_id)
        return self.token_text(token_id).encode()

    def token_text(self, token_id: int) -> str:
        """A token's text alone; bytes that are no whole character become U+FFFD."""
        if self.pieces is not None:
            return self.pieces.bytes_of(token_id).decode(errors="replace")
        return self.backend.decode([token_id], skip_special_tokens=False) if 0 <= token_id < self.vocab_size else ""

    def token_name(self, token_id: int) -> str | None:
        """How the vocabulary writes a token, None outside the vocabulary."""
        return self.backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def encode_bad_words(self, words: Iterable[str]) -> list[list[int]]:
        """Id sequences that must not be produced: each word at the start of a text or inside one, and after a space."""
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = word.lstrip() or word
            for ids in (self._encode_inside(bare), self._encode_inside(" " + bare), self.encode(bare, False)):
                if ids:
                    sequences[tuple(ids)] = None
        return [list(ids) for ids in sequences]

    def _encode_inside(self, text: str) -> list[int]:
        """Ids of a text that follows another, without the space that a vocabulary puts in front of every text."""
        before = self.encode("\n", False)
        ids = self.encode("\n" + text, False)
        if ids[: len(before)] == before:
            return ids[len(before) :]
        return self.encode(text, False)


def _surrogate(texts: Sequence[str]) -> str:
    for text in texts:
        if not isinstance(text, str):
            return f"expected a string, got {type(text).__name__}"
        for position, character in enumerate(text):
            if "\ud800" <= character <= "\udfff":
                return f"an unpaired surrogate U+{ord(character):04X} at position {position}"
    return "it cannot be encoded as UTF-8"
