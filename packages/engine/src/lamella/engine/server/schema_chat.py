"""The body of /v1/chat/completions. What a message may hold is checked by the chat template's own reader."""

from __future__ import annotations

from typing import Any

from lamella.engine.errors import RequestError
from lamella.engine.request import check_logprobs
from lamella.engine.server.schema_sampling import GenerationFields

MAX_MESSAGES = 10_000
MAX_TOKENS = 2**31 - 1


class ChatRequest(GenerationFields, kw_only=True):
    """A conversation to go on with."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    """Wins over max_tokens."""
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


def max_tokens(body: ChatRequest) -> int | None:
    """The limit of the answer, from either field; None: neither says."""
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    value: int | None = getattr(body, name)
    low = 1 if body.prompt_logprobs is None else 0  # there must be something to answer
    if value is not None and not low <= value <= MAX_TOKENS:
        raise RequestError(f"{name} must be in [{low}, {MAX_TOKENS}], got {value}", name)
    return value


def check_messages(messages: list[dict[str, Any]]) -> None:
    """Their number."""
    if not messages:
        raise RequestError("messages must not be empty", "messages")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(f"messages has {len(messages)} entries, the limit is {MAX_MESSAGES}", "messages")
