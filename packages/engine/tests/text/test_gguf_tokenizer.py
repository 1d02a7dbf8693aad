"""GGUF vocabularies against the tokenizers they come from."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers

from lamella.engine.errors import StartError
from lamella.engine.text.pre_kinds import known_pre_kinds, pre_kind
from lamella.engine.text.tokenizer import load_tokenizer

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"


def _split(*patterns: str) -> list[Any]:
    return [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]


def _bytes(use_regex: bool = False) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _sequence(*steps: Any) -> Any:
    return pre_tokenizers.Sequence(list(steps))


def _digits() -> Any:
    return pre_tokenizers.Digits(individual_digits=True)


# The pre-tokenizers as the tokenizer.json files of these families have them, written out.
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
ORIGINALS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gpt-2": (_bytes(use_regex=True), None, {}),
    "smollm": (_sequence(_digits(), _bytes(use_regex=True)), None, {}),
    "starcoder": (_sequence(_digits(), _bytes(use_regex=True)), None, {}),
    "command-r": (_sequence(_digits(), _bytes(use_regex=True)), normalizers.NFC(), {}),
    "llama-bpe": (_sequence(*_split(LLAMA3), _bytes()), None, {"ignore_merges": True}),
    "qwen2": (_sequence(*_split(QWEN2), _bytes()), normalizers.NFC(), {}),
    "tekken": (_sequence(*_split(TEKKEN), _bytes()), None, {"ignore_merges": True}),
    "gpt-4o": (_sequence(*_split(GPT4O), _bytes()), None, {"ignore_merges": True}),
    "deepseek-v3": (_sequence(*_split(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK3), _bytes()), None, {}),
    "deepseek-coder": (
        _sequence(*_split(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+"), _digits(), _bytes()),
        None,
        {},
    ),
}


@pytest.mark.parametrize("pre", sorted(ORIGINALS))
def test_byte_level_equals_the_original(
    pre: str,
    train_byte_level: Callable[..., tokenizers.Tokenizer],
    byte_level_gguf: Callable[..., Path],
    corpus: list[str],
) -> None:
    pre_tokenizer, normalizer, options = ORIGINALS[pre]
    original = train_byte_level(pre_tokenizer, normalizer, **options)
    tokenizer = load_tokenizer(byte_level_gguf(original, pre, bos_token_id=0, eos_token_id=1))
    for text in [*corpus, "a <tool> b<|im_end|>c", "<s>x</s>"]:
        ids = original.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == original.decode(ids, skip_special_tokens=skip)


def test_every_kind_can_be_used(
    train_byte_level: Callable[..., tokenizers.Tokenizer], byte_level_gguf: Callable[..., Path], corpus: list[str]
) -> None:
    original = train_byte_level(_bytes(use_regex=True))
    for pre in known_pre_kinds():
        tokenizer = load_tokenizer(byte_level_gguf(original, pre, bos_token_id=0, eos_token_id=1))
        for text in corpus:
            nfc = pre_kind(pre).normalizer()
            expected = nfc.normalize_str(text) if nfc is not None else text
            assert tokenizer.decode(tokenizer.encode(text)) == expected, pre


def test_deepseek_llm_cuts_as_its_alphabet_says() -> None:
    def words(text: str) -> list[str]:
        pieces = pre_kind("deepseek-llm").pre_tokenizer().pre_tokenize_str(text)
        return [text[start:end] for _, (start, end) in pieces]

    assert words("Äöü ΑΒΓ word 中文12 한국") == ["Äöü", " ΑΒΓ", " word", " ", "中文", "1", "2", " ", "한국"]
    assert words("a\n\nb!? c。") == ["a", "\n", "\n", "b", "!?", " c", "。"]
    assert words("Ǆʓ\u0481 \ufb00𞤀") == ["Ǆʓ\u0481", " \ufb00𞤀"]
    assert words("Äℂ\u1f7d中") == ["Ä", "ℂ\u1f7d", "中"], "the list of Asian characters spans some letters too"
    assert words("ǃʔ𝐀ä") == ["ǃʔ𝐀", "ä"], "letters without case, and mathematical ones, are not in the list"
    assert words("Müller") == ["M", "ü", "ller"], "the list of signs spans the ASCII letters"


class TestSentencePiece:
    @pytest.mark.parametrize("add_dummy_prefix", [True, False])
    @pytest.mark.parametrize("remove_extra_whitespaces", [True, False])
    def test_scored_merges_equal_the_library(
        self,
        train_sentencepiece: Callable[..., Any],
        sentencepiece_gguf: Callable[..., Path],
        corpus: list[str],
        add_dummy_prefix: bool,
        remove_extra_whitespaces: bool,
    ) -> None:
        processor = train_sentencepiece(
            add_dummy_prefix=add_dummy_prefix, remove_extra_whitespaces=remove_extra_whitespaces
        )
        path = sentencepiece_gguf(
            processor, add_space_prefix=add_dummy_prefix, remove_extra_whitespaces=remove_extra_whitespaces
        )
        tokenizer = load_tokenizer(path)
        for text in corpus:
            ids = processor.encode(text)
            assert tokenizer.encode(text, add_special_tokens=False) == ids, text
            assert tokenizer.encode(text) == [processor.bos_id(), *ids]
            if "\u2581" not in text:
                assert tokenizer.decode(ids) == processor.decode(ids)

    def test_user_defined_pieces(
        self, train_sentencepiece: Callable[..., Any], sentencepiece_gguf: Callable[..., Path], corpus: list[str]
    ) -> None:
        defined = ["\n\n", "    ", "  ", "<start_of_turn>"]
        processor = train_sentencepiece(
            add_dummy_prefix=False, user_defined_symbols=[piece.replace(" ", "\u2581") for piece in defined]
        )
        tokenizer = load_tokenizer(sentencepiece_gguf(processor, user_defined=defined, add_space_prefix=False))
        for text in [*corpus, "<start_of_turn>user\n\n\n    x   y"]:
            assert tokenizer.encode(text, add_special_tokens=False) == processor.encode(text), text
            assert tokenizer.decode(tokenizer.encode(text)) == text

    def test_without_byte_fallback(
        self, train_sentencepiece: Callable[..., Any], sentencepiece_gguf: Callable[..., Path]
    ) -> None:
        processor = train_sentencepiece(byte_fallback=False, vocab_size=400)
        tokenizer = load_tokenizer(sentencepiece_gguf(processor))
        for text in ("the ☃☃ fox", "☃"):
            assert tokenizer.encode(text, add_special_tokens=False) == processor.encode(text)
        assert tokenizer.unk_id in tokenizer.encode("☃")

    @pytest.mark.parametrize("rule", ["identity", "nmt_nfkc"])
    def test_unigram_equals_the_library(
        self,
        train_sentencepiece: Callable[..., Any],
        sentencepiece_gguf: Callable[..., Path],
        corpus: list[str],
        rule: str,
    ) -> None:
        processor = train_sentencepiece(
            model_type="unigram", vocab_size=600, normalization_rule_name=rule, remove_extra_whitespaces=True
        )
        values: dict[str, Any] = {"remove_extra_whitespaces": True, "add_eos_token": False}
        if rule != "identity":
            values["precompiled_charsmap"] = _character_map(processor.serialized_model_proto())
        tokenizer = load_tokenizer(sentencepiece_gguf(processor, "t5", **values))
        for text in corpus:
            ids, expected = tokenizer.encode(text), processor.encode(text)
            if ids != expected:  # of cuts with the same score either is right
                scores = [sum(processor.get_score(id) for id in found) for found in (ids, expected)]
                assert scores[0] == pytest.approx(scores[1]), text
                assert sorted(ids) == sorted(expected), text
            assert tokenizer.decode(ids) == processor.decode(expected)

    def test_character_that_is_only_a_byte(self, write_gguf: Callable[..., Path]) -> None:
        """Gemma's vocabulary has runs of tabs, but no tab."""
        tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\t\t", "\t\t\t\t", "a"]
        types = [2, *[6] * 256, 1, 1, 1]
        scores = [0.0, *[0.0] * 256, -1.0, -2.0, -3.0]
        path = write_gguf("llama", tokens, types, scores=scores, add_space_prefix=False, add_bos_token=False)
        tokenizer = load_tokenizer(path)
        assert tokenizer.encode("\t" * 7 + "a") == [258, 257, 10, 259]
        assert tokenizer.decode([258, 257, 10, 259]) == "\t" * 7 + "a"


class TestValues:
    @pytest.fixture(scope="class")
    def original(self, train_byte_level: Callable[..., tokenizers.Tokenizer]) -> tokenizers.Tokenizer:
        return train_byte_level(_bytes(use_regex=True))

    def test_bos_and_eos(self, original: tokenizers.Tokenizer, byte_level_gguf: Callable[..., Path]) -> None:
        ids = {"bos_token_id": 0, "eos_token_id": 1}
        bare = load_tokenizer(byte_level_gguf(original, "gpt-2", **ids)).encode("a")
        assert load_tokenizer(byte_level_gguf(original, "llama-bpe", **ids)).encode("a")[0] == 0
        both = load_tokenizer(byte_level_gguf(original, "gpt-2", add_bos_token=True, add_eos_token=True, **ids))
        assert both.encode("a") == [0, *bare, 1]
        none = load_tokenizer(byte_level_gguf(original, "llama-bpe", add_bos_token=False, **ids))
        assert none.encode("a") == bare

    def test_end_ids(self, original: tokenizers.Tokenizer, byte_level_gguf: Callable[..., Path]) -> None:
        tokenizer = load_tokenizer(byte_level_gguf(original, "gpt-2", eos_token_id=1, eot_token_id=5))
        assert tokenizer.eos_ids == (1, 5, 2), "EOS, the end of a turn that the file names, <|im_end|> by its name"

    def test_chat_templates(self, original: tokenizers.Tokenizer, byte_level_gguf: Callable[..., Path]) -> None:
        values = {"chat_template": "A", "chat_template.tool_use": "B"}
        tokenizer = load_tokenizer(byte_level_gguf(original, "gpt-2", **values))
        assert tokenizer.chat_templates == {"default": "A", "tool_use": "B"}

    def test_id_outside_the_vocabulary(
        self, original: tokenizers.Tokenizer, byte_level_gguf: Callable[..., Path], caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING):
            tokenizer = load_tokenizer(byte_level_gguf(original, "gpt-2", eos_token_id=10**6))
        assert tokenizer.eos_id == 2, "the end token known by name is left"
        assert "eos_token_id is 1000000, outside the vocabulary" in caplog.text

    def test_no_pre_tokenizer_named(
        self, original: tokenizers.Tokenizer, write_gguf: Callable[..., Path], caplog: pytest.LogCaptureFixture
    ) -> None:
        tokens = [original.id_to_token(id) for id in range(original.get_vocab_size())]
        with caplog.at_level(logging.WARNING):
            tokenizer = load_tokenizer(write_gguf("gpt2", tokens, merges=["a b"] if "ab" in tokens else ["e r"]))
        assert "does not name its pre-tokenizer" in caplog.text
        assert tokenizer.decode(tokenizer.encode("Hi 12345!")) == "Hi 12345!"

    def test_empty_and_repeated_tokens_keep_their_ids(self, write_gguf: Callable[..., Path]) -> None:
        tokenizer = load_tokenizer(write_gguf("gpt2", ["a", "", "b", "a", "ba"], merges=["b a"], pre="gpt-2"))
        assert tokenizer.encode("ab") == [0, 2]
        assert tokenizer.vocab_size == 5

    def test_unused_tokens_are_no_text(self, write_gguf: Callable[..., Path]) -> None:
        tokenizer = load_tokenizer(write_gguf("gpt2", ["a", "[PAD1]", "aa"], [1, 5, 1], merges=["a a"], pre="gpt-2"))
        assert tokenizer.decode([0, 1, 0]) == "aa"

    @pytest.mark.parametrize(
        ("model", "values", "message"),
        [
            ("gpt2", {"pre": "klingon"}, "the pre-tokenizer 'klingon', which is not known.*Known: .*qwen2"),
            ("gpt2", {"pre": "gpt-2"}, "without tokenizer.ggml.merges"),
            ("gpt2", {"pre": "gpt-2", "merges": ["a z"]}, "contradict each other"),
            ("llama", {}, "without tokenizer.ggml.scores"),
            ("llama", {"scores": [0.0]}, "scores has 1 entries for a vocabulary of 3"),
            ("rwkv", {}, "of the model 'rwkv'; known: gpt2, llama, t5"),
            (
                "gpt2",
                {"pre": "gpt-2", "merges": ["a b"], "add_bos_token": True},
                "names no tokenizer.ggml.bos_token_id",
            ),
            ("gpt2", {"pre": "gpt-2", "merges": ["a b"], "add_bos_token": "yes"}, "add_bos_token must be bool"),
        ],
    )
    def test_errors(self, write_gguf: Callable[..., Path], model: str, values: dict[str, Any], message: str) -> None:
        path = write_gguf(model, ["a", "b", "ab"], **values)
        with pytest.raises(StartError, match=message) as raised:
            load_tokenizer(path)
        assert "\n" not in str(raised.value)


class TestFiles:
    @pytest.mark.parametrize("content", [b"", b"GGUF", b"GGML" + bytes(60), b"GGUF\x03\0\0\0" + bytes([255] * 40)])
    def test_no_gguf(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "bad.gguf"
        path.write_bytes(content)
        with pytest.raises(StartError, match=r"bad\.gguf"):
            load_tokenizer(path)

    def test_cut_short(self, tmp_path: Path, smollm2_path: Path) -> None:
        path = tmp_path / "cut.gguf"
        path.write_bytes(smollm2_path.read_bytes()[:200_000])
        with pytest.raises(StartError, match=r"cut\.gguf"):
            load_tokenizer(path)

    def test_token_that_is_not_utf8(self, write_gguf: Callable[..., Path]) -> None:
        path = write_gguf("gpt2", ["a", "b", "ab", "\u00ff\u00ff"], merges=["a b"], pre="gpt-2")
        path.write_bytes(path.read_bytes().replace("\u00ff\u00ff".encode(), b"\xff\xff\xff\xff"))
        with pytest.raises(StartError, match="holds a token that is not UTF-8"):
            load_tokenizer(path)

    def test_without_tokenizer(self, tmp_path: Path) -> None:
        gguf = pytest.importorskip("gguf")
        writer = gguf.GGUFWriter(tmp_path / "bare.gguf", "llama")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(StartError, match="has no tokenizer"):
            load_tokenizer(tmp_path / "bare.gguf")


def _character_map(model: bytes) -> bytes:
    """The normalizer's precompiled map: field 2 of field 3 of the model, both length-delimited."""

    def fields(message: bytes) -> dict[int, bytes]:
        found, pos = {}, 0

        def number() -> int:
            nonlocal pos
            value = shift = 0
            while True:
                byte = message[pos]
                pos += 1
                value |= (byte & 127) << shift
                shift += 7
                if byte < 128:
                    return value

        while pos < len(message):
            tag = number()
            if tag & 7 == 2:
                length = number()
                found[tag >> 3] = message[pos : pos + length]
                pos += length
            elif tag & 7 == 0:
                number()
            else:
                pos += 4 if tag & 7 == 5 else 8
        return found

    return fields(fields(model)[3])[2]
