from __future__ import annotations

import pytest

from lamella.engine.errors import RequestError
from lamella.engine.intake import Intake
from lamella.engine.request import SamplingParams
from lamella.engine.testing.byte_tokenizer import byte_tokenizer

INTAKE = Intake(byte_tokenizer(add_bos=True), max_model_len=10, vocab_size=300, clock=lambda: 5.0)


def test_a_text_becomes_ids_with_bos() -> None:
    request = INTAKE.request("abc", SamplingParams(max_tokens=3), priority=2, cache_salt="s")
    assert request.prompt_ids == [256, *b"abc"]
    assert (request.max_tokens, request.eos_ids, request.priority, request.cache_salt) == (3, [257], 2, "s")
    assert request.arrival_s == 5.0
    assert INTAKE.request("abc", SamplingParams(), add_special_tokens=False).prompt_ids == list(b"abc")


def test_ids_are_unique() -> None:
    assert len({INTAKE.request("a", SamplingParams()).request_id for _ in range(50)}) == 50


@pytest.mark.parametrize(("asked", "resolved"), [(None, 7), (4, 4), (1000, 7), (0, 0)])
def test_max_tokens_is_what_the_context_holds(asked: int | None, resolved: int) -> None:
    assert INTAKE.request([1, 2, 3], SamplingParams(max_tokens=asked)).max_tokens == resolved


def test_max_tokens_that_a_client_asks_for_must_fit() -> None:
    def ask(max_tokens: int | None) -> int:
        params = SamplingParams(max_tokens=max_tokens)
        return INTAKE.request([1, 2, 3], params, param="messages", max_tokens_param="max_completion_tokens").max_tokens

    assert (ask(None), ask(7), ask(0)) == (7, 7, 0)
    with pytest.raises(RequestError) as error:
        ask(8)
    assert error.value.param == "max_completion_tokens"
    assert str(error.value) == (
        "max_completion_tokens is 8, but only 7 tokens can follow the 3 of messages: the context holds 10; ask for at "
        "most 7, or shorten messages"
    )


def test_a_full_context_can_only_be_scored() -> None:
    assert INTAKE.request([1] * 10, SamplingParams(max_tokens=0)).max_tokens == 0
    with pytest.raises(RequestError, match="10 tokens and leaves no room for an output; the context holds 10"):
        INTAKE.request([1] * 10, SamplingParams(max_tokens=1))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1] * 11, "prompt has 11 tokens; the context holds 10 tokens"),
        ([], "prompt has no tokens"),
        ([1, -1], "token id -1, valid ids are 0 to 299"),
        ([1, 300], "token id 300, valid ids are 0 to 299"),
        ([1, True], "must hold integers"),
        ("a\ud800b", "not valid Unicode"),
    ],
)
def test_prompts_that_cannot_be_served(prompt: str | list[int], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        INTAKE.request(prompt, SamplingParams())


def test_the_prompt_is_named_in_errors() -> None:
    with pytest.raises(RequestError, match="messages has 11 tokens") as error:
        INTAKE.request([1] * 11, SamplingParams(), param="messages")
    assert error.value.param == "messages"


def test_min_tokens_must_fit_behind_the_prompt() -> None:
    with pytest.raises(RequestError, match="min_tokens is 5, but only 2") as error:
        INTAKE.request([1] * 8, SamplingParams(max_tokens=None, min_tokens=5))
    assert error.value.param == "min_tokens"


@pytest.mark.parametrize(("top_k", "normal"), [(-1, 0), (0, 0), (5, 5), (300, 0), (9_999_999, 0)])
def test_top_k_beyond_the_vocabulary_is_off(top_k: int, normal: int) -> None:
    assert INTAKE.request("a", SamplingParams(top_k=top_k)).params.top_k == normal


@pytest.mark.parametrize(("seed", "normal"), [(-1, None), (None, None), (0, 0), (-2, -2)])
def test_a_seed_of_minus_one_is_none(seed: int | None, normal: int | None) -> None:
    assert INTAKE.request("a", SamplingParams(seed=seed)).params.seed == normal


def test_bad_words_become_ids() -> None:
    request = INTAKE.request("a", SamplingParams(bad_words=["no"]))
    assert list(b"no") in request.bad_words_ids
    assert list(b" no") in request.bad_words_ids
