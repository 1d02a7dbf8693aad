"""POST /v1/completions: one or several prompts, n choices for each."""

from __future__ import annotations

from typing import Any, NamedTuple

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from lamella.engine.errors import RequestError
from lamella.engine.generation import Generation
from lamella.engine.request import Request
from lamella.engine.server import sse
from lamella.engine.server.answer import Answer, Prepared, respond
from lamella.engine.server.job import Job
from lamella.engine.server.logprobs import completion_logprobs, prompt_logprobs
from lamella.engine.server.schema_completions import DEFAULT_MAX_TOKENS, CompletionRequest, prompts
from lamella.engine.server.schema_sampling import asked_max_tokens, check_stream_options, sampling_params
from lamella.engine.server.state import ServerState
from lamella.engine.server.unsupported import COMPLETIONS
from lamella.engine.text.detokenizer import Detokenizer
from lamella.engine.text.logprobs import PositionLogprobs, TokenLogprob, token_text_after
from lamella.engine.text.output import Piece
from lamella.engine.text.tokenizer import Tokenizer


async def create_completion(http: HttpRequest) -> Response | sse.EventStream:
    """Go on with prompts, at once or as a stream."""
    return await respond(http, CompletionRequest, COMPLETIONS, _prepared)


def _prepared(state: ServerState, body: CompletionRequest) -> Prepared:
    requests, echoes = prepare(state, body)
    return Prepared(requests, lambda job, model: CompletionAnswer(state, job, body, model, echoes))


def prepare(state: ServerState, body: CompletionRequest) -> tuple[list[Request], list[Echo] | None]:
    """Tokens and parameters of each prompt, and the prompts to echo, if so asked. Raises RequestError."""
    check_stream_options(body)
    limit_name, limit = asked_max_tokens(body, least=0)
    if limit == 0 and not body.echo and body.prompt_logprobs is None:
        raise RequestError(f"{limit_name} 0 needs echo: true, or there is no answer", limit_name)
    if limit is None:
        limit = state.sampling_defaults.get("max_tokens", DEFAULT_MAX_TOKENS)
    params = sampling_params(
        body,
        state.sampling_defaults,
        max_tokens=limit,
        logprobs=body.logprobs,
        vocab_size=state.vocab_size,
        max_logprobs=state.options.max_logprobs,
        # an echoed prompt is scored as the output is
        prompt_logprobs=body.logprobs if body.echo else None,
    )
    given = prompts(body.prompt)
    requests = [
        state.intake.request(
            prompt,
            params,
            add_special_tokens=body.add_special_tokens is not False,
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            use_prefix_cache=body.use_prefix_cache is not False,
            use_kv_tiers=body.use_kv_tiers is not False,
            max_tokens_param=limit_name,
        )
        for prompt in given
    ]
    if not body.echo:
        return requests, None
    return requests, [echo(state.tokenizer, request, prompt) for request, prompt in zip(requests, given)]


class Echo(NamedTuple):
    """A prompt as the client gets it back."""

    text: str
    offsets: list[int]
    """Where in the text each of its tokens begins."""


class CompletionAnswer(Answer):
    """What a job's outputs look like to the client: one object, or chunks (as sse.ChunkWriter)."""

    def __init__(
        self, state: ServerState, job: Job, body: CompletionRequest, model: str, echoes: list[Echo] | None
    ) -> None:
        """echoes: the prompts, in the order of the job's requests; None: not part of the answer."""
        super().__init__(
            state,
            job,
            body,
            model,
            id_prefix="cmpl",
            kind="text_completion",
            shape=sse.COMPLETION,
            with_logprobs=body.logprobs is not None,
        )
        self._num_sequences = len(job.generations[0].outputs)
        self._tells_scores = body.prompt_logprobs is not None
        self._echoes = echoes

    def whole(self) -> dict[str, Any]:
        """The answer in one object."""
        choices = []
        for number, generation in enumerate(self._job.generations):
            scores = generation.prompt_logprobs() if self._tells_scores else None
            for output in generation.outputs:
                echoed = self._echoes[number] if self._echoes is not None else None
                choice: dict[str, Any] = {
                    "index": number * self._num_sequences + output.index,
                    "text": (echoed.text if echoed is not None else "") + output.text,
                    "logprobs": self._logprobs(generation, echoed, output.logprobs, output.offsets, opens=True),
                    "finish_reason": output.finish_reason,
                    "stop_reason": output.stop_reason,
                }
                if scores is not None:
                    choice["prompt_logprobs"] = prompt_logprobs(scores)
                if self._return_ids:
                    choice["token_ids"] = output.token_ids
                    choice["prompt_token_ids"] = generation.request.prompt_ids
                choices.append(choice)
        return self._whole(choices)

    def piece(self, choice: int, piece: Piece) -> bytes:
        """A chunk for a piece. The first one of a choice begins with the echoed prompt."""
        number = choice // self._num_sequences
        opens = choice not in self._opened
        self._opened.add(choice)
        text, echoed = piece.text, None
        if self._echoes is not None:
            echoed = self._echoes[number]
            if opens:
                text = echoed.text + text
        if piece.finish_reason is None:
            if self._simple:
                return self._chunks.text(choice, text) if text else b""
            if not (text or piece.token_ids):
                return b""
        generation = self._job.generations[number]
        logprobs = self._logprobs(generation, echoed, piece.logprobs, piece.offsets or [], opens=opens)
        extra: dict[str, Any] = (
            {"prompt_token_ids": generation.request.prompt_ids} if self._return_ids and opens else {}
        )
        return self._chunk(choice, piece, text, logprobs, extra)

    def _logprobs(
        self,
        generation: Generation,
        echoed: Echo | None,
        positions: list[PositionLogprobs] | None,
        offsets: list[int],
        *,
        opens: bool,
    ) -> dict[str, list[Any]] | None:
        """Of the given positions; `opens`: and of the echoed prompt in front of them."""
        if positions is None:
            return None
        if echoed is None:
            return completion_logprobs(positions, offsets, as_ids=self._as_ids)
        result = completion_logprobs(positions, offsets, as_ids=self._as_ids, shift=len(echoed.text))
        if not opens:
            return result
        tokenizer, first_id = generation.tokenizer, generation.request.prompt_ids[0]
        first_text = token_text_after(tokenizer, first_id, ())
        first = TokenLogprob(first_id, first_text, tokenizer.token_bytes(first_id), 0.0)
        prompt = completion_logprobs(
            generation.prompt_logprobs() or [], echoed.offsets, as_ids=self._as_ids, first=first
        )
        return {key: prompt[key] + result[key] for key in result}


def echo(tokenizer: Tokenizer, request: Request, prompt: str | list[int]) -> Echo:
    """The prompt's text as given, or as its ids read, and its tokens' places."""
    stream = Detokenizer(tokenizer, (), request.params.skip_special_tokens)
    parts, offsets, length = [], [], 0
    for token_id in request.prompt_ids:
        offsets.append(length)
        parts.append(stream.push(token_id))
        length += len(parts[-1])
    if isinstance(prompt, str):
        return Echo(prompt, offsets)
    return Echo("".join(parts) + stream.flush(), offsets)
