from __future__ import annotations

import random

import pytest

from lamella.engine.request import Delta, FinishReason, SamplingParams
from lamella.engine.testing.byte_tokenizer import END, EOS, byte_tokenizer
from lamella.engine.testing.scripted_core import logprob
from lamella.engine.text.output import OutputBuilder, Piece

TOKENIZER = byte_tokenizer()


def deltas(ids: list[int], finish: FinishReason, *, size: int = 1, logprobs: int | None = None) -> list[Delta]:
    """The ids in deltas of that size; the reason comes with the last."""
    result = []
    for start in range(0, len(ids), size):
        chunk = ids[start : start + size]
        result.append(Delta("r", 0, chunk))
        if logprobs is not None:
            result[-1].logprobs = [logprob(token_id, logprobs) for token_id in chunk]
    result[-1].finish_reason = finish
    return result


def run(builder: OutputBuilder, given: list[Delta]) -> list[Piece]:
    pieces = []
    for delta in given:
        pieces.append(builder.push(delta))
        if pieces[-1].finish_reason is not None:
            break
    # what is told piece by piece is the whole
    assert "".join(piece.text for piece in pieces) == builder.text
    assert [token_id for piece in pieces for token_id in piece.token_ids] == builder.token_ids
    return pieces


def build(**params: object) -> OutputBuilder:
    return OutputBuilder(TOKENIZER, list(b"prompt "), SamplingParams(**params))  # type: ignore[arg-type]


def test_text_and_ids_come_with_each_delta() -> None:
    builder = build()
    pieces = run(builder, deltas(list(b"hi you") + [EOS], "stop"))
    assert [piece.text for piece in pieces] == ["h", "i", " ", "y", "o", "u", ""]
    assert builder.token_ids == [*b"hi you", EOS]
    assert (builder.finish_reason, builder.stop_reason, builder.num_tokens) == ("stop", None, 7)
    assert not pieces[-1].still_runs


def test_a_character_is_never_halved() -> None:
    builder = build()
    pieces = run(builder, deltas(list("a€z".encode()), "length"))
    assert [piece.text for piece in pieces] == ["a", "", "", "€", "z"]
    assert [len(piece.token_ids) for piece in pieces] == [1] * 5


def test_an_unfinished_character_at_the_end_is_not_lost() -> None:
    builder = build()
    run(builder, deltas(list("a€".encode())[:-1], "length"))
    assert builder.text == "a\ufffd"


def test_a_stop_string_cuts_text_and_tokens_and_leaves_nothing_behind() -> None:
    builder = build(stop=["STOP"])
    pieces = run(builder, deltas(list(b"go ST STOP more"), "length"))
    assert builder.text == "go ST "
    assert builder.token_ids == list(b"go ST ")
    assert builder.num_tokens == len(b"go ST STOP"), "usage ends with the token that completed the stop string"
    assert (builder.finish_reason, builder.stop_reason) == ("stop", "STOP")
    assert pieces[-1].still_runs
    told = ""
    for piece in pieces:
        told += piece.text
        assert not told.endswith(("S", "ST")), "the beginning of a stop string waits until it is known to be harmless"
        assert len(piece.token_ids) == len(piece.text)


def test_a_stop_string_can_be_kept() -> None:
    builder = build(stop=["STOP"], include_stop_str_in_output=True)
    run(builder, deltas(list(b"go STOP more"), "length"))
    assert builder.text == "go STOP"
    assert builder.token_ids == list(b"go STOP")


def test_a_stop_string_inside_a_multi_byte_character_stream() -> None:
    # the stop string's own bytes arrive one token at a time, in front of and behind other characters
    builder = build(stop=["€"])
    pieces = run(builder, deltas(list("ä€ö".encode()), "length"))
    assert builder.text == "ä"
    assert builder.token_ids == list("ä".encode())
    assert builder.num_tokens == 5
    assert [piece.text for piece in pieces] == ["", "ä", "", "", ""]


def test_a_merged_delta_ends_at_the_stop_string_within_it() -> None:
    builder = build(stop=["lo"])
    pieces = run(builder, deltas(list(b"hello world"), "length", size=11))
    assert builder.text == "hel"
    assert (builder.finish_reason, builder.stop_reason, builder.num_tokens) == ("stop", "lo", 5)
    assert not pieces[-1].still_runs, "the core has finished it already"


def test_held_text_comes_when_the_sequence_ends_otherwise() -> None:
    builder = build(stop=["STOP"])
    pieces = run(builder, deltas(list(b"go STO"), "length"))
    assert builder.text == "go STO"
    assert builder.token_ids == list(b"go STO")
    assert (builder.finish_reason, pieces[-1].text) == ("length", "STO")


def test_a_stop_string_that_only_the_end_completes() -> None:
    # the unfinished character turns into U+FFFD at the end, which is the stop string
    builder = build(stop=["\ufffd"])
    pieces = run(builder, deltas([*b"a", 0xE2], "length"))
    assert (builder.text, builder.finish_reason, builder.stop_reason) == ("a", "stop", "\ufffd")
    assert not pieces[-1].still_runs


def test_min_tokens_holds_off_stop_strings() -> None:
    builder = build(stop=["a"], min_tokens=3)
    run(builder, deltas(list(b"aabaab"), "length"))
    assert builder.text == "aab"
    assert builder.num_tokens == 4


@pytest.mark.parametrize("shown", [False, True])
def test_the_stop_token_is_hidden_from_the_text_unless_asked_for(shown: bool) -> None:
    builder = build(stop_token_ids=[ord("!")], include_stop_str_in_output=shown)
    given = deltas(list(b"hi!"), "stop")
    given[-1].stop_reason = ord("!")
    run(builder, given)
    assert builder.text == ("hi!" if shown else "hi")
    assert builder.token_ids == list(b"hi!")
    assert builder.stop_reason == ord("!")


@pytest.mark.parametrize(("skip", "text"), [(True, "ab"), (False, "a<end>b")])
def test_special_tokens_in_the_text(skip: bool, text: str) -> None:
    builder = build(skip_special_tokens=skip)
    run(builder, deltas([ord("a"), END, ord("b"), EOS], "stop"))
    assert builder.text == text


def test_without_detokenizing_only_ids_are_told() -> None:
    builder = build(detokenize=False)
    run(builder, deltas(list(b"abc"), "length"))
    assert (builder.text, builder.token_ids) == ("", list(b"abc"))


def test_logprobs_carry_text_bytes_and_places() -> None:
    builder = build(logprobs=2)
    pieces = run(builder, deltas(list("aé!".encode()), "length", logprobs=2))
    assert builder.logprobs is not None
    assert [p.chosen.text for p in builder.logprobs] == ["a", "", "é", "!"]
    assert [p.chosen.bytes for p in builder.logprobs] == [b"a", b"\xc3", b"\xa9", b"!"]
    assert [len(p.top) for p in builder.logprobs] == [2] * 4
    assert builder.offsets == [0, 1, 1, 2]
    assert [piece.offsets for piece in pieces] == [[0], [1], [1], [2]]
    assert builder.cumulative_logprob == pytest.approx(4 * -0.6931, abs=1e-3)


def test_logprobs_of_a_cut_stop_string_are_not_told() -> None:
    builder = build(logprobs=0, stop=["lo"])
    pieces = run(builder, deltas(list(b"hello"), "length", logprobs=0))
    assert builder.logprobs is not None
    assert [p.chosen.text for p in builder.logprobs] == list("hel")
    assert [p.chosen.text for piece in pieces for p in piece.logprobs or []] == list("hel")


def test_streamed_and_whole_output_agree_however_deltas_are_cut() -> None:
    rng = random.Random(5)
    alphabet = ["a", "b", "ab", "é", "€", "😀", "aé"]
    for _ in range(100):
        text = "".join(rng.choice(alphabet) for _ in range(rng.randint(1, 30)))
        stops = [rng.choice(alphabet) + rng.choice(alphabet) for _ in range(rng.randint(0, 3))]
        ids = list(text.encode())
        outcomes = set()
        for size in (1, 2, 3, len(ids)):
            builder = build(stop=stops, logprobs=1)
            run(builder, deltas(ids, "length", size=size, logprobs=1))
            outcomes.add(
                (
                    builder.text,
                    tuple(builder.token_ids),
                    builder.num_tokens,
                    builder.finish_reason,
                    builder.stop_reason,
                    tuple(builder.offsets),
                )
            )
        assert len(outcomes) == 1, (text, stops)
        (outcome,) = outcomes
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        if ends:
            assert outcome[3] == "stop"
            assert outcome[0] == text[: min(ends) - len(str(outcome[4]))]
        else:
            assert outcome[0] == text
