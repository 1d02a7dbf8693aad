"""The body of /v1/completions."""

from __future__ import annotations

from typing import Any

import msgspec

from lamella.engine.errors import RequestError
from lamella.engine.server.schema_sampling import GenerationFields

MAX_PROMPTS = 256
DEFAULT_MAX_TOKENS = 16
"""Where neither the request nor the model says."""


class CompletionRequest(GenerationFields, kw_only=True):
    """prompt: a text, a list of texts, a list of token ids, or a list of lists of token ids."""

    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool | None = None


def prompts(given: str | list[Any]) -> list[str | list[int]]:
    """The prompts of a body, one or several. Raises RequestError for mixed or empty lists."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise RequestError("prompt must not be empty", "prompt")
    if _all(given, int):
        return [given]
    if len(given) > MAX_PROMPTS:
        raise RequestError(f"prompt has {len(given)} entries, the limit is {MAX_PROMPTS}", "prompt")
    if _all(given, str):
        return list(given)
    if _all(given, list) and all(ids and _all(ids, int) for ids in given):
        return list(given)
    raise RequestError("prompt must be a text, a list of texts, token ids, or a list of lists of token ids", "prompt")


def _all(values: list[Any], kind: type) -> bool:
    # exact types: in Python true is an int, in JSON it is not
    return {type(value) for value in values} == {kind}


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of /detokenize."""

    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool | None = None
