"""Stop strings: found where they complete first, and nothing of them shown."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lamella.engine.text.detokenizer import Detokenizer
from lamella.engine.text.stop import StopChecker
from lamella.engine.text.tokenizer import Tokenizer


def run(
    stops: Sequence[str], pieces: Sequence[str], include: bool = False, min_tokens: int = 0
) -> tuple[list[str], str | None]:
    """What a client gets, piece by piece, and the stop string that ended it."""
    checker = StopChecker(stops, include_stop_str=include, min_tokens=min_tokens)
    given = []
    for num_tokens, piece in enumerate(pieces, 1):
        hit = checker.push(piece, num_tokens)
        given.append(hit.text)
        if hit.stop is not None:
            return given, hit.stop
    return [*given, checker.flush()], None


def test_no_stops() -> None:
    assert run([], ["a", "b"]) == (["a", "b", ""], None)


def test_across_pieces() -> None:
    assert run(["STOP"], ["abcS", "TO", "P", "x"]) == (["abc", "", ""], "STOP")
    assert run(["STOP"], ["abcS", "TO", "P", "x"], include=True) == (["abc", "", "STOP"], "STOP")
    assert run(["\n\n"], ["a\n", "b\n", "\nc"]) == (["a", "\nb", ""], "\n\n")


def test_inside_a_piece() -> None:
    assert run([". "], ["Yes. No. "]) == (["Yes"], ". ")
    assert run([". "], ["Yes. No. "], include=True) == (["Yes. "], ". ")


def test_holds_back_only_what_may_become_a_stop() -> None:
    given, stop = run(["<|end|>"], ["a", "b <", "c <|e", "x<|end", "|", "y"])
    assert (given, stop) == (["a", "b ", "<c ", "<|ex", "", "<|end|y", ""], None)


def test_held_text_is_given_at_the_end() -> None:
    assert run(["STOP"], ["abSTO"]) == (["ab", "STO"], None)


def test_the_one_that_completes_first_wins() -> None:
    assert run(["bcd", "c"], ["abcd"]) == (["ab"], "c")
    assert run(["world", "lo w"], ["hello world"]) == (["hel"], "lo w")


def test_of_those_that_complete_together_the_longest_wins() -> None:
    assert run(["c", "bc", "abc"], ["xabc"]) == (["x"], "abc")
    assert run(["c", "bc"], ["xa", "b", "c"]) == (["xa", "", ""], "bc")


def test_stop_begins_again_inside_itself() -> None:
    assert run(["aab"], ["aaab"]) == (["a"], "aab")
    assert run(["abac"], ["abab", "ac"]) == (["ab", ""], "abac")


def test_min_tokens() -> None:
    assert run(["x"], ["x", "x", "x"], min_tokens=2) == (["x", ""], "x")
    assert run(["ab"], ["a", "b", "a", "b"], min_tokens=3) == (["", "ab", "", ""], "ab")
    assert run(["ab"], ["xa", "bc"], min_tokens=2) == (["x", ""], "ab"), "may begin before"
    assert run(["x"], ["axb"], min_tokens=2) == (["axb", ""], None)


def test_empty_pieces() -> None:
    assert run(["ab"], ["a", "", "b"]) == (["", "", ""], "ab")


def test_inside_a_character_of_several_tokens(smollm2: Tokenizer) -> None:
    """A stop string of whole characters, in tokens that are parts of them."""
    ids = smollm2.encode("one 🏳️‍🌈 two")
    assert sum(smollm2.pieces is not None and smollm2.pieces.shown[id] is None for id in ids) >= 4
    detokenizer = Detokenizer(smollm2)
    pieces = [detokenizer.push(id) for id in ids]
    given, stop = run(["\u200d🌈"], pieces)
    assert ("".join(given), stop) == ("one 🏳️", "\u200d🌈")
    given, stop = run(["🏳"], pieces, include=True)
    assert ("".join(given), stop) == ("one 🏳", "🏳")


@settings(max_examples=400)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
    pieces=st.lists(st.text("abc", max_size=5), max_size=8),
    include=st.booleans(),
    min_tokens=st.integers(0, 4),
)
@example(stops=["ab", "b"], pieces=["a", "b"], include=False, min_tokens=0)
def test_equals_a_plain_search(stops: list[str], pieces: list[str], include: bool, min_tokens: int) -> None:
    given, stop = run(stops, pieces, include, min_tokens)
    assert ("".join(given), stop) == _plain_search(stops, pieces, include, min_tokens)
    for num_given in range(1, len(given)):
        text = "".join(pieces[:num_given])
        held = len(text) - len("".join(given[:num_given]))
        beginnings = {stop[:length] for stop in stops for length in range(len(stop))}
        assert held == max(length for length in range(len(text) + 1) if text[len(text) - length :] in beginnings)


def _plain_search(stops: list[str], pieces: list[str], include: bool, min_tokens: int) -> tuple[str, str | None]:
    """The definition: the end nearest to the front, among those in text of token min_tokens or later."""
    text = "".join(pieces)
    first_end = len("".join(pieces[: max(min_tokens - 1, 0)])) + 1
    ends = [
        (start + len(stop), start, stop)
        for stop in stops
        for start in range(len(text))
        if text.startswith(stop, start) and start + len(stop) >= first_end
    ]
    if not ends:
        return text, None
    end, start, stop = min(ends)
    return text[: end if include else start], stop


@pytest.mark.parametrize("num_stops", [1, 64])
def test_many_stops_cost_little(num_stops: int) -> None:
    stops = [f"\n{'word ' * 4}{index}" for index in range(num_stops)]
    text = ["word ", "and\n", "word ", "word ", "more "] * 400
    checker = StopChecker(stops)

    def seconds() -> float:
        start = time.process_time()
        for num_tokens, piece in enumerate(text, 1):
            checker.push(piece, num_tokens)
        return time.process_time() - start

    assert min(seconds() for _ in range(3)) / len(text) < 20e-6
