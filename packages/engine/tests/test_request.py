from __future__ import annotations

from typing import Any

import pytest

from lamella.engine.errors import RequestError
from lamella.engine.request import SamplingParams


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("max_tokens", 2.5, "got `float`"),
        ("n", True, "got `bool`"),
        ("seed", "1", "got `str`"),
        ("temperature", "hot", "got `str`"),
        ("temperature", None, "got `null`"),
        ("stop", None, "got `null`"),
        ("stop", ["a", 1], "got `int`"),
        ("bad_words", [b"a"], "got `bytes`"),
        ("stop_token_ids", [1.0], "got `float`"),
        ("logit_bias", {"7": 1.0}, "got `str`"),
        ("logit_bias", {7: "1"}, "got `str`"),
        ("detokenize", 1, "got `int`"),
        ("temperature", 2**2000, "out of range"),
    ],
)
def test_a_field_of_another_type_is_named(field: str, value: Any, text: str) -> None:
    with pytest.raises(RequestError, match=f"^{field}: .*{text}") as info:
        SamplingParams(**{field: value}).typed()
    assert info.value.param == field


def test_what_python_writes_in_several_ways_becomes_one() -> None:
    params = SamplingParams(
        temperature=1,
        stop="ab",  # type: ignore[arg-type]
        bad_words="cd",  # type: ignore[arg-type]
        stop_token_ids=(1, 2),  # type: ignore[arg-type]
        logit_bias={3: 1},
    ).typed()
    assert (params.stop, params.bad_words, params.stop_token_ids) == (["ab"], ["cd"], [1, 2])
    assert type(params.temperature) is float
    assert params.logit_bias is not None
    assert type(params.logit_bias[3]) is float


def test_parameters_of_the_right_types_stay_what_they_are() -> None:
    params = SamplingParams(n=2, stop=["a"], logit_bias={1: -1.5}, max_tokens=None, seed=7)
    assert params.typed() == params
    assert SamplingParams().typed() == SamplingParams()
