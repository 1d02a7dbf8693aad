from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lamella.engine.errors import RequestError, UnsupportedFieldError
from lamella.engine.request import Request, SamplingParams
from lamella.engine.scheduler.config import SchedulerConfig
from lamella.engine.scheduler.limits import check_request
from lamella.kvtier import Group, Layout, TierManager

MANAGER = TierManager(Layout((Group("full", "full", 4, 1),), (11,)))
CONFIG = SchedulerConfig(max_model_len=60, max_num_seqs=4, max_num_batched_tokens=64, max_chunk_len=60, lookahead=2)


def check(prompt: list[int], max_tokens: int = 1, config: SchedulerConfig = CONFIG, **fields: Any) -> None:
    params = SamplingParams(max_tokens=max(0, max_tokens))
    check_request(Request("r", prompt, params, max_tokens, [], **fields), config, MANAGER, 100)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "param", "text"),
    [
        ([], 1, "prompt", "the prompt is empty"),
        ([1], -1, "max_tokens", "at least 0, got -1"),
        ([1] * 61, 0, "prompt", "61 tokens, but the context of 60 tokens holds 60"),
        ([1] * 60, 1, "prompt", "60 tokens, but the context of 60 tokens holds 59"),
        ([1, 100], 1, "prompt", "token id 100, valid ids are 0 to 99"),
        ([-1, 5], 1, "prompt", "token id -1"),
        ([5, 2**40], 1, "prompt", "token id 1099511627776"),
        ([1] * 10, 29, "max_tokens", "up to 39 tokens need 11 KV blocks of 4 tokens, but only 10 exist"),
        ([1] * 10, 999, "max_tokens", "up to 60 tokens need 16 KV blocks of 4 tokens, but only 10 exist"),
        ([1] * 39, 1, "prompt", "up to 40 tokens need 11 KV blocks"),
    ],
)
def test_what_can_never_be_served_is_refused(prompt: list[int], max_tokens: int, param: str, text: str) -> None:
    with pytest.raises(RequestError, match=text) as info:
        check(prompt, max_tokens)
    assert info.value.param == param


def test_what_just_fits_is_taken() -> None:
    check([1] * 10, 28)
    check([1] * 38, 0)
    check([0, 99])


def test_adapters_are_not_supported() -> None:
    with pytest.raises(UnsupportedFieldError, match="'poet'"):
        check([1], adapter="poet")


def test_a_priority_needs_the_policy_that_heeds_it() -> None:
    for priority in (-1, 3):
        with pytest.raises(RequestError, match=f"priority is {priority}.*--scheduling-policy priority") as info:
            check([1], priority=priority)
        assert info.value.param == "priority"
        check([1], config=replace(CONFIG, policy="priority"), priority=priority)
    check([1], priority=0)
