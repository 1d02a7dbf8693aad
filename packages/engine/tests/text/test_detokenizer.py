"""Streams of text: never half a character, and together the same text as at once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamella.engine.text.detokenizer import Detokenizer
from lamella.engine.text.tokenizer import Tokenizer


def stream(
    tokenizer: Tokenizer, ids: Sequence[int], prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True
) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt_ids, skip_special_tokens)
    return [*(detokenizer.push(id) for id in ids), detokenizer.flush()]


@pytest.fixture(params=["smollm2", "llama2", "word_pieces"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Tokenizer)
    return found


def test_text_round_trips(smollm2: Tokenizer, llama2: Tokenizer, corpus: list[str]) -> None:
    for tokenizer in (smollm2, llama2):
        for text in corpus:
            pieces = stream(tokenizer, tokenizer.encode(text, add_special_tokens=False))
            assert "".join(pieces) == text
            assert "\ufffd" not in "".join(pieces)


@pytest.fixture(scope="module")
def unlikely_ids(smollm2: Tokenizer, llama2: Tokenizer) -> dict[int, list[int]]:
    """Per vocabulary size: parts of characters and special tokens, which random ids would seldom hit."""
    found = {}
    for tokenizer in (smollm2, llama2):
        assert tokenizer.pieces is not None
        parts = [id for id in range(tokenizer.vocab_size) if tokenizer.pieces.shown[id] is None]
        assert len(parts) > 100
        found[tokenizer.vocab_size] = parts + sorted(tokenizer.special_ids) * 10
    return found


@settings(deadline=None, max_examples=300)
@given(data=st.data(), skip=st.booleans())
def test_random_ids_stream_as_they_decode(
    smollm2: Tokenizer, llama2: Tokenizer, unlikely_ids: dict[int, list[int]], data: st.DataObject, skip: bool
) -> None:
    for tokenizer in (smollm2, llama2):
        some_id = st.integers(0, tokenizer.vocab_size + 5) | st.sampled_from(unlikely_ids[tokenizer.vocab_size])
        ids = data.draw(st.lists(some_id, max_size=24))
        pieces = stream(tokenizer, ids, skip_special_tokens=skip)
        assert "".join(pieces) == tokenizer.decode(ids, skip)


def test_characters_arrive_whole(llama2: Tokenizer) -> None:
    ids = [_byte(llama2, byte) for byte in "😀€".encode()]
    assert stream(llama2, ids) == ["", "", "", "😀", "", "", "€", ""]


def test_invalid_bytes_become_replacements(llama2: Tokenizer) -> None:
    a = llama2.backend.token_to_id("a")
    assert a is not None
    assert stream(llama2, [_byte(llama2, 0xE2), a]) == ["", "\ufffda", ""]
    assert stream(llama2, [_byte(llama2, 0xFF), a]) == ["\ufffd", "a", ""]
    assert stream(llama2, [a, _byte(llama2, 0xE2), _byte(llama2, 0x82)]) == ["a", "", "", "\ufffd"]


def test_special_token_inside_a_character(llama2: Tokenizer) -> None:
    first, second = (_byte(llama2, byte) for byte in "é".encode())
    assert llama2.bos_id is not None
    assert stream(llama2, [first, llama2.bos_id, second]) == ["", "", "é", ""]
    assert "".join(stream(llama2, [first, llama2.bos_id, second], skip_special_tokens=False)) == "\ufffd<s>\ufffd"


def test_first_space_follows_the_prompt(llama2: Tokenizer) -> None:
    hello, bos = llama2.backend.token_to_id("▁hello"), llama2.bos_id
    assert hello is not None
    assert bos is not None
    assert stream(llama2, [hello, hello]) == ["hello", " hello", ""]
    assert stream(llama2, [hello], prompt_ids=[bos]) == ["hello", ""], "BOS is no text"
    assert stream(llama2, [hello], prompt_ids=[bos, hello]) == [" hello", ""]
    assert stream(llama2, [hello], prompt_ids=[bos], skip_special_tokens=False) == [" hello", ""], "here BOS is text"
    prompt = llama2.encode("hello wor")
    output = llama2.encode(", hello a", add_special_tokens=False)
    whole = llama2.decode([*prompt, *output])
    assert whole == llama2.decode(prompt) + "".join(stream(llama2, output, prompt_ids=prompt))


def test_first_space_may_be_a_byte(llama2: Tokenizer) -> None:
    ids = [_byte(llama2, 0x20), _byte(llama2, 0x20)]
    assert "".join(stream(llama2, ids)) == llama2.decode(ids) == " "


def test_prompt_that_ends_inside_a_character(llama2: Tokenizer, smollm2: Tokenizer) -> None:
    parts = [_byte(llama2, byte) for byte in "😀".encode()]
    assert stream(llama2, parts[2:], prompt_ids=parts[:2]) == ["", "😀", ""]
    ids = smollm2.encode("x 🏳️‍🌈")
    assert "".join(stream(smollm2, ids[-1:], prompt_ids=ids[:-1]))


class TestOtherDecoders:
    """A decoder that joins words gives its text through a window."""

    def test_streams_as_it_decodes(self, word_pieces: Tokenizer) -> None:
        assert word_pieces.pieces is None
        ids = word_pieces.encode("hello world, the é.", add_special_tokens=False)
        assert stream(word_pieces, ids) == ["hello", " wor", "ld", " ,", " the", " é", " .", ""]
        assert word_pieces.decode(ids) == "hello world , the é ."

    def test_prompt_gives_the_first_space(self, word_pieces: Tokenizer) -> None:
        ids = word_pieces.encode("hello the", add_special_tokens=False)
        assert stream(word_pieces, ids[1:], prompt_ids=ids[:1]) == [" the", ""]

    def test_special_tokens(self, word_pieces: Tokenizer) -> None:
        the, sep = word_pieces.backend.token_to_id("the"), word_pieces.backend.token_to_id("[SEP]")
        assert the is not None
        assert sep is not None
        assert "".join(stream(word_pieces, [the, sep, the])) == "the the"
        assert "".join(stream(word_pieces, [the, sep, the], skip_special_tokens=False)) == "the [SEP] the"

    @settings(deadline=None, max_examples=100)
    @given(data=st.data())
    def test_random_ids(self, word_pieces: Tokenizer, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.integers(0, word_pieces.vocab_size - 1), max_size=12))
        text = "".join(stream(word_pieces, ids))
        assert text.split() == word_pieces.decode(ids).split()


def _byte(tokenizer: Tokenizer, byte: int) -> int:
    id = tokenizer.backend.token_to_id(f"<0x{byte:02X}>")
    assert id is not None
    return id
