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
    """Of the chunks with text of a streamed answer; of another nothing is known but the whole."""
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

    async def first_model(self) -> str:
        """Id of the first model that the server lists. Raises LoadError where it lists none."""
        await self._send("GET /v1/models HTTP/1.1\r\n", b"")
        response = await self._finish(_Response())
        listed = _object(bytes(response.body)).get("data")
        first = listed[0] if isinstance(listed, list) and listed else None
        if not isinstance(first, dict) or not isinstance(first.get("id"), str):
            raise LoadError("it lists no model")
        return str(first["id"])

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
            answered = _object(bytes(response.body))
            answer.text = _text(answered)
            self._take(answer, answered)
            if answer.error is None and not answered.get("choices"):
                raise LoadError("the answer has no choices")
            return answer
        pieces: list[str] = []
        ended = False
        while not response.done:
            await self._more(response)
            now = time.perf_counter() - start
            if response.parser.get_status_code() != 200:
                continue
            while (end := response.body.find(b"\n\n")) >= 0:
                event = bytes(response.body[:end])
                del response.body[: end + 2]
                ended = ended or event == b"data: [DONE]"
                if event.startswith(b"data: ") and not ended:
                    event_data = _object(event[6:])
                    text = _text(event_data)
                    if text:
                        pieces.append(text)
                        answer.chunk_times.append(now)
                    self._take(answer, event_data)
        self._check(response)
        if not ended and answer.error is None:
            raise LoadError("the stream ended without its end mark")
        answer.total_s = time.perf_counter() - start
        answer.text = "".join(pieces)
        return answer

    def close(self) -> None:
        """Drop the connection."""
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None

    def _take(self, answer: Answer, data: dict[str, Any]) -> None:
        if data.get("error"):
            answer.error = str(data["error"])
        usage = data.get("usage")
        if isinstance(usage, dict):
            answer.prompt_tokens = usage.get("prompt_tokens", 0)
            answer.output_tokens = usage.get("completion_tokens", 0)

    async def _send(self, head: str, body: bytes) -> None:
        if self._writer is None:
            try:
                self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
            except OSError as error:
                raise LoadError(f"cannot reach {self._host}:{self._port}: {error.strerror or error}") from None
        length = f"content-length: {len(body)}\r\n" if body else ""
        self._writer.write(f"{head}host: {self._host}\r\n{self._key}{length}\r\n".encode() + body)
        try:
            await self._writer.drain()
        except OSError as error:
            raise LoadError(f"the connection broke: {error.strerror or error}") from None

    async def _more(self, response: _Response) -> None:
        assert self._reader is not None
        try:
            data = await self._reader.read(65536)
        except OSError as error:
            raise LoadError(f"the connection broke: {error.strerror or error}") from None
        if not data:
            self.close()
            raise LoadError("the server closed the connection in the middle of an answer")
        try:
            response.parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise LoadError(f"the answer is no HTTP: {error}") from None

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


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(data)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise LoadError(
            f"the answer is not that of an OpenAI-compatible server: {data[:100].decode(errors='replace')!r}"
        )
    return value


def _text(data: dict[str, Any]) -> str:
    """Of the first choice of a completion or a chat, whole or a chunk."""
    choices = data.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else {}
    if not isinstance(choice, dict):
        return ""
    message = choice.get("delta") or choice.get("message")
    text = choice.get("text") or (message.get("content") if isinstance(message, dict) else None)
    return text if isinstance(text, str) else ""
