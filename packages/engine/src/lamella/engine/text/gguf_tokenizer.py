"""A tokenizer from the metadata of a single GGUF file.

    tokenizer.ggml.model  gpt2    byte-level BPE: tokens, merges and the name of a pre-tokenizer (`pre_kinds`)
                          llama   SentencePiece BPE: pieces with scores, byte fallback
                          t5      SentencePiece Unigram: pieces with scores, perhaps a character map

SentencePiece BPE joins, again and again, the two neighbours whose joined piece has the best score. A merge list in
which every way to split a piece stands at the rank of that piece's score does the same, as long as scores differ (they
do in trained models: a piece's score is its negative rank).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers

from lamella.engine.errors import StartError
from lamella.engine.text.pre_kinds import pre_kind
from lamella.engine.text.tokenizer_parts import TokenizerParts
from lamella.runner_v2.errors import CheckpointError, UnsupportedError
from lamella.runner_v2.weights.gguf_file import GgufFile

logger = logging.getLogger(__name__)

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "\u2581"
_MODELS = ("gpt2", "llama", "t5")

# Control tokens that end a turn or a document, in the words of the chat formats in use. Files name one of them as EOS
# and often not the others.
_END_TOKENS = frozenset(
    {
        "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|endoftext|>", "<|end_of_text|>",
        "<end_of_turn>", "<end_of_utterance>", "<EOT>", "<eos>", "[EOT]", "<\uff5cend\u2581of\u2581sentence\uff5c>",
    }
)  # fmt: skip


def read_gguf(path: Path) -> TokenizerParts:
    """Raises StartError naming the file, key or value that cannot be used."""
    try:
        metadata = GgufFile(path).metadata()
    except (CheckpointError, UnsupportedError) as error:
        raise StartError(str(error)) from error
    return _Vocabulary(path, metadata).parts()


class _Vocabulary:
    """The tokenizer.* keys of one file."""

    def __init__(self, path: Path, metadata: Mapping[str, Any]) -> None:
        self._path = path
        self._metadata = metadata
        self._model = self._get("model", str)
        if self._model is None:
            raise StartError(
                f"{path} has no tokenizer (tokenizer.ggml.model); use the model's folder with tokenizer.json"
            )
        if self._model not in _MODELS:
            raise StartError(f"{path} has a tokenizer of the model {self._model!r}; known: {', '.join(_MODELS)}")
        self._tokens = self._unique(self._get("tokens", list) or [])
        if not self._tokens:
            raise StartError(f"{path} has no vocabulary (tokenizer.ggml.tokens)")
        try:
            "".join(self._tokens).encode()
        except UnicodeEncodeError as error:
            raise StartError(f"{path} is damaged: its vocabulary holds a token that is not UTF-8") from error
        types = self._get("token_type", list)
        self._types: list[int] = self._sized("token_type", types) if types else [_NORMAL] * len(self._tokens)
        self._ids_by_type: dict[int, list[int]] = {}
        for id, type in enumerate(self._types):
            self._ids_by_type.setdefault(type, []).append(id)

        self._kind = pre_kind(self._pre_name()) if self._model == "gpt2" else None

    def parts(self) -> TokenizerParts:
        spm = self._model == "llama"
        backend = {"gpt2": self._byte_level, "llama": self._scored_merges, "t5": self._unigram}[self._model]()
        self._add_tokens(backend)
        bos_id = self._special("bos_token_id", 1 if spm else None)
        eos_id = self._special("eos_token_id", 2 if spm else 1 if self._model == "t5" else None)
        add_bos = self._get("add_bos_token", bool)
        add_eos = self._get("add_eos_token", bool)
        add_bos = add_bos if add_bos is not None else spm or (self._kind is not None and self._kind.add_bos)
        add_eos = add_eos if add_eos is not None else self._model == "t5"
        if add_bos and bos_id is None:
            raise StartError(f"{self._path} asks for BOS in front of prompts but names no tokenizer.ggml.bos_token_id")
        return TokenizerParts(
            backend=backend,
            source=str(self._path),
            vocab_size=len(self._tokens),
            bos_id=bos_id,
            eos_ids=self._end_ids(eos_id),
            unk_id=self._unk_id(),
            pad_id=self._special("padding_token_id", None),
            add_bos=add_bos,
            add_eos=add_eos and eos_id is not None,
            special_ids=frozenset(self._of_type(_UNKNOWN, _CONTROL, _UNUSED))
            | ({eos_id} if eos_id is not None else set()),
            chat_templates=self._chat_templates(),
        )

    def _byte_level(self) -> tokenizers.Tokenizer:
        assert self._kind is not None
        merges = self._get("merges", list)
        if merges is None:
            raise StartError(f"{self._path} has a gpt2 tokenizer without tokenizer.ggml.merges")
        model = self._build(
            models.BPE,
            vocab={token: id for id, token in enumerate(self._tokens)},
            merges=[_pair(merge) for merge in merges],
            ignore_merges=self._kind.ignore_merges,
        )
        backend = tokenizers.Tokenizer(model)
        normalizer = self._kind.normalizer()
        if normalizer is not None:
            backend.normalizer = normalizer
        backend.pre_tokenizer = self._kind.pre_tokenizer()
        backend.decoder = decoders.ByteLevel()
        return backend

    def _scored_merges(self) -> tokenizers.Tokenizer:
        vocab = {token: id for id, token in enumerate(self._tokens)}
        pieces = {self._tokens[id] for id in self._of_type(_NORMAL, _USER_DEFINED, _UNUSED)}
        # A character may stand in pieces though it is no piece itself, only a byte (Gemma's tab): its id is the byte's.
        for character in set("".join(pieces)) - pieces:
            id = vocab.get(f"<0x{ord(character):02X}>") if character.isascii() else None
            if id is not None:
                vocab[character] = id
                pieces.add(character)
        scores = self._scores()
        unk_id = self._unk_id()
        model = self._build(
            models.BPE,
            vocab=vocab,
            merges=_merges_by_score(pieces, dict(zip(self._tokens, scores))),
            unk_token=self._tokens[unk_id] if unk_id is not None else None,
            fuse_unk=True,
            byte_fallback=self._has_all_bytes(),
        )
        return self._with_spaces(tokenizers.Tokenizer(model))

    def _unigram(self) -> tokenizers.Tokenizer:
        scores = self._scores()
        unused = min(scores) - 1000.0  # never on the best path
        vocab = [
            (token, unused if type == _UNUSED else score)
            for token, score, type in zip(self._tokens, scores, self._types)
        ]
        model = self._build(models.Unigram, vocab, self._unk_id(), self._has_all_bytes())
        return self._with_spaces(tokenizers.Tokenizer(model))

    def _with_spaces(self, backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
        """SentencePiece's treatment of spaces, in front of the model and behind it."""
        steps: list[Any] = []
        character_map = self._get("precompiled_charsmap", list)
        if character_map:
            steps.append(normalizers.Precompiled(bytes(value & 0xFF for value in character_map)))
        if self._get("remove_extra_whitespaces", bool):
            steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Replace(Regex(r"\A | \z"), "")]
        prefix = self._adds_space()
        if prefix:
            steps.append(normalizers.Prepend(_SPACE))
        steps.append(normalizers.Replace(" ", _SPACE))
        backend.normalizer = normalizers.Sequence(steps)
        decoding: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        if prefix:
            decoding.append(decoders.Strip(" ", 1, 0))
        backend.decoder = decoders.Sequence(decoding)
        return backend

    def _add_tokens(self, backend: tokenizers.Tokenizer) -> None:
        """Control and user-defined tokens are found in text before anything else happens to it.

        User-defined pieces hold spaces as spaces. Without a space put in front, they are looked for in the normalized
        text as SentencePiece does; with one, in the raw text, as every piece of text would get its own space.
        """
        in_normalized = self._model != "gpt2" and not self._adds_space()
        control = [self._tokens[id] for id in self._of_type(_CONTROL, _UNKNOWN)]
        backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
        defined = [self._tokens[id] for id in self._of_type(_USER_DEFINED)]
        backend.add_tokens([AddedToken(token, normalized=in_normalized, special=False) for token in defined])

    def _end_ids(self, eos_id: int | None) -> tuple[int, ...]:
        named = [eos_id, self._special("eot_token_id", None), self._special("eom_token_id", None)]
        known = [id for id in self._of_type(_CONTROL) if self._tokens[id] in _END_TOKENS]
        return tuple(dict.fromkeys(id for id in (*named, *known) if id is not None))

    def _chat_templates(self) -> dict[str, str]:
        prefix = "tokenizer.chat_template"
        templates = {}
        for key in self._metadata:
            if (key == prefix or key.startswith(prefix + ".")) and isinstance(self._metadata[key], str):
                templates[key[len(prefix) + 1 :] or "default"] = self._metadata[key]
        return templates

    def _pre_name(self) -> str:
        name = self._get("pre", str)
        if name is None:
            logger.warning(
                "%s does not name its pre-tokenizer: words may be cut otherwise than in training", self._path
            )
            return "default"
        return str(name)

    def _adds_space(self) -> bool:
        flag = self._get("add_space_prefix", bool)
        return True if flag is None else bool(flag)

    def _scores(self) -> list[float]:
        scores = self._get("scores", list)
        if scores is None:
            raise StartError(f"{self._path} has a {self._model} tokenizer without tokenizer.ggml.scores")
        return self._sized("scores", scores)

    def _has_all_bytes(self) -> bool:
        return len(self._of_type(_BYTE)) >= 256

    def _unk_id(self) -> int | None:
        unknown = self._of_type(_UNKNOWN)
        return self._special("unknown_token_id", unknown[0] if unknown else None)

    def _of_type(self, *types: int) -> list[int]:
        return sorted(id for type in types for id in self._ids_by_type.get(type, ()))

    def _special(self, key: str, default: int | None) -> int | None:
        id = self._get(key, int)
        if id is None:
            return default
        if not 0 <= id < len(self._tokens):
            logger.warning("%s: tokenizer.ggml.%s is %d, outside the vocabulary: ignored", self._path, key, id)
            return default
        return int(id)

    def _sized(self, key: str, values: list[Any]) -> list[Any]:
        if len(values) < len(self._tokens):
            raise StartError(
                f"{self._path}: tokenizer.ggml.{key} has {len(values)} entries for a vocabulary of {len(self._tokens)}"
            )
        return values[: len(self._tokens)]

    def _unique(self, tokens: list[str]) -> list[str]:
        """Every id keeps a name of its own: empty and repeated tokens are reachable by id only."""
        if len(set(tokens)) == len(tokens) and "" not in tokens:
            return tokens
        seen: set[str] = set()
        names = []
        for id, token in enumerate(tokens):
            name = token if token and token not in seen else f"[UNNAMED_{id}]"
            seen.add(name)
            names.append(name)
        return names

    def _get(self, key: str, kind: type) -> Any:
        """The value of tokenizer.ggml.KEY, None where it is missing; StartError where it is of another type."""
        value = self._metadata.get("tokenizer.ggml." + key)
        if value is not None and not isinstance(value, kind):
            raise StartError(
                f"{self._path}: tokenizer.ggml.{key} must be {kind.__name__}, the file has {type(value).__name__}"
            )
        return value

    def _build(self, build: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return build(*args, **kwargs)
        except Exception as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise StartError(f"{self._path}: the vocabulary and its merges contradict each other: {reason}") from error


def _pair(merge: str) -> tuple[str, str]:
    """The two sides of a merge; the first may begin with a space, which then does not part them."""
    left, _, right = merge.partition(" ")
    if left:
        return left, right
    left, _, right = merge[1:].partition(" ")
    return " " + left, right


def _merges_by_score(pieces: set[str], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Every split of every piece into two pieces, best score first; of one piece, the longest left side first.

    Characters that are pieces only for being bytes have no score, and no split either.
    """
    merges = []
    order = sorted((piece for piece in scores if piece in pieces), key=scores.__getitem__, reverse=True)
    for piece in order:
        for cut in range(len(piece) - 1, 0, -1):
            left = piece[:cut]
            if left in pieces:  # most are not; so the other side is cut off only then
                right = piece[cut:]
                if right in pieces:
                    merges.append((left, right))
    return merges
