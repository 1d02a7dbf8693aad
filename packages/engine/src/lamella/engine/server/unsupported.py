"""Fields that clients know and this server does not serve yet, with the values that ask for nothing and so pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Asks = Callable[[Any, Mapping[str, Any]], bool]


def passes(*values: Any) -> Asks:
    """Only these values ask for nothing (null always does)."""
    return lambda value, _body: any(value == known and type(value) is type(known) for known in values)


def _tools(value: Any, body: Mapping[str, Any]) -> bool:
    """Tools that may not be called change nothing."""
    return value == [] or (isinstance(value, list) and body.get("tool_choice") == "none")


def _text_format(value: Any, _body: Mapping[str, Any]) -> bool:
    return isinstance(value, dict) and value.get("type") == "text"


_BOTH: dict[str, Asks] = {
    "response_format": _text_format,
    "structured_outputs": passes(),
    "guided_json": passes(),
    "guided_regex": passes(),
    "guided_choice": passes(),
    "guided_grammar": passes(),
    "guided_decoding_backend": passes(),
    "guided_whitespace_pattern": passes(),
    "best_of": passes(1),
    "use_beam_search": passes(False),
    "length_penalty": passes(1, 1.0),
    "early_stopping": passes(False),
    "prompt_embeds": passes(),
    "truncate_prompt_tokens": passes(),
    "logits_processors": passes([]),
    "kv_transfer_params": passes({}),
    "vllm_xargs": passes({}),
    "repetition_detection": passes(),
    "spaces_between_special_tokens": passes(True),
    "adapter": passes(),
    "lora": passes(),
}

COMPLETIONS: dict[str, Asks] = {**_BOTH, "suffix": passes("")}

CHAT: dict[str, Asks] = {
    **_BOTH,
    "tools": _tools,
    "tool_choice": passes("none", "auto"),
    "functions": passes([]),
    "function_call": passes("none", "auto"),
    "modalities": passes(["text"]),
    "audio": passes(),
    "prediction": passes(),
    "web_search_options": passes(),
    "reasoning_effort": passes("none"),
    "thinking_token_budget": passes(),
    "verbosity": passes("medium"),
    "store": passes(False),
    "echo": passes(False),
    "documents": passes([]),
    "chat_template": passes(),
    "mm_processor_kwargs": passes({}),
    "media_io_kwargs": passes({}),
}

ACCEPTED = frozenset(
    {"user", "metadata", "safety_identifier", "prompt_cache_key", "service_tier", "parallel_tool_calls"}
)
"""Names for the client's own books, and hints: they change nothing in the answer."""
