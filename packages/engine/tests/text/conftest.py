"""Vocabularies made on the spot, the same one in several file formats."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from lamella.engine.text.tokenizer import Tokenizer, load_tokenizer

CORPUS = [
    "The capital of France is Paris, isn't it? I'd say we've known THAT since 1789.",
    "In 2024, 1234567 people paid $12,345.67 (≈ 11.000 €) for 3½ nights; x² + y² = z²!",
    "    def f(x):\n\treturn {'a': [1, 2, 3]}  # comment\n\n\n    return None\r\n",
    "Größe, naïve café, Ångström, ŒUVRE, Straße, İstanbul, ſchön, e\u0301te\u0301",
    "北京是中国的首都。東京は日本の首都です、カタカナも！서울은 한국의 수도입니다.",
    "Привет, как дела? Καλημέρα κόσμε. שלום עולם. مرحبا بالعالم، كيف الحال؟ हिन्दी में लिखा है।",
    "emoji 😀😃👩‍👩‍👧‍👦🏳️‍🌈 and flags 🇫🇷🇩🇪, symbols ∑∫√∞ ≠ ≤ →",
    "   leading, trailing and  multiple   spaces   \t\t tabs \n \n newlines\n\n\n",
    "http://example.com/path?q=1&r=two#frag CamelCaseWords snake_case_words kebab-case-words",
    "aaaaaaaaaaaaaaaa bbbbbbbb ababababab ======== -------- ........ !!!???",
    "zero\u200bwidth\u00a0nbsp\u3000ideographic\ufeffbom \u0001control \u007f",
    "",
    " ",
    "a",
    "é",
]
TRAINING = CORPUS * 3 + ["the quick brown fox jumps over the lazy dog " * 3, "of in and is the a to " * 10]


@pytest.fixture(scope="session")
def corpus() -> list[str]:
    return CORPUS


@pytest.fixture(scope="session")
def write_gguf(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """write(model, tokens, types, *, pre, scores, merges, **values) -> path; values are tokenizer.ggml.* scalars."""

    def write(
        model: str,
        tokens: Sequence[str],
        types: Sequence[int] | None = None,
        *,
        scores: Sequence[float] | None = None,
        merges: Sequence[str] | None = None,
        **values: Any,
    ) -> Path:
        path = tmp_path_factory.mktemp("gguf") / "model.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_tokenizer_model(model)
        writer.add_token_list(list(tokens))
        if types is not None:
            writer.add_token_types(list(types))
        if scores is not None:
            writer.add_token_scores(list(scores))
        if merges is not None:
            writer.add_token_merges(list(merges))
        for key, value in values.items():
            name = "tokenizer." + key if key.startswith("chat_template") else "tokenizer.ggml." + key
            if isinstance(value, bool):
                writer.add_bool(name, value)
            elif isinstance(value, int):
                writer.add_uint32(name, value)
            elif isinstance(value, bytes):
                writer.add_key_value(name, list(value), gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT8)
            else:
                writer.add_string(name, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.fixture(scope="session")
def train_byte_level() -> Callable[..., tokenizers.Tokenizer]:
    """train(pre_tokenizer, normalizer, **model options) -> byte-level BPE with the special tokens <s>, </s>, <|im_end|>
    and the ordinary added token <tool>."""

    def train(pre_tokenizer: Any, normalizer: Any = None, **options: Any) -> tokenizers.Tokenizer:
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizer
        if normalizer is not None:
            backend.normalizer = normalizer
        trainer = trainers.BpeTrainer(
            vocab_size=700,
            special_tokens=["<s>", "</s>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator(TRAINING, trainer)
        if options:
            state = json.loads(backend.to_str())
            state["model"].update(options)
            backend = tokenizers.Tokenizer.from_str(json.dumps(state))
        backend.decoder = decoders.ByteLevel()
        backend.add_tokens([tokenizers.AddedToken("<tool>", normalized=False, special=False)])
        return backend

    return train


@pytest.fixture(scope="session")
def byte_level_gguf(write_gguf: Callable[..., Path]) -> Callable[..., Path]:
    """The GGUF file of a byte-level BPE: write(backend, pre, **values)."""

    def write(backend: tokenizers.Tokenizer, pre: str, **values: Any) -> Path:
        model = json.loads(backend.to_str())["model"]
        size = backend.get_vocab_size()
        tokens = [backend.id_to_token(id) for id in range(size)]
        added = backend.get_added_tokens_decoder()
        types = [1 if id not in added else 3 if added[id].special else 4 for id in range(size)]
        merges = [" ".join(merge) for merge in model["merges"]]
        return write_gguf("gpt2", tokens, types, merges=merges, pre=pre, **values)

    return write


@pytest.fixture(scope="session")
def train_sentencepiece() -> Callable[..., Any]:
    """train(**options) -> a sentencepiece processor."""
    spm = pytest.importorskip("sentencepiece")

    def train(**options: Any) -> Any:
        model = io.BytesIO()
        spm.SentencePieceTrainer.train(
            sentence_iterator=iter([line for text in TRAINING for line in text.splitlines() if line]),
            model_writer=model,
            **{
                "model_type": "bpe",
                "vocab_size": 900,
                "byte_fallback": True,
                "normalization_rule_name": "identity",
                "remove_extra_whitespaces": False,
                "hard_vocab_limit": False,
                "minloglevel": 2,
                **options,
            },
        )
        return spm.SentencePieceProcessor(model_proto=model.getvalue())

    return train


@pytest.fixture(scope="session")
def sentencepiece_gguf(write_gguf: Callable[..., Path]) -> Callable[..., Path]:
    """The GGUF file of a sentencepiece model: write(processor, model, user_defined, **values)."""

    def write(processor: Any, model: str = "llama", user_defined: Sequence[str] = (), **values: Any) -> Path:
        tokens, types = [], []
        for id in range(processor.get_piece_size()):
            piece = processor.id_to_piece(id)
            kind = 1
            if processor.is_unknown(id):
                kind = 2
            elif processor.is_control(id):
                kind = 3
            elif processor.is_byte(id):
                kind = 6
            elif piece.replace("\u2581", " ") in user_defined:
                kind, piece = 4, piece.replace("\u2581", " ")
            tokens.append(piece)
            types.append(kind)
        scores = [processor.get_score(id) for id in range(processor.get_piece_size())]
        named = {"bos_token_id": processor.bos_id(), "eos_token_id": processor.eos_id()}
        return write_gguf(model, tokens, types, scores=scores, **named, **values)

    return write


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer(smollm2_path)


@pytest.fixture(scope="session")
def llama2(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A SentencePiece-like vocabulary in the Hugging Face layout: byte fallback, a space in front of every text."""
    merges = [
        *(("▁", "▁"), ("▁", "a"), ("▁", "w"), ("h", "e"), ("▁", "he"), ("l", "l"), ("▁he", "ll"), ("▁hell", "o")),
        *(("o", "r"), ("w", "o"), ("▁w", "o"), ("▁wo", "r"), ("é", "😀")),
    ]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"aehlortwé,.😀"]
    pieces += [left + right for left, right in merges]
    vocab = {piece: id for id, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    folder = tmp_path_factory.mktemp("llama2")
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": "<unk>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(folder)


@pytest.fixture(scope="session")
def word_pieces(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A vocabulary whose decoder joins words with spaces, so that no token has bytes of its own."""
    words = ["[UNK]", "[CLS]", "[SEP]", "hello", "wor", "##ld", ",", "the", "##s", "é", "."]
    vocab = {word: id for id, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens(["[CLS]", "[SEP]"])
    folder = tmp_path_factory.mktemp("bert")
    backend.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)
