"""Server-sent events: chunks as bytes, and the response that sends them while the client listens.

A chunk differs from the last one in a few values, so everything around them is encoded once per choice:

    data: {"id":…,"choices":[{"index":0,"delta":{"content":  TEXT  },"logprobs":null,"finish_reason":null}]}\\n\\n
    └──────────────────── head ───────────────────────────┘      └────────────────── tail ────────────────┘
"""

from __future__ import annotations

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
        self,
        shape: ChunkShape,
        *,
        answer_id: str,
        created: int,
        model: str,
        fingerprint: str,
        include_usage: bool = False,
    ) -> None:
        """include_usage: chunks carry a usage, null but for the last one."""
        common = {"id": answer_id, "object": shape.object, "created": created, "model": model}
        # the closing brace makes room for the choices
        self._start = b"data: " + _encode({**common, "system_fingerprint": fingerprint})[:-1]
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
        end = b',"usage":' + _encode(usage_json(usage)) + b"}\n\n" if usage is not None else self._end
        return self._head(choice) + content + b"," + _encode(ending)[1:] + b"]" + end

    def raw(self, choice: int, fields: dict[str, Any], **top: Any) -> bytes:
        """A chunk whose choice has just these fields; `top` stands beside the choices."""
        beside = b"," + _encode(top)[1:-1] if top else b""
        return self._start + beside + b',"choices":[' + _encode({"index": choice, **fields}) + b"]" + self._end

    def usage(self, usage: Usage) -> bytes:
        """The last chunk: no choices, the usage."""
        return self._start + b',"choices":[],"usage":' + _encode(usage_json(usage)) + b"}\n\n"

    def _head(self, choice: int) -> bytes:
        return self._start + b',"choices":[{"index":%d,' % choice


class ChunkWriter(Protocol):
    """What an endpoint makes of pieces."""

    def piece(self, choice: int, piece: Piece) -> bytes:
        """Chunks for a piece; empty if it has nothing to tell. The first one of a choice opens it."""

    def last(self) -> bytes:
        """What stands between the last piece and the end mark."""


class EventStream:
    """Sends a job's pieces as they come. Headers go out with the first of them, so that a request that fails before
    has an error status; a later failure is an event of its own."""

    def __init__(self, job: Job, writer: ChunkWriter, headers: dict[str, str]) -> None:
        self._job = job
        self._writer = writer
        self._headers = [*HEADERS, *((name.encode(), value.encode()) for name, value in headers.items())]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream until the end, the client's disconnect or a failure; the job is over in any case."""
        job, writer = self._job, self._writer
        started = False
        watch = watch_disconnect(receive, job.disconnect)
        try:
            while events := await job.take():
                body = b"".join([writer.piece(choice, piece) for choice, piece in events])
                if not body:
                    continue
                if not started:
                    started = True
                    await send({"type": "http.response.start", "status": 200, "headers": self._headers})
                await send({"type": "http.response.body", "body": body, "more_body": True})
            assert started
            await send({"type": "http.response.body", "body": writer.last() + DONE, "more_body": False})
        except ClientGone:
            return
        except EngineError as error:
            if not started:
                await error_response(error)(scope, receive, send)
                return
            event = b"data: " + _encode({"error": error_body(error)}) + b"\n\n" + DONE
            await send({"type": "http.response.body", "body": event, "more_body": False})
        finally:
            job.close()
            watch.cancel()


def usage_json(usage: Usage) -> dict[str, Any]:
    """A usage object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
