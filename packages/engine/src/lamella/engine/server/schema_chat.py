"""The body of /v1/chat/completions. What a message may hold is checked by the chat template's own reader."""

from __future__ import annotations

from typing import Any

from lamella.engine.errors import RequestError
from lamella.engine.request import check_logprobs
from lamella.engine.server.schema_sampling import GenerationFields

MAX_MESSAGES = 10_000


class ChatRequest(GenerationFields, kw_only=True):
    """A conversation to go on with."""

    messages: list[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def num_logprobs(body: ChatRequest, max_logprobs: int) -> int | None:
    """SamplingParams.logprobs from the two fields of a chat. max_logprobs: -1 for any number."""
    if not body.logprobs:
        if body.top_logprobs:
            raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
        return None
    count = body.top_logprobs or 0
    check_logprobs("top_logprobs", count, max_logprobs)
    return count


def check_messages(messages: list[dict[str, Any]]) -> None:
    """Their number."""
    if not messages:
        raise RequestError("messages must not be empty", "messages")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(f"messages has {len(messages)} entries, the limit is {MAX_MESSAGES}", "messages")
