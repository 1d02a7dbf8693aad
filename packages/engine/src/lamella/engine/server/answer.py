"""What both generation endpoints do: a body comes in, its requests run, an answer goes out, in one object or as chunks.

body ─► decode ─► prepare (texts, parameters) ─► Job ─┬─► Answer.whole()   one JSON object
                                                      └─► EventStream      Answer.piece() for what each step added
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from lamella.engine.request import Request, draft_limit
from lamella.engine.server import sse
from lamella.engine.server.body import Unsupported, decode, read_body
from lamella.engine.server.errors import json_response
from lamella.engine.server.job import Job
from lamella.engine.server.schema_sampling import GenerationFields
from lamella.engine.server.state import ServerState
from lamella.engine.server.unsupported import ACCEPTED
from lamella.engine.text.output import Piece


class WholeOrChunks(sse.ChunkWriter, Protocol):
    """What an endpoint makes of a job."""

    def whole(self) -> dict[str, Any]:
        """The answer in one object, once the job has ended."""


class Prepared(NamedTuple):
    """A checked body."""

    requests: list[Request]
    answer: Callable[[Job, str], WholeOrChunks]
    """Called with the running job and the name of the model."""


async def respond(
    http: HttpRequest,
    schema: type[GenerationFields],
    unsupported: Unsupported,
    prepare: Callable[[ServerState, Any], Prepared],
) -> Response | sse.EventStream:
    """Answer a request, at once or as a stream. prepare: texts to tokens; may run on another thread."""
    state: ServerState = http.app.state.server
    arrival_s = state.clock()
    state.admit()
    raw = await read_body(http, state.options.max_body_bytes)
    decoded = decode(raw, schema, unsupported, ACCEPTED)
    model = state.model(decoded.fields.model)
    prepared = await state.off_loop(len(raw), lambda: prepare(state, decoded.fields))
    job = Job(state, prepared.requests, arrival_s)
    try:
        answer = prepared.answer(job, model)
        if decoded.fields.stream:
            return sse.EventStream(job, answer, decoded.headers, keep_alive_s=state.options.keep_alive_s)
    except BaseException:
        job.close()
        raise
    await job.finish(http.receive)
    return json_response(answer.whole(), headers=decoded.headers)


class Answer:
    """What the answers of both endpoints have in common: their head, and what their body asks of all chunks."""

    def __init__(
        self,
        state: ServerState,
        job: Job,
        body: GenerationFields,
        model: str,
        *,
        id_prefix: str,
        kind: str,
        shape: sse.ChunkShape,
        with_logprobs: bool,
    ) -> None:
        """kind: what `object` says of a whole answer; shape: of its chunks."""
        self._job = job
        self._head = {
            "id": f"{id_prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": state.fingerprint,
        }
        speculation = state.client.info.speculation
        self._speculates = speculation is not None
        if speculation is not None and not speculation.exact:
            params = [generation.request.params for generation in job.generations]
            if any(draft_limit(each, speculation.max_drafts, exact=False)[0] for each in params):
                self._head["rejection_sample_method"] = speculation.rule  # the answer is not the model's own
        self._as_ids = bool(body.return_tokens_as_token_ids)
        self._return_ids = bool(body.return_token_ids)
        options = body.stream_options
        self._include_usage = bool(options and options.include_usage)
        self._running_usage = bool(options and options.continuous_usage_stats)
        self._opened: set[int] = set()
        """Choices of which a chunk has been sent."""
        self._chunks = sse.Chunks(shape, self._head, include_usage=self._include_usage, speculates=self._speculates)
        self._simple = not (with_logprobs or self._return_ids or self._running_usage)
        """Chunks that carry nothing but text may take the short way."""

    def last(self) -> bytes:
        """The usage, if it was asked for."""
        return self._chunks.usage(self._job.usage) if self._include_usage else b""

    def _whole(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        usage = sse.usage_json(self._job.usage, speculates=self._speculates)
        return {**self._head, "choices": choices, "usage": usage}

    def _chunk(self, choice: int, piece: Piece, text: str, logprobs: Any, extra: dict[str, Any]) -> bytes:
        """A chunk with all that was asked for. text: the piece's, with what stands in front of it."""
        if piece.finish_reason is not None:
            extra["stop_reason"] = piece.stop_reason
        if self._return_ids:
            extra["token_ids"] = piece.token_ids
        return self._chunks.full(
            choice,
            text,
            logprobs=logprobs,
            finish_reason=piece.finish_reason,
            usage=self._job.usage if self._running_usage else None,
            extra=extra,
        )
