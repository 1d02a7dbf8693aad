"""A light HTTP/1.1 client for load: asyncio streams and httptools, one connection per worker, server-sent events.

Not a general client: it sends JSON, reads JSON or an event stream, and keeps time. Its own CPU time is measured by the
caller, so that a bench can say whether the client or the server was the limit.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

from lamella.engine.errors import EngineError


class LoadError(EngineError):
    """The server answered with an error, or the connection broke."""


class Answer(msgspec.Struct):
    """What one request brought, with times in seconds since it was sent."""

    text: str = ""
    chunk_times: list[float] = []
    prompt_tokens: int = 0
    output_tokens: int = 0
    total_s: float = 0.0
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.chunk_times[0] if self.chunk_times else self.total_s


class _Response:
    """Collects what httptools' parser calls back with."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.done = False
        self.keep_alive = True
        self.parser = httptools.HttpResponseParser(self)

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.done = True
        self.keep_alive = self.parser.should_keep_alive()


class LoadClient:
    """One connection to the server; not for concurrent use."""

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        try:
            parts = urlsplit(base_url if "//" in base_url else "http://" + base_url)
            host, port = parts.hostname, parts.port
        except ValueError:  # no number, no address
            host = None
        if host is None or parts.scheme != "http":
            raise LoadError(f"base URL must look like http://host:port, got {base_url!r}")
        if api_key is not None and not (api_key.isprintable() and api_key.isascii()):
            raise LoadError("the API key has characters that no header can carry")
        self._host, self._port = host, port or 80
        self._key = f"authorization: Bearer {api_key}\r\n" if api_key else ""
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def get(self, path: str) -> bytes:
        """Body of a GET. Raises LoadError unless the status is 200."""
        await self._send(f"GET {path} HTTP/1.1\r\n", b"")
        response = await self._finish(_Response())
        return bytes(response.body)

    async def post(self, path: str, body: dict[str, Any]) -> Answer:
        """Send a completion request; reads the stream if the body asks for one."""
        data = msgspec.json.encode(body)
        start = time.perf_counter()
        await self._send(f"POST {path} HTTP/1.1\r\ncontent-type: application/json\r\n", data)
        answer = Answer()
        response = _Response()
        if not body.get("stream"):
            await self._finish(response)
            answer.total_s = time.perf_counter() - start
            answer.chunk_times = [answer.total_s]
            self._take(answer, msgspec.json.decode(response.body))
            return answer
        pieces: list[str] = []
        while not response.done:
            await self._more(response)
            now = time.perf_counter() - start
            if response.parser.get_status_code() != 200:
                continue
            while (end := response.body.find(b"\n\n")) >= 0:
                event = bytes(response.body[:end])
                del response.body[: end + 2]
                if event.startswith(b"data: ") and event != b"data: [DONE]":
                    event_data = msgspec.json.decode(event[6:])
                    if event_data.get("choices"):
                        choice = event_data["choices"][0]
                        text = choice.get("text") or (choice.get("delta") or {}).get("content")
                        if text:
                            pieces.append(text)
                            answer.chunk_times.append(now)
                    self._take(answer, event_data, with_text=False)
        self._check(response)
        answer.total_s = time.perf_counter() - start
        answer.text = "".join(pieces)
        return answer

    def close(self) -> None:
        """Drop the connection."""
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None

    def _take(self, answer: Answer, data: dict[str, Any], with_text: bool = True) -> None:
        if data.get("error"):
            answer.error = str(data["error"])
            return
        usage = data.get("usage")
        if usage:
            answer.prompt_tokens = usage["prompt_tokens"]
            answer.output_tokens = usage["completion_tokens"]
        if with_text:
            choice = data["choices"][0]
            answer.text = choice.get("text") or (choice.get("message") or {}).get("content") or ""

    async def _send(self, head: str, body: bytes) -> None:
        if self._writer is None:
            try:
                self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
            except OSError as error:
                raise LoadError(f"cannot reach {self._host}:{self._port}: {error.strerror or error}") from None
        length = f"content-length: {len(body)}\r\n" if body else ""
        self._writer.write(f"{head}host: {self._host}\r\n{self._key}{length}\r\n".encode() + body)
        await self._writer.drain()

    async def _more(self, response: _Response) -> None:
        assert self._reader is not None
        data = await self._reader.read(65536)
        if not data:
            self.close()
            raise LoadError("the server closed the connection in the middle of an answer")
        response.parser.feed_data(data)

    async def _finish(self, response: _Response) -> _Response:
        while not response.done:
            await self._more(response)
        self._check(response)
        return response

    def _check(self, response: _Response) -> None:
        if not response.keep_alive:
            self.close()
        status = response.parser.get_status_code()
        if status != 200:
            raise LoadError(f"status {status}: {bytes(response.body[:300]).decode(errors='replace')}")
