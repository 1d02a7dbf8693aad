"""Chat messages as clients send them, checked and brought into the form that a template takes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lamella.engine.errors import RequestError, UnsupportedFieldError

_TEXT_PARTS = {"text": "text", "refusal": "refusal"}
"""Part types that are text, and the field it stands in."""


def plain_messages(
    messages: Sequence[Mapping[str, Any]], *, as_parts: bool = False, as_strings: bool = True
) -> list[dict[str, Any]]:
    """Copies of the messages whose content is a string, or, with as_parts, a list of text parts where it was one.

    as_strings False: strings become lists of one part, for templates that know nothing else. Arguments of tool calls
    become objects. Raises RequestError for a malformed message, UnsupportedFieldError for parts that are not text.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        raise RequestError("messages must be a list with at least one message", "messages")
    return [_message(message, f"messages[{index}]", as_parts, as_strings) for index, message in enumerate(messages)]


def _message(message: Any, where: str, as_parts: bool, as_strings: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object, got {type(message).__name__}", "messages")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where} has no role", "messages")
    plain = dict(message)
    plain["content"] = _content(message.get("content"), role, where, as_parts, as_strings)
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_tool_call(call, where) for call in _list(plain["tool_calls"], f"{where}.tool_calls")]
    else:
        plain.pop("tool_calls", None)
    return plain


def _content(content: Any, role: str, where: str, as_parts: bool, as_strings: bool) -> str | list[dict[str, str]]:
    if content is None:
        if role != "assistant":
            raise RequestError(f"{where} has no content", "messages")
        content = ""
    if isinstance(content, str):
        return content if as_strings else [{"type": "text", "text": content}]
    parts = [_part(part, f"{where}.content[{index}]") for index, part in enumerate(_list(content, f"{where}.content"))]
    return parts if as_parts else "\n".join(part["text"] for part in parts)


def _part(part: Any, where: str) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        raise RequestError(f"{where} must be an object, got {type(part).__name__}", "messages")
    kind = part.get("type")
    field = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if field is None:
        raise UnsupportedFieldError(f"{where} is of the type {kind!r}; only text is supported", "messages")
    text = part.get(field)
    if not isinstance(text, str):
        raise RequestError(f"{where} has no string in its field {field!r}", "messages")
    return {"type": "text", "text": text}


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """Clients send a call's arguments as JSON text; templates expect the object."""
    if not isinstance(call, Mapping):
        raise RequestError(f"{where}.tool_calls must hold objects, got {type(call).__name__}", "messages")
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError as error:
        raise RequestError(f"{where}.tool_calls has arguments that are not JSON: {error}", "messages") from error
    return {**call, "function": {**function, "arguments": arguments}}


def _list(value: Any, where: str) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        raise RequestError(f"{where} must be a string or a list, got {type(value).__name__}", "messages")
    return value
