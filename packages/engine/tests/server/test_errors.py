"""Mistakes of clients: the right status, OpenAI's shape, the field's name, a short message."""

from __future__ import annotations

import threading
import time
from typing import Any

import httpx
import openai
import pytest

from lamella.engine.server import chat, completions, tokens
from lamella.engine.testing.scripted_core import ScriptedCore
from lamella.engine.testing.server_thread import MODEL, ServerThread

BIG = 10**18
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "say:a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "say:a"}]},
}


def refuse(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert len(error["message"]) <= 500
    return error


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_tokens", -1, "max_tokens must be in [0, "),
        ("max_tokens", BIG, "max_tokens must be in [0, "),
        ("max_tokens", 10**30, "max_tokens must be in [0, "),
        ("max_tokens", "5", "max_tokens: expected `int`, got `str`"),
        ("max_tokens", 1.5, "max_tokens: expected `int`, got `float`"),
        ("max_tokens", True, "max_tokens: expected `int`, got `bool`"),
        ("max_tokens", 0, "max_tokens 0 needs echo"),
        ("max_tokens", 512, "max_tokens is 512, but only 511 tokens can follow the 1 of prompt: the context holds 512"),
        ("max_completion_tokens", 0, "max_completion_tokens 0 needs echo"),
        ("max_completion_tokens", -1, "max_completion_tokens must be in [0, "),
        ("max_completion_tokens", 600, "max_completion_tokens is 600, but only 511 tokens can follow"),
        ("min_tokens", 17, "min_tokens is 17, above max_tokens 16"),
        ("n", 0, "n must be in [1, 128]"),
        ("n", 100_000, "n must be in [1, 128]"),
        ("temperature", -0.1, "temperature must be in"),
        ("temperature", 1e300, "temperature must be in"),
        ("temperature", [], "temperature: expected `float`, got `array`"),
        ("top_p", 0, "top_p must be in (0, 1]"),
        ("top_p", 1.01, "top_p must be in (0, 1]"),
        ("top_k", -2, "top_k must be in [-1, "),
        ("min_p", 2, "min_p must be in"),
        ("repetition_penalty", 0, "repetition_penalty must be in [0.01, 100.0]"),
        ("frequency_penalty", 3, "frequency_penalty must be in"),
        ("presence_penalty", -3, "presence_penalty must be in"),
        ("seed", 2**70, "seed must be in"),
        ("logprobs", 1_000_000, "logprobs must be in [0, 20]"),
        ("logprobs", -1, "logprobs -1 (all) is not allowed here"),
        ("prompt_logprobs", -2, "prompt_logprobs must be in"),
        ("stop", ["x"] * 1000, "stop has 1000 entries, the limit is 64"),
        ("stop", ["x" * 20_000], "stop has 20000 characters in all, the limit is 16384"),
        ("bad_words", ["x" * 9000] * 2, "bad_words has 18000 characters in all"),
        ("stop", [""], "stop must not contain an empty string"),
        ("stop", 5, "stop: expected `str | array`, got `int`"),
        ("stop", [5], "stop[0]: expected `str`, got `int`"),
        ("stop_token_ids", [259], "stop_token_ids has token id 259, valid ids are 0 to 258"),
        ("stop_token_ids", [-1], "stop_token_ids has token id -1"),
        ("logit_bias", {"a": 1}, "logit_bias has the key 'a', which is not a token id"),
        ("logit_bias", {"999": 1}, "logit_bias has token id 999"),
        ("logit_bias", {"1": 101}, "logit_bias values must be in [-100, 100]"),
        ("logit_bias", {"1": "x"}, "expected `float`, got `str`"),
        ("logit_bias", {str(i): 1 for i in range(2000)}, "logit_bias has 2000 entries"),
        ("allowed_token_ids", [], "allowed_token_ids must not be empty"),
        ("bad_words", [""], "bad_words must not contain an empty string"),
        ("priority", BIG, "priority must fit 32 bits"),
        ("cache_salt", 5, "cache_salt: expected `str`, got `int`"),
        ("use_kv_tiers", "no", "use_kv_tiers: expected `bool`, got `str`"),
        ("stream", "yes", "stream: expected `bool`, got `str`"),
        ("stream_options", {"include_usage": True}, "stream_options needs stream: true"),
        ("stream_options", {"include_usage": 1}, "stream_options.include_usage: expected `bool`"),
        ("prompt", 5, "prompt: expected `str | array`, got `int`"),
        ("prompt", [], "prompt must not be empty"),
        ("prompt", "", "prompt has no tokens"),
        ("prompt", ["a", 1], "prompt must be a text, a list of texts"),
        ("prompt", [True], "prompt must be a text, a list of texts"),
        ("prompt", [[1], []], "prompt must be a text, a list of texts"),
        ("prompt", [1, 259], "prompt has token id 259, valid ids are 0 to 258"),
        ("prompt", [-1], "prompt has token id -1"),
        ("prompt", [BIG], "prompt has token id"),
        ("prompt", "x" * 513, "prompt has 513 tokens; the context holds 512 tokens"),
        ("prompt", "x" * 512, "prompt has 512 tokens and leaves no room for an output"),
        ("prompt", ["a"] * 300, "prompt has 300 entries, the limit is 256"),
        ("suffix", "end", "suffix is not supported yet"),
        ("best_of", 2, "best_of is not supported yet"),
        ("use_beam_search", True, "use_beam_search is not supported yet"),
        ("response_format", {"type": "json_object"}, "response_format is not supported yet"),
        ("response_format", 5, "response_format is not supported yet"),
        ("guided_json", {}, "guided_json is not supported yet"),
        ("prompt_embeds", "AAAA", "prompt_embeds is not supported yet"),
    ],
)
def test_a_completion_field_that_is_wrong(http: httpx.Client, field: str, value: object, message: str) -> None:
    error = refuse(http.post("/v1/completions", json={"prompt": "a", field: value}))
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == field
    assert error["code"] == ("unsupported_field" if "not supported yet" in message else None)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"messages": {}}, "messages", "messages: expected `array`, got `object`"),
        ({"messages": []}, "messages", "must not be empty"),
        ({"messages": [5]}, "messages", "messages[0]: expected `object`"),
        ({"messages": [{"content": "x"}]}, "messages", "messages[0] has no role"),
        ({"messages": [{"role": "user"}]}, "messages", "messages[0] has no content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages", "messages[0].content must be"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages", "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages",
            "image_url",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
            "messages",
            "input_audio",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 9999}}]}]},
            None,
            "",
        ),
        ({"tools": 5}, "tools", "tools is not supported yet"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "tools is not supported yet"),
        ({"tool_choice": "required"}, "tool_choice", "not supported yet"),
        ({"functions": [{"name": "f"}]}, "functions", "not supported yet"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format", "not supported yet"),
        ({"modalities": ["audio"]}, "modalities", "not supported yet"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "not supported yet"),
        ({"store": True}, "store", "not supported yet"),
        ({"chat_template": "{{ x }}"}, "chat_template", "not supported yet"),
        ({"top_logprobs": 3}, "top_logprobs", "top_logprobs needs logprobs"),
        ({"logprobs": 3}, "logprobs", "logprobs: expected `bool`"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs must be in [0, 20], got 21"),
        (
            {"logprobs": True, "top_logprobs": -1},
            "top_logprobs",
            "top_logprobs -1 (all) is not allowed here, the limit is 20",
        ),
        ({"max_tokens": 0}, "max_tokens", "max_tokens must be in [1, "),
        (
            {"max_completion_tokens": 0, "max_tokens": 1},
            "max_completion_tokens",
            "max_completion_tokens must be in [1, ",
        ),
        ({"max_completion_tokens": BIG}, "max_completion_tokens", "max_completion_tokens must be in [1, "),
        ({"max_tokens": 512}, "max_tokens", "of messages: the context holds 512; ask for at most "),
        ({"max_completion_tokens": 600}, "max_completion_tokens", "max_completion_tokens is 600, but only "),
        ({"n": 2, "temperature": 0}, "n", "temperature 0 would give the same answer"),
        ({"max_completion_tokens": -5}, "max_completion_tokens", "max_completion_tokens must be in"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "does not go with stream"),
        ({"chat_template_kwargs": {"self": 1}}, "messages", ""),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages", "the context holds 512 tokens"),
    ],
)
def test_a_chat_field_that_is_wrong(
    http: httpx.Client, fields: dict[str, Any], param: str | None, message: str
) -> None:
    error = refuse(http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}], **fields}))
    assert message in error["message"]
    assert error["param"] == param or param is None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"prompt": "a"} x', "not valid JSON"),
        (b'{"prompt": "\xff\xfe"}', "not valid JSON"),
        (b'{"prompt": "\\ud800"}', "not valid JSON"),
        (b'{"prompt": "a", "temperature": NaN}', "not valid JSON"),
        (b'{"prompt": "a", "temperature": Infinity}', "not valid JSON"),
        (b'{"prompt": "a", "temperature": 1e999}', "not valid JSON"),
        (b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'"text"', "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b"[]", "must be a JSON object"),
        (b"{}", "prompt is required"),
        (b"\x1f\x8b\x08\x00", "not valid JSON"),
    ],
)
def test_bodies_that_are_no_request(http: httpx.Client, body: bytes, message: str) -> None:
    error = refuse(http.post("/v1/completions", content=body, headers={"content-type": "application/json"}))
    assert message in error["message"]


@pytest.mark.parametrize(
    ("fields", "endpoint"),
    [
        ({"tools": []}, "chat"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"}, "chat"),
        ({"tool_choice": "auto"}, "chat"),
        ({"response_format": {"type": "text"}}, "chat"),
        ({"modalities": ["text"], "store": False, "reasoning_effort": None}, "chat"),
        ({"user": "me", "metadata": {"a": "b"}, "service_tier": "auto", "parallel_tool_calls": True}, "chat"),
        ({"best_of": 1, "suffix": "", "use_beam_search": False}, "completion"),
    ],
)
def test_values_that_ask_for_nothing_pass(http: httpx.Client, fields: dict[str, Any], endpoint: str) -> None:
    if endpoint == "chat":
        answer = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "say:a"}], **fields})
    else:
        answer = http.post("/v1/completions", json={"prompt": "say:a", **fields})
    assert answer.status_code == 200, answer.text
    assert "x-lamella-ignored" not in answer.headers


def test_unknown_fields_are_told_and_logged_once(http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    body = {"prompt": "say:a", "shiny_new": 1, "häßlich\r\nx: y": 2}
    for _ in range(3):
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 200
        assert answer.headers["x-lamella-ignored"] == "shiny_new, h??lich??x??y"
    assert [record.message for record in caplog.records if "shiny_new" in record.message] == [
        "request field shiny_new is unknown and was ignored (said once per name)"
    ]


@pytest.mark.parametrize("endpoint", BODIES)
def test_unknown_fields_inside_are_told_with_their_place(http: httpx.Client, endpoint: str) -> None:
    options = {"include_usage": True, "include_obfuscation": True, "x": {"include_usage": 1}}
    body = (
        {"prompt": "say:a"} if endpoint == "/v1/completions" else {"messages": [{"role": "user", "content": "say:a"}]}
    )
    answer = http.post(endpoint, json={**body, "shiny_new": {"y": 1}, "stream": True, "stream_options": options})
    assert answer.status_code == 200
    names = "shiny_new, stream_options.include_obfuscation, stream_options.x"
    assert answer.headers["x-lamella-ignored"] == names


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", BODIES)
def test_nothing_runs_on_for_an_answer_that_cannot_be_made(
    core: ScriptedCore,
    server: ServerThread,
    monkeypatch: pytest.MonkeyPatch,
    endpoint: str,
    stream: bool,
) -> None:
    def broken(*_args: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(completions, "CompletionAnswer", broken)
    monkeypatch.setattr(chat, "ChatAnswer", broken)
    body = (
        {"prompt": "say:a"} if endpoint == "/v1/completions" else {"messages": [{"role": "user", "content": "say:a"}]}
    )
    num_aborted = len(core.aborted)
    # a connection of its own, which such a failure closes
    answer = httpx.post(server.url + endpoint, json={**body, "stream": stream, "max_tokens": 400, "ignore_eos": True})
    assert answer.status_code == 500
    assert server.client is not None
    assert server.client.num_open == 0
    deadline = time.monotonic() + 5
    while len(core.aborted) == num_aborted or core.num_held:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert core.aborted[-1] == core.seen[-1].request_id


def test_long_work_leaves_the_loop(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: dict[str, str] = {}

    def watched(name: str, work: Any) -> Any:
        def run(*args: Any) -> Any:
            threads[name] = threading.current_thread().name
            return work(*args)

        return run

    monkeypatch.setattr(completions, "echo", watched("echo", completions.echo))
    monkeypatch.setattr(tokens, "_decode", watched("decode", tokens._decode))
    body = {"tokens": [97] * 20_000}
    assert http.post("/detokenize", json=body).json() == {"prompt": "a" * 20_000}
    assert http.post("/detokenize", json={"tokens": [*body["tokens"], 999]}).status_code == 400
    assert threads.pop("decode").startswith("server-texts")
    echoed = http.post("/v1/completions", json={"prompt": [[97] * 100] * 40, "max_tokens": 1, "echo": True}).json()
    assert [choice["text"][:100] for choice in echoed["choices"]] == ["a" * 100] * 40
    assert threads["echo"].startswith("server-texts")
    short = http.post("/v1/completions", json={"prompt": "b", "max_tokens": 1, "echo": True}).json()
    assert short["choices"][0]["text"][:1] == "b"
    assert threads["echo"] == "server"


def test_an_unknown_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=f"the model 'gpt-9' does not exist; served here: {MODEL}") as error:
        client.completions.create(model="gpt-9", prompt="a")
    assert error.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2/none", 404),
        ("GET", "/", 404),
        ("GET", "/v1/models/", 404),
        ("POST", "/v1/completions/", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
    ],
)
def test_unknown_routes_and_methods(http: httpx.Client, method: str, path: str, status: int) -> None:
    answer = http.request(method, path)
    refuse(answer, status)
    if status == 405:
        assert "allow" in answer.headers


@pytest.mark.parametrize(
    ("given", "echoed"),
    [("my-id-1", "my-id-1"), (None, None), ("x" * 200, None), ("a b", None)],
)
def test_the_request_id_is_echoed_if_it_is_fit(http: httpx.Client, given: str | None, echoed: str | None) -> None:
    headers = {"x-request-id": given} if given else {}
    ids = {
        http.get("/health", headers=headers).headers["x-request-id"],
        http.get("/none", headers=headers).headers["x-request-id"],
    }
    if echoed is not None:
        assert ids == {echoed}
    else:
        assert len(ids) == 2
        assert all(len(request_id) == 32 for request_id in ids)


def test_a_sequence_that_fails_is_the_only_one(http: httpx.Client, core: ScriptedCore) -> None:
    core.fail_on = ord("%")
    try:
        error = refuse(http.post("/v1/completions", json={"prompt": "say:a%"}), 500)
        assert error["message"] == "the logits are not numbers"
        assert error["type"] == "server_error"
        assert http.post("/v1/completions", json={"prompt": "say:ab"}).json()["choices"][0]["text"] == "ab"
        with http.stream("POST", "/v1/completions", json={"prompt": "say:%", "stream": True}) as answer:
            assert answer.status_code == 500, "nothing was sent before: the status can still tell"
    finally:
        core.fail_on = None


@pytest.mark.parametrize("status", [400, 503])
def test_what_the_core_refuses_has_its_status(http: httpx.Client, core: ScriptedCore, status: int) -> None:
    core.fail_on, core.fail_status = ord("%"), status
    try:
        answer = http.post("/v1/completions", json={"prompt": "say:%"})
        refuse(answer, status)
        assert ("retry-after" in answer.headers) == (status == 503)
    finally:
        core.fail_on, core.fail_status = None, 500
