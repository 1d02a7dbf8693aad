"""POST /tokenize and /detokenize."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from lamella.engine.errors import RequestError
from lamella.engine.server.body import decode, read_body
from lamella.engine.server.errors import json_response
from lamella.engine.server.schema_chat import check_messages
from lamella.engine.server.schema_completions import DetokenizeRequest, TokenizeRequest
from lamella.engine.server.state import ServerState
from lamella.engine.server.unsupported import ACCEPTED, CHAT


async def tokenize(http: Request) -> Response:
    """The ids of a prompt, or of messages behind the chat template."""
    state: ServerState = http.app.state.server
    raw = await read_body(http, state.options.max_body_bytes)
    decoded = decode(raw, TokenizeRequest, CHAT, ACCEPTED)
    body: TokenizeRequest = decoded.fields
    state.model(body.model)
    ids = await state.off_loop(len(raw), lambda: _encode(state, body))
    answer = {"count": len(ids), "max_model_len": state.max_model_len, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = [state.tokenizer.token_name(token_id) or "" for token_id in ids]
    return json_response(answer, headers=decoded.headers)


async def detokenize(http: Request) -> Response:
    """The text of ids."""
    state: ServerState = http.app.state.server
    raw = await read_body(http, state.options.max_body_bytes)
    decoded = decode(raw, DetokenizeRequest, {}, ACCEPTED)
    body: DetokenizeRequest = decoded.fields
    state.model(body.model)
    text = await state.off_loop(len(raw), lambda: _decode(state, body))
    return json_response({"prompt": text}, headers=decoded.headers)


def _decode(state: ServerState, body: DetokenizeRequest) -> str:
    for token_id in body.tokens:
        if not 0 <= token_id < state.vocab_size:
            raise RequestError(f"tokens has id {token_id}, valid ids are 0 to {state.vocab_size - 1}", "tokens")
    return state.tokenizer.decode(body.tokens, skip_special_tokens=bool(body.skip_special_tokens))


def _encode(state: ServerState, body: TokenizeRequest) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", "prompt")
    if body.prompt is not None:
        return state.tokenizer.encode(body.prompt, body.add_special_tokens is not False)
    assert body.messages is not None
    check_messages(body.messages)
    going_on = bool(body.continue_final_message)
    text = state.template.render(
        body.messages,
        add_generation_prompt=not going_on if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=going_on,
        variables=body.chat_template_kwargs,
    )
    return state.tokenizer.encode(text, bool(body.add_special_tokens))
