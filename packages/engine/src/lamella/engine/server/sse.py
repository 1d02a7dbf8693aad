"""Server-sent events: chunks as bytes, and the response that sends them while the client listens.

A chunk differs from the last one in a few values, so everything around them is encoded once per choice:

    data: {"id":…,"choices":[{"index":0,"delta":{"content":  TEXT  },"logprobs":null,"finish_reason":null}]}\\n\\n
    └──────────────────── head ───────────────────────────┘      └────────────────── tail ────────────────┘
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import msgspec
from starlette.types import Receive, Scope, Send

from lamella.engine.errors import EngineError
from lamella.engine.generation import Usage
from lamella.engine.server.body import ClientGone
from lamella.engine.server.errors import error_body, error_response
from lamella.engine.server.job import Job, watch_disconnect
from lamella.engine.text.output import Piece

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: readers of event streams pass over it, and what stands between sees that the connection lives."""
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)

_encode = msgspec.json.Encoder().encode


class ChunkShape(NamedTuple):
    """Where the text stands in a choice of a chunk."""

    object: str
    before_text: bytes
    after_text: bytes
    without_text: bytes
    """In place of all three where there is no text."""


CHAT = ChunkShape("chat.completion.chunk", b'"delta":{"content":', b"}", b'"delta":{}')
COMPLETION = ChunkShape("text_completion", b'"text":', b"", b'"text":""')


class Chunks:
    """Encodes the chunks of one answer."""

    def __init__(
        self, shape: ChunkShape, head: Mapping[str, Any], *, include_usage: bool = False, speculates: bool = False
    ) -> None:
        """head: what stands in front of the choices of a whole answer. include_usage: chunks carry a usage, null but
        for the last one. speculates: the usage tells of drafts."""
        self._speculates = speculates
        # the closing brace makes room for the choices
        self._start = b"data: " + _encode({**head, "object": shape.object})[:-1]
        self._shape = shape
        self._end = b',"usage":null}\n\n' if include_usage else b"}\n\n"
        self._plain = shape.after_text + b',"logprobs":null,"finish_reason":null}]' + self._end
        self._heads: dict[int, bytes] = {}

    def text(self, choice: int, text: str) -> bytes:
        """A chunk with nothing but text."""
        head = self._heads.get(choice)
        if head is None:
            head = self._heads[choice] = self._head(choice) + self._shape.before_text
        return head + _encode(text) + self._plain

    def full(
        self,
        choice: int,
        text: str,
        *,
        logprobs: Any = None,
        finish_reason: str | None = None,
        usage: Usage | None = None,
        extra: dict[str, Any] | None = None,
    ) -> bytes:
        """A chunk with anything. usage: the usage so far; extra: more fields of the choice."""
        shape = self._shape
        content = shape.before_text + _encode(text) + shape.after_text if text else shape.without_text
        ending = {"logprobs": logprobs, "finish_reason": finish_reason, **(extra or {})}
        end = self._end
        if usage is not None:
            end = b',"usage":' + _encode(usage_json(usage, speculates=self._speculates)) + b"}\n\n"
        return self._head(choice) + content + b"," + _encode(ending)[1:] + b"]" + end

    def raw(self, choice: int, fields: dict[str, Any], **top: Any) -> bytes:
        """A chunk whose choice has just these fields; `top` stands beside the choices."""
        beside = b"," + _encode(top)[1:-1] if top else b""
        return self._start + beside + b',"choices":[' + _encode({"index": choice, **fields}) + b"]" + self._end

    def usage(self, usage: Usage) -> bytes:
        """The last chunk: no choices, the usage."""
        encoded = _encode(usage_json(usage, speculates=self._speculates))
        return self._start + b',"choices":[],"usage":' + encoded + b"}\n\n"

    def _head(self, choice: int) -> bytes:
        return self._start + b',"choices":[{"index":%d,' % choice


class ChunkWriter(Protocol):
    """What an endpoint makes of pieces."""

    def piece(self, choice: int, piece: Piece) -> bytes:
        """Chunks for a piece; empty if it has nothing to tell. The first one of a choice opens it."""

    def last(self) -> bytes:
        """What stands between the last piece and the end mark."""


class EventStream:
    """Sends a job's pieces as they come, and a comment whenever nothing could be sent for keep_alive_s (0: never).

    Headers go out with the first of either, so that a request that fails before has an error status; a later failure is
    an event of its own.
    """

    def __init__(self, job: Job, writer: ChunkWriter, headers: dict[str, str], *, keep_alive_s: float = 0.0) -> None:
        self._job = job
        self._writer = writer
        self._headers = [*HEADERS, *((name.encode(), value.encode()) for name, value in headers.items())]
        self._keep_alive_s = keep_alive_s
        self._started = False
        self._sent_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream until the end, the client's disconnect or a failure; the job is over in any case."""
        job, writer = self._job, self._writer
        watch = watch_disconnect(receive, job.disconnect)
        self._sent_s = time.monotonic()
        try:
            while events := await self._take(send):
                body = b"".join([writer.piece(choice, piece) for choice, piece in events])
                if body:
                    await self._send(send, body)
            assert self._started
            await send({"type": "http.response.body", "body": writer.last() + DONE, "more_body": False})
        except ClientGone:
            return
        except EngineError as error:
            if not self._started:
                await error_response(error)(scope, receive, send)
                return
            event = b"data: " + _encode({"error": error_body(error)}) + b"\n\n" + DONE
            await send({"type": "http.response.body", "body": event, "more_body": False})
        finally:
            job.close()
            watch.cancel()

    async def _take(self, send: Send) -> list[tuple[int, Piece]]:
        """What the job gives next, with comments while it gives nothing that can be told."""
        if not self._keep_alive_s:
            return await self._job.take()
        while True:
            left_s = self._sent_s + self._keep_alive_s - time.monotonic()
            if left_s <= 0:
                await self._send(send, KEEP_ALIVE)
                continue
            try:
                return await self._job.take(left_s)
            except TimeoutError:
                pass

    async def _send(self, send: Send, body: bytes) -> None:
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        await send({"type": "http.response.body", "body": body, "more_body": True})
        self._sent_s = time.monotonic()


def usage_json(usage: Usage, *, speculates: bool = False) -> dict[str, Any]:
    """A usage object. speculates: the engine drafts, and the object tells what became of it."""
    encoded: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    if speculates:
        encoded["completion_tokens_details"] = {
            "accepted_prediction_tokens": usage.accepted_drafts,
            "rejected_prediction_tokens": usage.rejected_drafts,
        }
    return encoded
