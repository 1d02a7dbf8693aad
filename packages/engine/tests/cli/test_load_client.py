"""The client that makes load: what it reads of a server, and what it says of one that answers something else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from lamella.engine.cli.load_client import Answer, LoadClient, LoadError


class Peer:
    """Answers every request with the same bytes."""

    def __init__(self) -> None:
        self.status = 200
        self.body = b""
        peer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.send_response(peer.status)
                self.send_header("content-length", str(len(peer.body)))
                self.end_headers()
                self.wfile.write(peer.body)

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                self.do_GET()

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture(scope="module")
def module_peer() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.server.shutdown()
    peer.server.server_close()


@pytest.fixture
def peer(module_peer: Peer) -> Peer:
    module_peer.status, module_peer.body = 200, b""
    return module_peer


def post(peer: Peer, *, stream: bool) -> Answer:
    async def main() -> Answer:
        client = LoadClient(peer.url)
        try:
            return await client.post("/v1/completions", {"prompt": "x", "stream": stream})
        finally:
            client.close()

    return asyncio.run(main())


def first_model(peer: Peer) -> str:
    async def main() -> str:
        client = LoadClient(peer.url)
        try:
            return await client.first_model()
        finally:
            client.close()

    return asyncio.run(main())


def test_a_stream_is_read_as_the_whole_is(peer: Peer) -> None:
    peer.body = b'{"choices":[{"text":"ab"}],"usage":{"prompt_tokens":3,"completion_tokens":2}}'
    whole = post(peer, stream=False)
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n'
    chunks = b'data: {"choices":[{"text":"a"}]}\n\ndata: {"choices":[{"delta":{"content":"b"}}]}\n\n'
    peer.body = b": keep-alive\n\n" + chunks + usage + b"data: [DONE]\n\n"
    streamed = post(peer, stream=True)
    for answer in (whole, streamed):
        assert (answer.text, answer.prompt_tokens, answer.output_tokens, answer.error) == ("ab", 3, 2, None)
    assert len(streamed.chunk_times) == 2


def test_an_error_in_a_stream_is_the_answers(peer: Peer) -> None:
    peer.body = b'data: {"error":{"message":"it broke"}}\n\ndata: [DONE]\n\n'
    assert "it broke" in (post(peer, stream=True).error or "")


def test_models(peer: Peer) -> None:
    peer.body = b'{"data":[{"id":"first"},{"id":"second"}]}'
    assert first_model(peer) == "first"
    for body in (b"", b"{}", b"[]", b"null", b"<html>", b"\xff", b'{"data":[]}', b'{"data":[{}]}', b'{"data":5}'):
        peer.body = body
        with pytest.raises(LoadError, match="not that of an OpenAI-compatible server|lists no model"):
            first_model(peer)


@pytest.mark.parametrize("stream", [False, True])
def test_answers_of_something_else(peer: Peer, stream: bool) -> None:
    bodies = [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"<html>",
        b"\xff",
        b'{"choices":[]}',
        b"data: x\n\n",
        b'data: {"choices":5}\n\n',
    ]
    for body in [*bodies, b'data: {"choices":[{"text":5}],"usage":7}\n\n', b'data: {"choices":[5]}\n\n']:
        peer.body = body
        with pytest.raises(LoadError, match="not that of an OpenAI-compatible server|no choices|without its end mark"):
            post(peer, stream=stream)
    peer.status, peer.body = 503, b"later"
    with pytest.raises(LoadError, match="status 503: later"):
        post(peer, stream=stream)


@pytest.mark.parametrize(
    ("url", "key", "message"),
    [
        ("ftp://x", None, "base URL must look like http://host:port"),
        ("http://x:99999", None, "base URL must look like"),
        ("http://[::1", None, "base URL must look like"),
        ("", None, "base URL must look like"),
        ("http://x", "a\nb", "no header can carry"),
    ],
)
def test_addresses_and_keys_that_cannot_be(url: str, key: str | None, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        LoadClient(url, key)


def test_nobody_listens() -> None:
    async def main() -> None:
        with pytest.raises(LoadError, match=r"cannot reach 127\.0\.0\.1:9"):
            await LoadClient("http://127.0.0.1:9").first_model()

    asyncio.run(main())
