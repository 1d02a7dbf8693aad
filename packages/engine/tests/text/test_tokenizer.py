"""What a tokenizer says, from a folder and from a GGUF file."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import pre_tokenizers, processors

from lamella.engine.errors import RequestError, StartError
from lamella.engine.text.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def gpt2(train_byte_level: Callable[..., tokenizers.Tokenizer]) -> tokenizers.Tokenizer:
    return train_byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))


@pytest.fixture
def folder(gpt2: tokenizers.Tokenizer, tmp_path: Path) -> Callable[..., Path]:
    """A model folder: folder(**files) writes each keyword as FILE.json (or the text as it is)."""

    def make(backend: tokenizers.Tokenizer = gpt2, **files: Any) -> Path:
        backend.save(str(tmp_path / "tokenizer.json"))
        for name, value in files.items():
            if isinstance(value, str):
                (tmp_path / name).write_text(value)
            else:
                (tmp_path / f"{name}.json").write_text(json.dumps(value))
        return tmp_path

    return make


class TestSmolLM2:
    def test_known_ids(self, smollm2: Tokenizer) -> None:
        assert smollm2.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
        assert smollm2.decode([504, 3575, 282, 4649, 314, 7042, 30]) == "The capital of France is Paris."

    def test_what_the_file_says(self, smollm2: Tokenizer) -> None:
        assert smollm2.vocab_size == 49152
        assert smollm2.bos_id == 1
        assert smollm2.eos_id == 2
        assert smollm2.token_name(2) == "<|im_end|>"
        assert smollm2.backend.token_to_id("<|im_start|>") == 1
        assert smollm2.eos_ids == (2, smollm2.backend.token_to_id("<|endoftext|>"))
        assert smollm2.encode("x") == smollm2.encode("x", add_special_tokens=False), "the file asks for no BOS"
        assert smollm2.chat_template is not None
        assert "<|im_start|>" in smollm2.chat_template

    def test_digits_stand_alone(self, smollm2: Tokenizer) -> None:
        assert [smollm2.token_text(id) for id in smollm2.encode("in 2024")] == ["in", " ", "2", "0", "2", "4"]

    def test_special_tokens_in_text(self, smollm2: Tokenizer) -> None:
        ids = smollm2.encode("<|im_start|>user\nhi<|im_end|>")
        assert (ids[0], ids[-1]) == (1, 2)
        assert smollm2.decode(ids) == "user\nhi"
        assert smollm2.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nhi<|im_end|>"

    def test_round_trips(self, smollm2: Tokenizer, corpus: list[str]) -> None:
        for text in corpus:
            assert smollm2.decode(smollm2.encode(text)) == text

    def test_loads_quickly(self, smollm2_path: Path) -> None:
        def seconds() -> float:
            start = time.process_time()
            load_tokenizer(smollm2_path)
            return time.process_time() - start

        assert min(seconds() for _ in range(3)) < 0.5


class TestFolder:
    def test_post_processor_adds_bos(self, gpt2: tokenizers.Tokenizer, folder: Callable[..., Path]) -> None:
        with_bos = tokenizers.Tokenizer.from_str(gpt2.to_str())
        with_bos.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        tokenizer = load_tokenizer(folder(with_bos, tokenizer_config={"bos_token": "<s>", "eos_token": "</s>"}))
        assert tokenizer.encode("a")[0] == tokenizer.bos_id == 0
        assert tokenizer.encode("a")[1:] == tokenizer.encode("a", add_special_tokens=False)

    def test_flags_win_over_the_post_processor(self, gpt2: tokenizers.Tokenizer, folder: Callable[..., Path]) -> None:
        with_bos = tokenizers.Tokenizer.from_str(gpt2.to_str())
        with_bos.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False, "add_eos_token": True}
        tokenizer = load_tokenizer(folder(with_bos, tokenizer_config=config))
        bare = tokenizer.encode("a", add_special_tokens=False)
        assert tokenizer.encode("a") == [*bare, 1]
        assert tokenizer.encode_batch(["a", "b a"])[0] == [*bare, 1]

    def test_without_files_beside_it(self, folder: Callable[..., Path]) -> None:
        tokenizer = load_tokenizer(folder())
        assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.chat_template) == (None, (), None)
        assert tokenizer.decode(tokenizer.encode("Grüße 😀")) == "Grüße 😀"

    def test_special_tokens_map_is_read(self, folder: Callable[..., Path]) -> None:
        tokenizer = load_tokenizer(folder(special_tokens_map={"bos_token": "<s>", "eos_token": {"content": "</s>"}}))
        assert (tokenizer.bos_id, tokenizer.eos_ids) == (0, (1,))

    def test_end_ids_of_the_generation_settings(self, folder: Callable[..., Path]) -> None:
        files = {"tokenizer_config": {"eos_token": "</s>"}, "config": {"eos_token_id": 99}}
        assert load_tokenizer(folder(**files)).eos_ids == (1, 99)
        assert load_tokenizer(folder(**files, generation_config={"eos_token_id": [2, 1]})).eos_ids == (1, 2)
        files["config"] = {"text_config": {"eos_token_id": 5}}
        (folder(**files) / "generation_config.json").unlink()
        assert load_tokenizer(folder(**files)).eos_ids == (1, 5)

    def test_tokens_that_only_the_config_lists(self, gpt2: tokenizers.Tokenizer, folder: Callable[..., Path]) -> None:
        id = gpt2.get_vocab_size()
        listed = {str(id): {"content": "<|extra|>", "special": True}, "0": {"content": "<s>", "special": True}}
        tokenizer = load_tokenizer(folder(tokenizer_config={"added_tokens_decoder": listed}))
        assert tokenizer.encode("<|extra|>") == [id]
        assert id in tokenizer.special_ids
        assert tokenizer.vocab_size == id + 1

    @pytest.mark.parametrize("odd", [None, 5, "x", [], [5], {}, {"content": 5}, {"content": ""}, "\ud800", 1.5, True])
    def test_settings_of_odd_types_are_left_out(self, folder: Callable[..., Path], odd: Any) -> None:
        """Files hold what tools left in them; what cannot be a token, a flag or a template counts as missing."""
        names = ("bos_token", "unk_token", "add_bos_token", "chat_template", "added_tokens_decoder")
        nested = {"added_tokens_decoder": {"9999": odd, "x": odd}, "chat_template": [odd, {"name": odd}]}
        for config in (dict.fromkeys(names, odd), nested):
            tokenizer = load_tokenizer(folder(tokenizer_config=config))
            assert tokenizer.decode(tokenizer.encode("Grüße")).strip() == "Grüße"

    def test_truncation_and_padding_in_the_file_are_ignored(
        self, gpt2: tokenizers.Tokenizer, folder: Callable[..., Path]
    ) -> None:
        cut = tokenizers.Tokenizer.from_str(gpt2.to_str())
        cut.enable_truncation(2)
        cut.enable_padding(length=8)
        tokenizer = load_tokenizer(folder(cut))
        assert tokenizer.decode(tokenizer.encode("one two three four five")) == "one two three four five"

    @pytest.mark.parametrize(
        ("files", "expected"),
        [
            ({"tokenizer_config": {"chat_template": "A"}}, {"default": "A"}),
            (
                {
                    "tokenizer_config": {
                        "chat_template": [{"name": "default", "template": "A"}, {"name": "rag", "template": "B"}]
                    }
                },
                {"default": "A", "rag": "B"},
            ),
            ({"tokenizer_config": {"chat_template": "A"}, "chat_template.jinja": "C"}, {"default": "C"}),
            ({"chat_template": {"chat_template": "D"}}, {"default": "D"}),
        ],
    )
    def test_chat_templates(self, folder: Callable[..., Path], files: dict[str, Any], expected: dict[str, str]) -> None:
        assert load_tokenizer(folder(**files)).chat_templates == expected

    def test_named_template_files(self, folder: Callable[..., Path]) -> None:
        path = folder(tokenizer_config={"chat_template": "A"})
        (path / "additional_chat_templates").mkdir()
        (path / "additional_chat_templates" / "tool_use.jinja").write_text("T")
        assert load_tokenizer(path).chat_templates == {"default": "A", "tool_use": "T"}

    def test_agrees_with_transformers(self, folder: Callable[..., Path], corpus: list[str]) -> None:
        transformers = pytest.importorskip("transformers")
        path = folder(
            tokenizer_config={"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
        )
        reference = transformers.PreTrainedTokenizerFast.from_pretrained(path)
        tokenizer = load_tokenizer(path)
        for text in corpus:
            ids = reference(text)["input_ids"]
            assert tokenizer.encode(text) == ids
            assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)


class TestBytes:
    def test_of_byte_level_tokens(self, smollm2: Tokenizer) -> None:
        for text in ("é", "😀", " Paris", "\n", "\t"):
            assert b"".join(smollm2.token_bytes(id) for id in smollm2.encode(text)) == text.encode()

    def test_every_byte_has_its_character(self, folder: Callable[..., Path]) -> None:
        tokenizer = load_tokenizer(folder())
        single = {tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)}
        assert {bytes([byte]) for byte in range(256)} <= single

    def test_of_byte_fallback_tokens(self, llama2: Tokenizer) -> None:
        byte_e2 = llama2.backend.token_to_id("<0xE2>")
        assert byte_e2 is not None
        assert llama2.token_bytes(byte_e2) == b"\xe2"
        assert llama2.token_text(byte_e2) == "\ufffd"
        hello = llama2.backend.token_to_id("▁hello")
        assert hello is not None
        assert llama2.token_bytes(hello) == b" hello"

    def test_of_special_tokens(self, smollm2: Tokenizer) -> None:
        assert smollm2.token_bytes(2) == b"<|im_end|>"

    def test_outside_the_vocabulary(self, smollm2: Tokenizer, llama2: Tokenizer, word_pieces: Tokenizer) -> None:
        for tokenizer in (smollm2, llama2, word_pieces):
            beyond = tokenizer.vocab_size + 7
            assert tokenizer.token_bytes(beyond) == b""
            assert tokenizer.token_text(-1) == ""
            assert tokenizer.token_name(beyond) is None
            assert tokenizer.decode([3, beyond]) == tokenizer.decode([3])
            with pytest.raises(RequestError, match="-1 is negative"):
                tokenizer.decode([3, -1])

    def test_decoding_agrees_with_the_library(self, llama2: Tokenizer, smollm2: Tokenizer, corpus: list[str]) -> None:
        for tokenizer in (llama2, smollm2):
            for text in corpus:
                ids = tokenizer.encode(text)
                for skip in (True, False):
                    assert tokenizer.decode(ids, skip) == tokenizer.backend.decode(ids, skip_special_tokens=skip)


class TestBadWords:
    def test_byte_level(self, smollm2: Tokenizer) -> None:
        ids = smollm2.encode_bad_words(["cat", " dog", "cat"])
        assert ids == [smollm2.encode(word) for word in ("cat", " cat", "dog", " dog")]

    def test_with_a_space_in_front_of_every_text(self, llama2: Tokenizer) -> None:
        sequences = [[llama2.token_name(id) for id in ids] for ids in llama2.encode_bad_words(["hello"])]
        assert ["he", "ll", "o"] in sequences
        assert ["▁hello"] in sequences
        assert len(sequences) == 2


class TestErrors:
    def test_lone_surrogate(self, smollm2: Tokenizer) -> None:
        with pytest.raises(RequestError, match=r"unpaired surrogate U\+D83D at position 2"):
            smollm2.encode("ab\ud83dc")

    def test_not_text(self, smollm2: Tokenizer) -> None:
        with pytest.raises(RequestError, match="expected a string, got int"):
            smollm2.encode(5)  # type: ignore[arg-type]

    def test_missing_path(self, tmp_path: Path) -> None:
        with pytest.raises(StartError, match="does not exist"):
            load_tokenizer(tmp_path / "none")

    def test_missing_tokenizer_json(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.model").write_bytes(b"x")
        with pytest.raises(
            StartError, match=r"no tokenizer.json \(it has tokenizer.model.*take the file from"
        ) as raised:
            load_tokenizer(tmp_path)
        assert "\n" not in str(raised.value)

    @pytest.mark.parametrize(
        ("name", "text", "message"),
        [
            ("tokenizer.json", "{", "cannot be read as a tokenizer"),
            ("tokenizer_config.json", "[1]", "must hold a JSON object, found list"),
            ("tokenizer_config.json", "{", "not readable JSON"),
            ("generation_config.json", "nope", "not readable JSON"),
            ("tokenizer_config.json", "[" * 99999, "not readable JSON"),
        ],
    )
    def test_broken_files(self, folder: Callable[..., Path], name: str, text: str, message: str) -> None:
        path = folder()
        (path / name).write_text(text)
        with pytest.raises(StartError, match=message) as raised:
            load_tokenizer(path)
        assert name in str(raised.value)

    def test_template_that_is_not_utf8(self, folder: Callable[..., Path]) -> None:
        path = folder()
        (path / "chat_template.jinja").write_bytes(b"\xff\xfe")
        with pytest.raises(StartError, match="chat_template.jinja cannot be read"):
            load_tokenizer(path)


def test_imports_stay_light() -> None:
    modules = ", ".join(f"lamella.engine.text.{name}" for name in ("tokenizer", "chat_template", "logprobs", "stop"))
    code = f"import sys, {modules}; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
