"""`lamella serve smollm2` as strangers use it: the official client on a real model, behind a key, with limits.

One server for all of it. What a test does must leave nothing: after each, nothing runs and a good request works.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest

KEY = "the-right-key"
MODEL = "smollm2"
MAX_LEN = 512
MAX_BODY = 100_000
CAPITAL = "The capital of France is"
JAPANESE = "日本語日本語日本語日本語"  # continued with more of it; most of these characters are several tokens


class Server(NamedTuple):
    process: subprocess.Popen[bytes]
    log: Path
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def gauges(self) -> dict[str, float]:
        text = httpx.get(f"{self.url}/metrics", headers={"authorization": f"Bearer {KEY}"}).text
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        found = {name: re.search(rf"^lamella:{name}{{.*}} (\S+)$", text, re.MULTILINE) for name in names}
        return {name: float(match[1]) for name, match in found.items() if match is not None}

    def until_idle(self, timeout_s: float = 10.0) -> None:
        deadline = time.monotonic() + timeout_s
        while any((gauges := self.gauges()).values()):
            assert time.monotonic() < deadline, gauges
            time.sleep(0.02)
        assert len(gauges) == 3


@pytest.fixture(scope="module")
def server(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    words = [sys.executable, "-m", "lamella.engine.cli.main", "serve", str(smollm2_path), "--port", "0"]
    words += ["--served-model-name", MODEL, "--api-key", "another", "--api-key", KEY, "--max-body-size", str(MAX_BODY)]
    words += ["--max-model-len", str(MAX_LEN), "--max-num-seqs", "16", "--max-num-batched-tokens", "512"]
    with log.open("wb") as stderr:
        process = subprocess.Popen(words, stderr=stderr, stdin=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while (found := re.search(r"serving smollm2 on http://127\.0\.0\.1:(\d+)", log.read_text())) is None:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        yield Server(process, log, int(found[1]))
        assert process.poll() is None, "the server ended"
        assert "Traceback" not in log.read_text()
        process.terminate()
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left(server: Server, client: openai.OpenAI) -> Iterator[None]:
    yield
    server.until_idle()
    answer = client.completions.create(model=MODEL, prompt=CAPITAL, max_tokens=2, temperature=0)
    assert answer.choices[0].text == " Paris."


def test_completions(client: openai.OpenAI) -> None:
    fields: Any = {"model": MODEL, "prompt": CAPITAL, "max_tokens": 6, "temperature": 0}
    whole = client.completions.create(**fields)
    assert whole.choices[0].text.startswith(" Paris.")
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (5, 6)
    *chunks, last = client.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (5, 6)


def test_chat_with_several_choices(client: openai.OpenAI) -> None:
    messages: Any = [
        {"role": "system", "content": "You answer with one word."},
        {"role": "user", "content": [{"type": "text", "text": "What is the capital of France?"}]},
    ]
    fields: Any = {"model": MODEL, "messages": messages, "max_completion_tokens": 12, "n": 3, "temperature": 0.7}
    whole = client.chat.completions.create(**fields, seed=11)
    assert any("Paris" in (choice.message.content or "") for choice in whole.choices)
    texts, ends = {0: "", 1: "", 2: ""}, {}
    for chunk in client.chat.completions.create(**fields, seed=11, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends[choice.index] = choice.finish_reason or ends.get(choice.index)
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert ends == {choice.index: choice.finish_reason for choice in whole.choices}


@pytest.mark.parametrize("stop", ["語", "本", "本語"])
def test_a_stop_string_of_characters_that_are_several_tokens(client: openai.OpenAI, stop: str) -> None:
    fields: Any = {"model": MODEL, "prompt": JAPANESE, "max_tokens": 12, "temperature": 0, "stop": [stop, "never"]}
    choice = client.completions.create(**fields).choices[0]
    assert choice.text == "日本語"[: "日本語".index(stop)]
    assert (choice.finish_reason, choice.model_dump()["stop_reason"]) == ("stop", stop)
    pieces = [chunk.choices[0].text for chunk in client.completions.create(**fields, stream=True)]
    assert "".join(pieces) == choice.text
    included = client.completions.create(**fields, extra_body={"include_stop_str_in_output": True})
    assert included.choices[0].text == choice.text + stop


def test_an_end_inside_a_character(client: openai.OpenAI) -> None:
    """By length or by a stop id: half a character is told as such, once, at the end, and is never a stop string."""
    for length in range(1, 7):
        fields: Any = {
            "model": MODEL,
            "prompt": JAPANESE,
            "max_tokens": length,
            "temperature": 0,
            "stop": ["\ufffd\ufffd"],
        }
        text = client.completions.create(**fields).choices[0].text
        assert text.rstrip("\ufffd") == "日本語"[: len(text.rstrip("\ufffd"))]
        pieces = [chunk.choices[0].text for chunk in client.completions.create(**fields, stream=True)]
        assert "".join(pieces) == text
        assert all("\ufffd" not in piece for piece in pieces[:-1])
    whole = client.completions.create(
        model=MODEL, prompt=JAPANESE, max_tokens=6, temperature=0, extra_body={"return_token_ids": True}
    )
    ids = whole.choices[0].model_dump()["token_ids"]
    stopped = client.completions.create(
        model=MODEL, prompt=JAPANESE, max_tokens=6, temperature=0, extra_body={"stop_token_ids": [ids[1]]}
    )
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text == "\ufffd"


def test_logprobs(client: openai.OpenAI) -> None:
    fields: Any = {"model": MODEL, "prompt": JAPANESE, "max_tokens": 8, "temperature": 0, "logprobs": 3, "echo": True}
    whole = client.completions.create(**fields).choices[0]
    assert whole.text.startswith(JAPANESE)
    found = whole.logprobs
    assert found is not None
    assert found.token_logprobs is not None
    assert found.token_logprobs[0] is None
    assert all(value <= 0 for value in found.token_logprobs[1:])
    assert "".join(found.tokens or []) == whole.text.rstrip("\ufffd")
    for token, offset in zip(found.tokens or [], found.text_offset or [], strict=True):
        assert whole.text[offset:].startswith(token)
    streamed: dict[str, list[Any]] = {"tokens": [], "text_offset": [], "token_logprobs": [], "top_logprobs": []}
    for chunk in client.completions.create(**fields, stream=True):
        if chunk.choices[0].logprobs is not None:
            for name, values in streamed.items():
                values += getattr(chunk.choices[0].logprobs, name)
    assert streamed["tokens"] == found.tokens
    assert streamed["text_offset"] == found.text_offset
    assert streamed["token_logprobs"][1:] == pytest.approx(found.token_logprobs[1:], abs=1e-3)

    messages: Any = [{"role": "user", "content": "Write: 日本語"}]
    chat = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=10, temperature=0, logprobs=True, top_logprobs=5
    ).choices[0]
    assert chat.logprobs is not None
    assert chat.logprobs.content is not None
    assert all(len(entry.top_logprobs) == 5 for entry in chat.logprobs.content)
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in chat.logprobs.content)
    read = b"".join(bytes(entry.bytes or []) for entry in chat.logprobs.content)
    assert read.decode(errors="replace").startswith((chat.message.content or "").rstrip("\ufffd"))


PHASES = ("head", "body", "at once", "before the first token", "mid-stream", "reset")


@pytest.mark.parametrize(("phase", "stream"), [*((p, True) for p in PHASES), *((p, False) for p in PHASES[1:4])])
def test_a_client_that_leaves(server: Server, phase: str, stream: bool) -> None:
    """Whenever it does: blocks return, which nothing_is_left checks long before the answers would have ended."""
    fields = {"prompt": CAPITAL, "max_tokens": 450, "n": 2, "ignore_eos": True, "stream": stream}
    body = json.dumps(fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
    head += f"content-length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        if phase == "head":
            connection.sendall(head.encode()[:30])
            return
        connection.sendall(head.encode() + (body[:-5] if phase == "body" else body))
        if phase in ("before the first token", "reset"):
            deadline = time.monotonic() + 10
            while server.gauges()["num_requests_running"] != 2:
                assert time.monotonic() < deadline
        if phase == "mid-stream":
            received = b""
            while received.count(b"data: ") < 6:
                received += connection.recv(65536)
        if phase == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def test_64_clients_at_once(server: Server) -> None:
    """Some of them leave. Those that stay get what they would have got alone."""
    rng = random.Random(5)
    prompts = [CAPITAL, JAPANESE, "Once upon a time", "1, 2, 3, 4,"]

    async def ask(client: openai.AsyncOpenAI, number: int, leaves: bool) -> str | None:
        fields: Any = {"model": MODEL, "prompt": prompts[number % 4], "max_tokens": 4 + number % 4, "temperature": 0}
        if leaves:
            fields |= {"max_tokens": 200, "extra_body": {"ignore_eos": True}}
            task = asyncio.create_task(client.completions.create(**fields))
            await asyncio.sleep(rng.random() * 2)
            task.cancel()
            return None
        if number % 3:
            return (await client.completions.create(**fields)).choices[0].text
        return "".join(
            [chunk.choices[0].text async for chunk in await client.completions.create(**fields, stream=True)]
        )

    async def main() -> list[str | None]:
        limits = httpx.Limits(max_connections=64)
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1",
            api_key=KEY,
            max_retries=0,
            http_client=httpx.AsyncClient(limits=limits, timeout=60),
        ) as client:
            return await asyncio.gather(*(ask(client, number, number % 8 == 5) for number in range(64)))

    texts = asyncio.run(main())
    by_prompt: dict[int, set[str]] = {}
    for number, text in enumerate(texts):
        if text is not None:
            by_prompt.setdefault(number % 4, set()).add(text)
    for some in by_prompt.values():  # greedy answers of one prompt differ in their lengths only
        longest = max(some, key=len).rstrip("\ufffd")
        assert all(longest.startswith(text.rstrip("\ufffd")) for text in some)
    assert min(text for text in by_prompt[0]).startswith(" Paris.")


ROUTES = [
    ("GET", "/v1/models"),
    ("GET", f"/v1/models/{MODEL}"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/metrics"),
    ("GET", "/no/such/route"),
    ("GET", "/health/"),
    ("GET", "//health"),
    ("GET", "/v1/../metrics"),
    ("DELETE", "/v1/models"),
]


@pytest.mark.parametrize("key", [None, "wrong", "the-right-kez", "the-right-key,another", KEY + "x"])
def test_a_wrong_key_opens_nothing(server: Server, key: str | None) -> None:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=server.url, headers=headers) as http:
        for method, path in ROUTES:
            answer = http.request(method, path, content=b"{}" if method == "POST" else None)
            assert answer.status_code == 401, path
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
        assert http.get("/health").json() == {"status": "ok"}
        assert "version" in http.get("/version").json()
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key or "none", max_retries=0)
    with client, pytest.raises(openai.AuthenticationError):
        client.completions.create(model=MODEL, prompt="x")


def test_mistakes_reach_the_official_client_as_its_errors(client: openai.OpenAI) -> None:
    good: Any = {"model": MODEL, "prompt": "x", "max_tokens": 1}
    wrong: list[tuple[dict[str, Any], str | None, str]] = [
        ({"prompt": "word " * MAX_LEN}, "prompt", f"the context holds {MAX_LEN} tokens"),
        ({"prompt": [5] * MAX_LEN}, "prompt", "leaves no room"),
        ({"prompt": [-1]}, "prompt", "valid ids are 0 to 49151"),
        ({"max_tokens": -1}, "max_tokens", "-1"),
        ({"max_tokens": 10**18}, "max_tokens", "1000000000000000000"),
        ({"stop": ["x"] * 1000}, "stop", "1000 entries, the limit is 64"),
        ({"logprobs": 10**6}, "logprobs", "1000000"),
        ({"n": 10**5}, "n", "100000"),
        ({"seed": 2**70}, "seed", str(2**70)),
        ({"suffix": "x"}, "suffix", "not supported yet"),
        ({"extra_body": {"repetition_penalty": 1e-300}}, "repetition_penalty", "0.01"),
        ({"extra_body": {"allowed_token_ids": [2], "min_tokens": 1}}, None, "leave no token to choose"),
    ]
    for fields, param, words in wrong:
        with pytest.raises(openai.BadRequestError) as raised:
            client.completions.create(**{**good, **fields})
        assert raised.value.param == param
        assert words in raised.value.message
    with pytest.raises(openai.NotFoundError, match="the model 'none' does not exist"):
        client.completions.create(**{**good, "model": "none"})
    with pytest.raises(openai.APIStatusError) as raised_size:
        client.completions.create(**{**good, "prompt": "x" * MAX_BODY})
    assert raised_size.value.status_code == 413


ENDPOINTS = {
    "/v1/completions": {"prompt": CAPITAL, "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
    "/tokenize": {"prompt": CAPITAL},
    "/detokenize": {"tokens": [504, 3575]},
}
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 1.5, -0.0, 1e18, 10**18, 2**63, 2**64, 10**30, -(2**63) - 1),
    *("", "x", "\0", "é" * 500, "日本語", "nan", "5"),
    *([], {}, [[]], [None], [-1], [10**9], ["x"], [""], ["x"] * 1000, [[1, 2]], {"x": {"y": [1]}}, {"5": "x"}),
    *([{}], [{"role": 5}], [{"role": "user", "content": [{"type": 5}]}], [{"role": "user", "content": {"a": 1}}]),
)
FIELDS = (
    *("model", "prompt", "messages", "tokens", "max_tokens", "max_completion_tokens", "min_tokens", "n", "stream"),
    *("stream_options", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "seed", "logprobs"),
    *("top_logprobs", "prompt_logprobs", "echo", "logit_bias", "bad_words", "allowed_token_ids", "priority"),
    *("cache_salt", "tools", "tool_choice", "response_format", "chat_template_kwargs", "add_generation_prompt"),
    *("continue_final_message", "repetition_penalty", "frequency_penalty", "presence_penalty", "skip_special_tokens"),
    *("ignore_eos", "return_token_ids", "add_special_tokens", "user", "suffix", "best_of", "detokenize", "x" * 300),
)
RAW = (
    *(b"", b"{", b"null", b"[]", b'"x"', b"\xff\xfe", b"\0", b"[" * 50_000, b'{"prompt": "\xff"}', b"a=b"),
    *(b'{"prompt": "\\ud800"}', b'{"prompt": "x", "max_tokens": 1e999}', b'{"prompt": "x", "n": NaN}'),
    b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}",
)


def test_200_malformed_bodies(server: Server) -> None:
    """Seeded: one to three fields of a good body replaced. Never a 5xx, never a wait, always the shape of an error."""
    rng = random.Random(9)
    bodies: list[tuple[str, bytes]] = [(path, raw) for path in ENDPOINTS for raw in RAW]
    while len(bodies) < 200 + len(ENDPOINTS) * len(RAW):
        path = rng.choice(list(ENDPOINTS))
        changes = {rng.choice(FIELDS): rng.choice(ODD) for _ in range(rng.randint(1, 3))}
        # what is not wrong must not be long either
        bodies.append((path, json.dumps({**ENDPOINTS[path], **changes}).encode()))
    counts = {"good": 0, "bad": 0}
    with httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {KEY}"}, timeout=20) as http:
        for path, body in bodies:
            began_s = time.monotonic()
            answer = http.post(path, content=body)
            assert answer.status_code in (200, 400, 404), (path, body[:300], answer.status_code, answer.text[:300])
            if answer.status_code == 200:
                counts["good"] += 1
                continue
            counts["bad"] += 1
            error = answer.json()["error"]
            assert error["type"] == "invalid_request_error", (path, body[:300])
            assert 5 < len(error["message"]) <= 500, (path, body[:300])
            assert time.monotonic() - began_s < 5, (path, body[:300])
    assert counts["bad"] > 150
    assert counts["good"] > 20
