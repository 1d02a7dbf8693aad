"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from lamella.engine.request import Request
from lamella.engine.server import sse
from lamella.engine.server.body import decode, read_body
from lamella.engine.server.errors import json_response
from lamella.engine.server.job import Job
from lamella.engine.server.logprobs import chat_logprobs, prompt_logprobs
from lamella.engine.server.schema_chat import ChatRequest, check_messages, max_tokens, num_logprobs
from lamella.engine.server.schema_sampling import check_stream_options, sampling_params
from lamella.engine.server.state import ServerState
from lamella.engine.server.unsupported import ACCEPTED, CHAT
from lamella.engine.text.output import Piece


async def create_chat_completion(http: HttpRequest) -> Response | sse.EventStream:
    """Answer a conversation, at once or as a stream."""
    state: ServerState = http.app.state.server
    arrival_s = state.clock()
    state.admit()
    raw = await read_body(http, state.options.max_body_bytes)
    decoded = decode(raw, ChatRequest, CHAT, ACCEPTED)
    body: ChatRequest = decoded.fields
    model = state.model(body.model)
    request = await state.off_loop(len(raw), lambda: prepare(state, body))
    job = Job(state, [request], arrival_s)
    try:
        answer = ChatAnswer(state, job, body, model)
        if body.stream:
            return sse.EventStream(job, answer, decoded.headers)
    except BaseException:
        job.close()
        raise
    await job.finish(http.receive)
    return json_response(answer.whole(), headers=decoded.headers)


def prepare(state: ServerState, body: ChatRequest) -> Request:
    """Template, tokens, parameters. Raises RequestError."""
    check_messages(body.messages)
    check_stream_options(body)
    params = sampling_params(
        body,
        state.sampling_defaults,
        max_tokens=max_tokens(body),
        logprobs=num_logprobs(body, state.options.max_logprobs),
        vocab_size=state.vocab_size,
        max_logprobs=state.options.max_logprobs,
    )
    going_on = bool(body.continue_final_message)
    text = state.template.render(
        body.messages,
        add_generation_prompt=not going_on if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=going_on,
        variables=body.chat_template_kwargs,
    )
    return state.intake.request(
        text,
        params,
        # the template writes the special tokens itself
        add_special_tokens=bool(body.add_special_tokens),
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
        param="messages",
    )


class ChatAnswer:
    """What a job's outputs look like to the client: one object, or chunks (as sse.ChunkWriter)."""

    def __init__(self, state: ServerState, job: Job, body: ChatRequest, model: str) -> None:
        self._job = job
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._fingerprint = state.fingerprint
        self._num_top = body.top_logprobs or 0
        self._as_ids = bool(body.return_tokens_as_token_ids)
        self._return_ids = bool(body.return_token_ids)
        options = body.stream_options
        self._include_usage = bool(options and options.include_usage)
        self._running_usage = bool(options and options.continuous_usage_stats)
        self._opened: set[int] = set()
        self._chunks = sse.Chunks(
            sse.CHAT,
            answer_id=self._id,
            created=self._created,
            model=model,
            fingerprint=self._fingerprint,
            include_usage=self._include_usage,
        )
        # chunks that carry nothing but text take the short way
        self._simple = not (body.logprobs or self._return_ids or self._running_usage)

    def whole(self) -> dict[str, Any]:
        """The answer in one object."""
        generation = self._job.generations[0]
        choices = []
        for output in generation.outputs:
            choice: dict[str, Any] = {
                "index": output.index,
                "message": {"role": "assistant", "content": output.text, "refusal": None},
                "logprobs": self._logprobs(output.logprobs),
                "finish_reason": output.finish_reason,
                "stop_reason": output.stop_reason,
            }
            if self._return_ids:
                choice["token_ids"] = output.token_ids
            choices.append(choice)
        answer: dict[str, Any] = {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
            "choices": choices,
            "usage": sse.usage_json(self._job.usage),
        }
        scores = generation.prompt_logprobs()
        if scores is not None:
            answer["prompt_logprobs"] = prompt_logprobs(scores)
        if self._return_ids:
            answer["prompt_token_ids"] = generation.request.prompt_ids
        return answer

    def piece(self, choice: int, piece: Piece) -> bytes:
        """Chunks for a piece."""
        opening = b"" if choice in self._opened else self._open(choice)
        if piece.finish_reason is None:
            if self._simple:
                return opening + self._chunks.text(choice, piece.text) if piece.text else opening
            if not (piece.text or piece.token_ids):
                return opening
        return opening + self._chunks.full(
            choice,
            piece.text,
            logprobs=self._logprobs(piece.logprobs),
            finish_reason=piece.finish_reason,
            usage=self._job.usage if self._running_usage else None,
            extra=self._extra(piece),
        )

    def last(self) -> bytes:
        """The usage, if it was asked for."""
        return self._chunks.usage(self._job.usage) if self._include_usage else b""

    def _open(self, choice: int) -> bytes:
        """The first chunk of a choice tells the role."""
        first = not self._opened
        self._opened.add(choice)
        fields = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        if first and self._return_ids:
            return self._chunks.raw(choice, fields, prompt_token_ids=self._job.generations[0].request.prompt_ids)
        return self._chunks.raw(choice, fields)

    def _extra(self, piece: Piece) -> dict[str, Any]:
        extra: dict[str, Any] = {}
        if piece.finish_reason is not None:
            extra["stop_reason"] = piece.stop_reason
        if self._return_ids:
            extra["token_ids"] = piece.token_ids
        return extra

    def _logprobs(self, positions: Any) -> dict[str, Any] | None:
        if not positions and positions != []:
            return None
        return chat_logprobs(positions, num_top=self._num_top, as_ids=self._as_ids)
