"""Limits on bodies and queues, and clients that go away."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator

import httpx
import msgspec
import pytest

from lamella.engine.testing.scripted_core import ScriptedCore
from lamella.engine.testing.server_thread import ServerThread, serve
from lamella.engine.wire import CoreInfo

INFO = CoreInfo(
    max_model_len=512,
    vocab_size=259,
    num_blocks=[64],
    block_size=16,
    kv_tokens=1024,
    max_num_seqs=2,
    max_num_batched_tokens=512,
)
LONG = {"prompt": "x", "max_tokens": 400}


def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)


@pytest.fixture
def core() -> ScriptedCore:
    """Two sequences at once, 10 ms a step."""
    return ScriptedCore(step_s=0.01, info=msgspec.structs.replace(INFO))


@pytest.fixture
def server(core: ScriptedCore) -> Iterator[ServerThread]:
    with serve(core, max_queued=1, max_body_bytes=2000) as running:
        yield running


@contextlib.contextmanager
def sent(server: ServerThread, path: str, body: dict[str, object]) -> Iterator[socket.socket]:
    """A request on a connection of its own, whose answer nobody has read."""
    with socket.create_connection((server.handle.host, server.handle.port)) as connection:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        yield connection


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_sequences_within_a_step(
    core: ScriptedCore, server: ServerThread, path: str, stream: bool
) -> None:
    body = {**LONG, "messages": [{"role": "user", "content": "x"}], "stream": stream, "n": 2}
    if path == "/v1/completions":
        del body["messages"]
    else:
        del body["prompt"]
    core.step_s = 0.2  # far longer than the news of the end may take
    with sent(server, path, body) as connection:
        until(lambda: core.steps >= 2)
        if stream:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        steps = core.steps
    until(lambda: core.num_held == 0)
    # the step under way ends; one more may have begun before the connection was closed
    assert core.steps - steps <= 1
    assert len(core.aborted) == 1
    until(lambda: server.client is not None and server.client.num_open == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_queued_is_dropped(core: ScriptedCore, server: ServerThread, stream: bool) -> None:
    with sent(server, "/v1/completions", {**LONG, "n": 2}):
        until(lambda: core.num_held == 2)
        with sent(server, "/v1/completions", {**LONG, "stream": stream}):
            until(lambda: core.num_held == 3)
        until(lambda: core.num_held == 2)
        assert len(core.aborted) == 1
    until(lambda: core.num_held == 0)


def test_a_reader_that_stops_reading_holds_up_nobody(core: ScriptedCore, server: ServerThread) -> None:
    core.step_s = 0.0
    with sent(server, "/v1/completions", {"prompt": "x", "max_tokens": 500, "stream": True}), httpx.Client() as http:
        answer = http.post(f"{server.url}/v1/completions", json={"prompt": "say:ok"})
        assert answer.json()["choices"][0]["text"] == "ok"
    until(lambda: core.num_held == 0)


def test_a_full_queue_is_told_with_a_time_to_wait(core: ScriptedCore, server: ServerThread) -> None:
    with sent(server, "/v1/completions", {**LONG, "n": 3}), httpx.Client(base_url=server.url) as http:
        until(lambda: core.num_held == 3)
        answer = http.post("/v1/completions", json={"prompt": "a"})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "overloaded"
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert http.get("/health").status_code == 200, "busy is not ill"
        assert "lamella:admission_rejections_total" in http.get("/metrics").text
    until(lambda: core.num_held == 0)
    with httpx.Client(base_url=server.url) as http:
        assert http.post("/v1/completions", json={"prompt": "say:a"}).status_code == 200


def test_several_prompts_are_admitted_together_or_not_at_all(core: ScriptedCore, server: ServerThread) -> None:
    with sent(server, "/v1/completions", LONG), httpx.Client(base_url=server.url) as http:
        until(lambda: core.num_held == 1)
        assert http.post("/v1/completions", json={"prompt": ["a", "b", "c"]}).status_code == 503
        assert core.num_held == 1


def test_a_body_over_the_limit_is_refused_before_it_is_read(server: ServerThread) -> None:
    with httpx.Client(base_url=server.url) as http:
        answer = http.post("/v1/completions", json={"prompt": "x" * 3000})
        assert answer.status_code == 413
        assert "the limit is 2000" in answer.json()["error"]["message"]
        assert answer.json()["error"]["code"] == "body_too_large"
    # a length is believed: nothing of the body need come
    with socket.create_connection((server.handle.host, server.handle.port)) as connection:
        connection.sendall(b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999999\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_a_chunked_body_over_the_limit(server: ServerThread, path: str) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(50):
            yield b"x" * 500

    with httpx.Client(base_url=server.url) as http:
        assert http.post(path, content=endless()).status_code == 413


def test_a_chunked_body_below_the_limit(server: ServerThread) -> None:
    with httpx.Client(base_url=server.url) as http:
        answer = http.post("/v1/completions", content=iter([b'{"prompt": ', b'"say:ok"}']))
        assert answer.json()["choices"][0]["text"] == "ok"


def test_a_client_that_leaves_in_the_middle_of_its_body(core: ScriptedCore, server: ServerThread) -> None:
    with socket.create_connection((server.handle.host, server.handle.port)) as connection:
        connection.sendall(b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"prompt": ')
    with httpx.Client(base_url=server.url) as http:
        until(lambda: 'status="499"' in http.get("/metrics").text)
    assert core.seen == []
