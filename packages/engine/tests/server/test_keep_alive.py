"""Comments in a stream that has nothing to tell, so that nobody on the way takes the connection for dead."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from lamella.engine.testing.scripted_core import ScriptedCore
from lamella.engine.testing.server_thread import MODEL, ServerThread, serve
from lamella.engine.testing.sse_reader import joined_text, read_events
from lamella.engine.wire import Batch

COMMENT = ": keep-alive"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "say:ok"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "say:ok"}]},
}


class GatedCore(ScriptedCore):
    """Its first step lasts until the gate is opened."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.gate = threading.Event()

    def run_once(self) -> Batch:
        assert self.gate.wait(20)
        return super().run_once()


@pytest.fixture
def core() -> Iterator[GatedCore]:
    made = GatedCore()
    yield made
    made.gate.set()


@pytest.fixture
def server(core: GatedCore) -> Iterator[ServerThread]:
    with serve(core, keep_alive_s=0.03) as running:
        yield running
        core.gate.set()


@pytest.mark.parametrize("path", BODIES)
def test_a_silent_stream_sends_comments_and_then_its_answer(core: GatedCore, server: ServerThread, path: str) -> None:
    with httpx.stream("POST", server.url + path, json={**BODIES[path], "stream": True}, timeout=20) as answer:
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        lines = answer.iter_lines()
        assert [next(lines) for _ in range(4)] == [COMMENT, "", COMMENT, ""]
        core.gate.set()
        assert joined_text(read_events(lines)) == "ok"


@pytest.mark.parametrize("path", BODIES)
def test_the_official_client_passes_over_them(core: GatedCore, server: ServerThread, path: str) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        # the headers came with the first comment
        if path == "/v1/completions":
            completion = client.completions.create(model=MODEL, prompt="say:ok", stream=True)
            core.gate.set()
            text = "".join(chunk.choices[0].text for chunk in completion)
        else:
            chat = client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "say:ok"}], stream=True
            )
            core.gate.set()
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chat)
    assert text == "ok"


def test_a_failure_behind_a_comment_is_an_event(core: GatedCore, server: ServerThread) -> None:
    core.fail_on = ord("o")
    body = {**BODIES["/v1/completions"], "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=20) as answer:
        lines = answer.iter_lines()
        assert next(lines) == COMMENT
        core.gate.set()
        (event,) = read_events(lines)
    assert event["error"]["message"] == "the logits are not numbers"


def test_tokens_without_text_are_silence_too() -> None:
    """What may be the beginning of a stop string is held back."""
    with serve(ScriptedCore(step_s=0.005), keep_alive_s=0.02) as server:
        body = {"prompt": "x", "max_tokens": 60, "stop": "x" * 64, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=20) as answer:
            lines = list(answer.iter_lines())
    assert lines[0] == COMMENT
    assert joined_text(read_events(lines)) == "x" * 60


def test_who_wants_none_gets_none(core: GatedCore) -> None:
    data = b'{"prompt": "say:ok", "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data)
    with serve(core, keep_alive_s=0.0) as server:
        with socket.create_connection((server.handle.host, server.handle.port)) as connection:
            connection.sendall(head + data)
            connection.settimeout(0.2)
            with pytest.raises(TimeoutError):
                connection.recv(100)
            core.gate.set()
            connection.settimeout(20)
            received = b""
            while b"[DONE]" not in received:
                received += connection.recv(65536)
        assert COMMENT.encode() not in received
