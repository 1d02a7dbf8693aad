"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from lamella.engine.request import Request
from lamella.engine.server import sse
from lamella.engine.server.answer import Answer, Prepared, respond
from lamella.engine.server.job import Job
from lamella.engine.server.logprobs import chat_logprobs, prompt_logprobs
from lamella.engine.server.schema_chat import ChatRequest, check_messages, num_logprobs
from lamella.engine.server.schema_sampling import asked_max_tokens, check_stream_options, sampling_params
from lamella.engine.server.state import ServerState
from lamella.engine.server.unsupported import CHAT
from lamella.engine.text.output import Piece


async def create_chat_completion(http: HttpRequest) -> Response | sse.EventStream:
    """Answer a conversation, at once or as a stream."""
    return await respond(http, ChatRequest, CHAT, _prepared)


def _prepared(state: ServerState, body: ChatRequest) -> Prepared:
    return Prepared([prepare(state, body)], lambda job, model: ChatAnswer(state, job, body, model))


def prepare(state: ServerState, body: ChatRequest) -> Request:
    """Template, tokens, parameters. Raises RequestError."""
    check_messages(body.messages)
    check_stream_options(body)
    # there must be something to answer
    limit_name, limit = asked_max_tokens(body, least=1 if body.prompt_logprobs is None else 0)
    params = sampling_params(
        body,
        state.sampling_defaults,
        max_tokens=limit,
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
        use_prefix_cache=body.use_prefix_cache is not False,
        use_kv_tiers=body.use_kv_tiers is not False,
        param="messages",
        max_tokens_param=limit_name,
    )


class ChatAnswer(Answer):
    """What a job's outputs look like to the client: one object, or chunks (as sse.ChunkWriter)."""

    def __init__(self, state: ServerState, job: Job, body: ChatRequest, model: str) -> None:
        super().__init__(
            state,
            job,
            body,
            model,
            id_prefix="chatcmpl",
            kind="chat.completion",
            shape=sse.CHAT,
            with_logprobs=bool(body.logprobs),
        )
        self._num_top = None if body.top_logprobs == -1 else body.top_logprobs or 0

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
        answer = self._whole(choices)
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
        return opening + self._chunk(choice, piece, piece.text, self._logprobs(piece.logprobs), {})

    def _open(self, choice: int) -> bytes:
        """The first chunk of a choice tells the role."""
        first = not self._opened
        self._opened.add(choice)
        fields = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        if first and self._return_ids:
            return self._chunks.raw(choice, fields, prompt_token_ids=self._job.generations[0].request.prompt_ids)
        return self._chunks.raw(choice, fields)

    def _logprobs(self, positions: Any) -> dict[str, Any] | None:
        if not positions and positions != []:
            return None
        return chat_logprobs(positions, num_top=self._num_top, as_ids=self._as_ids)
