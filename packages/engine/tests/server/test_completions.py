"""/v1/completions over HTTP, by the official client where it can say it."""

from __future__ import annotations

import httpx
import openai
import pytest

from lamella.engine.testing.scripted_core import ScriptedCore
from lamella.engine.testing.server_thread import MODEL, serve
from lamella.engine.testing.sse_reader import joined_text, read_events


def test_a_prompt_is_continued(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="say:hello", max_tokens=50)
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason, choice.index) == ("hello", "stop", 0)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (9, 6, 15)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    assert answer.model == MODEL


def test_sixteen_tokens_are_the_default(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="x")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("x" * 16, "length")


def test_a_stream_gives_the_same_text_and_the_usage_last(client: openai.OpenAI) -> None:
    text = "größer als 3 € 😀"
    chunks = list(
        client.completions.create(
            model=MODEL, prompt=f"say:{text}", max_tokens=99, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == text
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-2])
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(text.encode()) + 1


def test_prompts_times_n(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["say:a#", "say:b#"], n=2, max_tokens=9)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "a0"), (1, "a1"), (2, "b0"), (3, "b1")]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 12
    chunks = client.completions.create(model=MODEL, prompt=["say:a#", "say:b#"], n=2, max_tokens=9, stream=True)
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert texts == {0: "a0", 1: "a1", 2: "b0", 3: "b1"}


@pytest.mark.parametrize("prompt", [list(b"say:hi"), [list(b"say:hi")]])
def test_token_ids_as_prompt(client: openai.OpenAI, prompt: list[int]) -> None:
    assert client.completions.create(model=MODEL, prompt=prompt, max_tokens=9).choices[0].text == "hi"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "kept", "text", "reason"),
    [
        ("€", False, "ä", "€"),
        ("€", True, "ä€", "€"),
        (["zz", "€ö"], False, "ä", "€ö"),
        (["never"], False, "ä€öz", None),
    ],
)
def test_stop_strings_of_several_bytes(
    http: httpx.Client, stream: bool, stop: str | list[str], kept: bool, text: str, reason: str | None
) -> None:
    body = {
        "prompt": "say:ä€öz",
        "max_tokens": 50,
        "stop": stop,
        "include_stop_str_in_output": kept,
        "stream": stream,
        "return_token_ids": True,
    }
    if stream:
        with http.stream("POST", "/v1/completions", json=body) as answer:
            events = list(read_events(answer.iter_lines()))
        got = joined_text(events)
        last = events[-1]["choices"][0]
        ids = [token_id for event in events for token_id in event["choices"][0]["token_ids"]]
    else:
        last = http.post("/v1/completions", json=body).json()["choices"][0]
        got, ids = last["text"], last["token_ids"]
    assert (got, last["finish_reason"], last["stop_reason"]) == (text, "stop", reason)
    assert bytes(token_id for token_id in ids if token_id < 256).decode() == text


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="say:aé", max_tokens=3, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", "", "é"]
    assert logprobs.text_offset == [0, 1, 1]
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] == pytest.approx(-0.693, abs=1e-3)
    assert logprobs.top_logprobs is not None
    assert list(logprobs.top_logprobs[0]) == ["a", "b"]
    # parts of characters have no text of their own; their names still differ
    assert list(logprobs.top_logprobs[1]) == ["bytes:\\xc3", "bytes:\\xc4"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 2])
def test_echo_scores_the_prompt(http: httpx.Client, stream: bool, max_tokens: int) -> None:
    body = {"prompt": "say:é!", "max_tokens": max_tokens, "echo": True, "logprobs": 1, "stream": stream}
    if stream:
        with http.stream("POST", "/v1/completions", json=body) as answer:
            events = list(read_events(answer.iter_lines()))
        text = joined_text(events)
        parts = [event["choices"][0]["logprobs"] for event in events if event["choices"][0]["logprobs"]]
        logprobs = {key: [entry for part in parts for entry in part[key]] for key in parts[0]}
        reason = events[-1]["choices"][0]["finish_reason"]
    else:
        choice = http.post("/v1/completions", json=body).json()["choices"][0]
        text, logprobs, reason = choice["text"], choice["logprobs"], choice["finish_reason"]
    assert text == "say:é!" + "é" * (max_tokens > 0)
    assert reason == "length"
    assert logprobs["tokens"] == [*"say:", "", "é", "!", *["", "é"][:max_tokens]]
    assert logprobs["token_logprobs"][0] is None
    assert all(value is not None for value in logprobs["token_logprobs"][1:])
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4, 4, 5, *[6, 6][:max_tokens]]


def test_echo_without_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=list(b"say:hi"), max_tokens=9, echo=True)
    assert answer.choices[0].text == "say:hihi"


def test_prompt_logprobs(http: httpx.Client) -> None:
    choice = http.post("/v1/completions", json={"prompt": "ab", "max_tokens": 0, "prompt_logprobs": 1}).json()
    scores = choice["choices"][0]["prompt_logprobs"]
    assert scores[0] is None
    assert scores[1]["98"] == {"logprob": pytest.approx(-0.693, abs=1e-3), "rank": 1, "decoded_token": "b"}


def test_ids_in_the_answer_and_as_names(http: httpx.Client) -> None:
    body = {
        "prompt": "say:ab",
        "max_tokens": 2,
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["token_ids"] == [97, 98]
    assert choice["prompt_token_ids"] == list(b"say:ab")
    assert choice["logprobs"]["tokens"] == ["token_id:97", "token_id:98"]


def test_running_usage(http: httpx.Client) -> None:
    body = {
        "prompt": "say:abc",
        "max_tokens": 9,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    with http.stream("POST", "/v1/completions", json=body) as answer:
        events = list(read_events(answer.iter_lines()))
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 4


def test_sampling_fields_reach_the_core(http: httpx.Client, core: ScriptedCore) -> None:
    body = {
        "prompt": "x",
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "frequency_penalty": -1,
        "presence_penalty": 0.25,
        "logit_bias": {"65": -100, "66": 3.5},
        "bad_words": ["no"],
        "allowed_token_ids": [1, 2],
        "stop_token_ids": [9],
        "ignore_eos": True,
        "seed": 42,
        "skip_special_tokens": False,
        "priority": -3,
        "cache_salt": "mine",
        "use_prefix_cache": True,
        "use_kv_tiers": False,
    }
    assert http.post("/v1/completions", json=body).status_code == 200
    request = core.seen[-1]
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 7, 0.1)
    assert (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) == (1.1, -1.0, 0.25)
    assert params.logit_bias == {65: -100.0, 66: 3.5}
    assert (params.allowed_token_ids, params.stop_token_ids, params.ignore_eos) == ([1, 2], [9], True)
    assert (params.seed, params.skip_special_tokens, params.min_tokens) == (42, False, 2)
    assert (request.max_tokens, request.priority, request.cache_salt) == (9, -3, "mine")
    assert (request.use_prefix_cache, request.use_kv_tiers) == (True, False)
    assert request.bad_words_ids == [list(b"no"), list(b" no")]


def test_null_means_absent(http: httpx.Client) -> None:
    body = {"prompt": "say:ok", "max_tokens": None, "temperature": None, "stop": None, "suffix": None, "n": None}
    assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == "ok"


def test_max_tokens_are_the_requests_else_the_models_else_the_apis() -> None:
    def asked(http: httpx.Client, core: ScriptedCore) -> list[int]:
        for path, more in (("completions", {"prompt": "say:x"}), ("chat/completions", {"messages": messages})):
            for fields in ({"max_tokens": 5}, {}):
                assert http.post(f"/v1/{path}", json={**more, **fields}).status_code == 200
        return [request.max_tokens for request in core.seen]

    messages = [{"role": "user", "content": "say:x"}]
    for defaults, expected in (({}, [5, 16, 5, None]), ({"max_tokens": 7}, [5, 7, 5, 7])):
        core = ScriptedCore()
        with serve(core, sampling_defaults=defaults) as server, httpx.Client(base_url=server.url) as http:
            found = asked(http, core)
        room = core.info.max_model_len - len(core.seen[-1].prompt_ids)
        assert found == [room if value is None else value for value in expected]


def test_max_completion_tokens_wins(http: httpx.Client) -> None:
    body = {"prompt": "say:abcdef", "max_tokens": 5, "max_completion_tokens": 2}
    answer = http.post("/v1/completions", json=body)
    choice = answer.json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    assert "max_completion_tokens" not in answer.headers.get("x-lamella-ignored", "")


def test_a_default_limit_is_cut_to_what_the_context_holds(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": "x" * 505, "ignore_eos": True}).json()
    assert (answer["usage"]["total_tokens"], answer["choices"][0]["finish_reason"]) == (512, "length")
    asked = {"prompt": "x" * 505, "ignore_eos": True, "max_tokens": 7}
    assert http.post("/v1/completions", json=asked).json()["usage"]["total_tokens"] == 512
    assert http.post("/v1/completions", json={**asked, "max_tokens": 8}).status_code == 400
