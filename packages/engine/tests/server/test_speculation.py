"""What HTTP clients say about drafts and are told of them: the real core over a runner that needs no model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from lamella.engine.cli.main import main
from lamella.engine.core import CoreOptions, EngineCore
from lamella.engine.executor.in_process import InProcess
from lamella.engine.metrics import throughput_log
from lamella.engine.testing.server_thread import MODEL, ServerThread, serve
from lamella.engine.wire import Stats
from lamella.runner_v2.testing.fake_runner import FakeModel, FakeRunner

METHODS = ("suffix", "ngram")
ROUTES = ["/v1/completions", "/v1/chat/completions"]


def make_core(rule: str = "standard") -> EngineCore:
    executor = InProcess(FakeRunner(FakeModel(vocab_size=259), max_num_rows=4, max_num_drafts=3, num_methods=2))
    options = CoreOptions(
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        num_blocks=(200,),
        max_num_drafts=3,
        draft_methods=METHODS,
        draft_rule=rule,
        draft_rule_exact=rule == "standard",
    )
    return EngineCore(executor, executor.open(), options)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerThread]:
    with serve(make_core()) as running:
        yield running


@pytest.fixture(scope="module")
def lossy() -> Iterator[ServerThread]:
    with serve(make_core("typical")) as running:
        yield running


def ask(server: ServerThread, route: str, stream: bool = False, **extra: Any) -> Any:
    """Through the official client, whose extra_body carries what it does not know."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        common: dict[str, Any] = {
            "model": MODEL,
            "max_tokens": 40,
            "temperature": 0,
            "extra_body": {"ignore_eos": True, "return_token_ids": True, **extra},
        }
        if stream:
            common |= {"stream": True, "stream_options": {"include_usage": True}}
        if route == ROUTES[0]:
            answer = client.completions.create(prompt="prompt", **common)
        else:
            answer = client.chat.completions.create(messages=[{"role": "user", "content": "prompt"}], **common)
        return list(answer) if stream else answer


def tokens(answer: Any) -> list[int]:
    return answer.choices[0].token_ids  # type: ignore[no-any-return]


@pytest.mark.parametrize("route", ROUTES)
def test_controls_do_not_change_the_answer_and_usage_tells_of_drafts(server: ServerThread, route: str) -> None:
    answer = ask(server, route)
    details = answer.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 0
    assert details.rejected_prediction_tokens > 0
    assert not hasattr(answer, "rejection_sample_method")
    for controls in (
        {"disable_spec_decode": True},
        {"num_speculative_tokens": 0},
        {"num_speculative_tokens": 1},
        {"spec_method": "ngram", "num_speculative_tokens": 50},
        {"spec_method": None, "num_speculative_tokens": None, "disable_spec_decode": None},
    ):
        other = ask(server, route, **controls)
        assert tokens(other) == tokens(answer)
        details = other.usage.completion_tokens_details
        drafted = details.accepted_prediction_tokens + details.rejected_prediction_tokens
        assert (drafted == 0) == (controls in ({"disable_spec_decode": True}, {"num_speculative_tokens": 0}))


@pytest.mark.parametrize("route", ROUTES)
def test_a_stream_ends_with_the_same_usage(server: ServerThread, route: str) -> None:
    whole = ask(server, route).usage
    assert ask(server, route, stream=True)[-1].usage.completion_tokens_details == whole.completion_tokens_details


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"num_speculative_tokens": -1}, "num_speculative_tokens", "num_speculative_tokens must be in [0, "),
        ({"num_speculative_tokens": "3"}, "num_speculative_tokens", "num_speculative_tokens: expected `int`"),
        ({"num_speculative_tokens": 2.5}, "num_speculative_tokens", "num_speculative_tokens: expected `int`"),
        ({"num_speculative_tokens": 2**40}, "num_speculative_tokens", "num_speculative_tokens must be in [0, "),
        ({"num_speculative_tokens": True}, "num_speculative_tokens", "num_speculative_tokens: expected `int`"),
        ({"disable_spec_decode": "yes"}, "disable_spec_decode", "disable_spec_decode: expected `bool`"),
        ({"disable_spec_decode": 1}, "disable_spec_decode", "disable_spec_decode: expected `bool`"),
        ({"spec_method": 3}, "spec_method", "spec_method: expected `str`"),
        ({"spec_method": ""}, "spec_method", "this engine drafts by suffix, ngram: name one of them"),
        ({"spec_method": "eagle3"}, "spec_method", "spec_method is 'eagle3', but this engine drafts by suffix, ngram"),
        (
            {"disable_spec_decode": True, "spec_method": "ngram"},
            "spec_method",
            "spec_method is 'ngram', but disable_spec_decode turns drafts off",
        ),
        ({"disable_spec_decode": True, "num_speculative_tokens": 2}, "num_speculative_tokens", "leave one out"),
    ],
)
def test_a_malformed_control_is_a_400_that_names_it(
    server: ServerThread, route: str, fields: dict[str, Any], param: str, said: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, route, **fields)
    assert caught.value.param == param
    assert said in str(caught.value)


@pytest.mark.parametrize("route", ROUTES)
def test_answers_under_a_lossy_rule_say_so_in_every_chunk(lossy: ServerThread, route: str) -> None:
    answer = ask(lossy, route)
    assert answer.rejection_sample_method == "typical"
    chunks = ask(lossy, route, stream=True)
    assert {chunk.rejection_sample_method for chunk in chunks} == {"typical"}
    off = ask(lossy, route, disable_spec_decode=True)
    assert not hasattr(off, "rejection_sample_method")


def test_metrics_and_top(lossy: ServerThread, capsys: pytest.CaptureFixture[str]) -> None:
    ask(lossy, ROUTES[0])
    ask(lossy, ROUTES[0], num_speculative_tokens=0)
    text = httpx.get(f"{lossy.url}/metrics").text
    label = f'engine="0",model_name="{MODEL}"'

    def value(name: str, labels: str = "") -> float:
        (line,) = [
            line
            for line in text.splitlines()
            if line.startswith(f"lamella:{name}{{") and all(part in line for part in (*label.split(","), labels))
        ]
        return float(line.split()[-1])

    assert value("spec_decode_config_info", 'rejection_sample_method="typical"') == 1
    assert value("spec_decode_config_info", 'method="suffix,ngram"') == 1
    assert value("spec_decode_off_total", 'reason="request"') >= 39
    assert value("spec_decode_num_drafts_total") > 0
    drafted = value("spec_decode_num_draft_tokens_total")
    assert drafted == sum(value("spec_decode_method_draft_tokens_total", f'method="{m}"') for m in METHODS) > 0
    assert value("spec_decode_draft_length_sum") >= drafted
    assert value("spec_decode_draft_length_bucket", 'le="0.0"') >= 39
    assert value("spec_decode_verify_seconds_total") >= 0
    assert main(["top", "--count", "1", "--base-url", lossy.url]) == 0
    shown = capsys.readouterr().out
    assert "(suffix, ngram; rule typical: the output is not the model's own)" in shown.replace("suffix,n", "suffix, n")
    assert "without drafts: " in shown
    assert "request " in shown


def test_a_server_without_speculation_shows_none_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    executor = InProcess(FakeRunner(FakeModel(vocab_size=259), max_num_rows=4))
    options = CoreOptions(max_model_len=256, max_num_seqs=4, max_num_batched_tokens=32, num_blocks=(200,))
    with serve(EngineCore(executor, executor.open(), options)) as server:
        assert ask(server, ROUTES[0]).usage.completion_tokens_details is None
        assert "spec_decode_config_info" not in httpx.get(f"{server.url}/metrics").text
        assert main(["top", "--count", "1", "--base-url", server.url]) == 0
        assert "drafts" not in capsys.readouterr().out
        with pytest.raises(openai.BadRequestError, match="this engine has no speculation"):
            ask(server, ROUTES[1], spec_method="ngram")


def test_the_log_tells_what_was_decided() -> None:
    before = Stats(spec_lens=[4], spec_off={"request": 4})
    after = Stats(
        spec_lens=[8, 0, 6],
        spec_off={"request": 4, "not_paying": 3, "nothing_found": 1},
        spec_unverified_tokens=9,
        spec_draft_seconds=0.5,
        spec_verify_seconds=2.0,
    )
    assert throughput_log.control_line(before, after) == (
        "SpecDecoding control: Mean length: 1.20, Unverified: 9 tokens, Draft time: 0.500 s, Verify time: 2.000 s, "
        "Without drafts: not_paying 30 %, nothing_found 10 %"
    )
    assert throughput_log.control_line(before, after, "synthetic").endswith(
        "Rule: synthetic (the output is not the model's own)"
    )
