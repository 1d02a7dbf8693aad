"""Names of tokens beside their log-probabilities."""

from __future__ import annotations

from lamella.engine.request import Logprob
from lamella.engine.text.logprobs import describe_logprobs, token_text_after
from lamella.engine.text.tokenizer import Tokenizer


def test_whole_tokens(smollm2: Tokenizer) -> None:
    described = describe_logprobs(smollm2, Logprob([7042, 7042, 260], [-0.1, -0.1, -2.5], 1), [504, 3575])
    assert described.chosen == (7042, " Paris", b" Paris", -0.1)
    assert described.rank == 1
    assert [(top.token_id, top.text, top.logprob) for top in described.top] == [
        (7042, " Paris", -0.1),
        (260, " the", -2.5),
    ]


def test_parts_of_a_character(smollm2: Tokenizer, llama2: Tokenizer) -> None:
    for tokenizer in (smollm2, llama2):
        ids = tokenizer.encode("a 🏳é€", add_special_tokens=False)
        texts, data = [], b""
        for index, id in enumerate(ids):
            texts.append(token_text_after(tokenizer, id, ids[:index]))
            data += tokenizer.token_bytes(id)
        assert "" in texts
        assert "".join(texts).strip() == "a 🏳é€"
        assert data.decode().strip() == "a 🏳é€"
        assert "\ufffd" not in "".join(texts)


def test_alternatives_share_the_context(llama2: Tokenizer) -> None:
    first, second, other, a = (llama2.backend.token_to_id(name) for name in ("<0xC3>", "<0xA9>", "<0xA8>", "a"))
    assert None not in (first, second, other, a)
    described = describe_logprobs(llama2, Logprob([second, other, first, a], [-1.0, -2.0, -3.0, -4.0], 1), [a, first])  # type: ignore[list-item]
    assert [described.chosen.text, *(top.text for top in described.top)] == ["é", "è", "\ufffd", "a"]
    assert [top.bytes for top in described.top] == [b"\xa8", b"\xc3", b"a"]


def test_special_tokens_have_their_names(smollm2: Tokenizer) -> None:
    described = describe_logprobs(smollm2, Logprob([2], [-0.5], 1), [])
    assert described.chosen == (2, "<|im_end|>", b"<|im_end|>", -0.5)


def test_vocabularies_without_bytes(word_pieces: Tokenizer) -> None:
    hello = word_pieces.backend.token_to_id("hello")
    assert hello is not None
    assert describe_logprobs(word_pieces, Logprob([hello], [-0.5], 1), []).chosen == (hello, "hello", b"hello", -0.5)
