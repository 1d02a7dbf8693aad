"""Chat messages to prompt text, by the template that came with the model.

Templates are Jinja programs from model files, so they run in Jinja's sandbox, and their output and the values they
compute are bounded. What they find: messages, tools, documents, add_generation_prompt, the special tokens by name
(bos_token, eos_token, ...), raise_exception(message), strftime_now(format), the filter tojson, the tags break and
continue, and {% generation %} (which only marks a region).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lamella.engine.errors import RequestError, StartError
from lamella.engine.text.chat_messages import plain_messages
from lamella.engine.text.tokenizer import Tokenizer

MAX_RENDERED_CHARS = 16 * 1024 * 1024

Messages = Sequence[Mapping[str, Any]]


class ChatTemplate:
    """The chat templates of one model, ready to render."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        override: str | None = None,
        *,
        max_chars: int = MAX_RENDERED_CHARS,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """override: a template's source or the path of a file with it, in place of the model's own."""
        self._sources = {"default": read_template(override)} if override is not None else dict(tokenizer.chat_templates)
        self._max_chars = max_chars
        self._now = now
        ids = {
            "bos_token": tokenizer.bos_id,
            "eos_token": tokenizer.eos_id,
            "unk_token": tokenizer.unk_id,
            "pad_token": tokenizer.pad_id,
        }
        self._special_tokens = {name: tokenizer.token_name(id) for name, id in ids.items() if id is not None}

    @property
    def exists(self) -> bool:
        """The model has a template."""
        return bool(self._sources)

    def render(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for a conversation. It holds BOS if the template writes it, so encode it without special tokens.

        continue_final_message leaves the last message open, for the model to go on with. template: source to use
        instead of the model's; variables: more names for it. Raises RequestError for messages that the template
        refuses or that are malformed, UnsupportedFieldError for content that is not text.
        """
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "add_generation_prompt and continue_final_message exclude each other", "continue_final_message"
            )
        compiled = self._compiled(template, bool(tools))
        conversation = plain_messages(messages, as_parts=compiled.takes_parts, as_strings=compiled.takes_strings)
        mark = _mark_end(conversation) if continue_final_message else None
        names: dict[str, Any] = {
            **self._special_tokens,
            **(variables or {}),
            "messages": conversation,
            "tools": tools or None,
            "documents": documents or None,
            "add_generation_prompt": add_generation_prompt,
            "raise_exception": _raise_exception,
            "strftime_now": lambda form: self._now().strftime(form),
        }
        text = self._rendered(compiled, names)
        if mark is None:
            return text
        end = text.rfind(mark)
        if end < 0:
            raise RequestError(
                "continue_final_message cannot be done: the chat template leaves out the last message's content",
                "continue_final_message",
            )
        return text[:end]

    def _compiled(self, template: str | None, has_tools: bool) -> _Compiled:
        if template is not None:
            return _compile(template)
        source = (self._sources.get("tool_use") if has_tools else None) or self._sources.get("default")
        if source is None:
            names = ", ".join(sorted(self._sources))
            raise RequestError(
                f"the model has no {'default ' if names else ''}chat template{f' (only: {names})' if names else ''}; "
                f"use the completions endpoint with a plain prompt, or start with --chat-template FILE",
                "messages",
            )
        return _compile(source)

    def _rendered(self, compiled: _Compiled, names: dict[str, Any]) -> str:
        parts: list[str] = []
        num_chars = 0
        try:
            for part in compiled.program.generate(**names):
                parts.append(part)
                num_chars += len(part)
                if num_chars > self._max_chars:
                    raise RequestError(f"the chat template's output exceeds {self._max_chars} characters", "messages")
        except RequestError:
            raise
        except (jinja2.TemplateError, SecurityError) as error:
            raise RequestError(f"the chat template refuses these messages: {error}", "messages") from error
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError, RecursionError) as error:
            raise RequestError(
                f"the chat template fails on these messages: {type(error).__name__}: {error}", "messages"
            ) from error
        return "".join(parts)


def read_template(given: str) -> str:
    """A template's source from an option's value: a file's path, or the source itself.

    Raises StartError for a path that cannot be read.
    """
    if "{" in given or "\n" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"the chat template {given} cannot be read: {error}") from error


class _Compiled:
    """A template ready to run, with what it expects of a message's content."""

    def __init__(self, source: str) -> None:
        try:
            tree = _ENVIRONMENT.parse(source)
            self.program = _ENVIRONMENT.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise RequestError(
                f"the chat template is not valid: line {error.lineno}: {error.message}", "chat_template"
            ) from error
        self.takes_parts = _iterates_over_content(tree)
        """The content may be a list of parts."""
        self.takes_strings = not self.takes_parts or any(test.name == "string" for test in tree.find_all(nodes.Test))
        """The content may be a string."""


@functools.lru_cache(maxsize=32)
def _compile(source: str) -> _Compiled:
    return _Compiled(source)


class _GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %}: the assistant's part, of interest to trainers only."""

    tags = {"generation"}  # noqa: RUF012 - the base class's type

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a limit on values that one operator can blow up."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise SecurityError("powers are not allowed in chat templates")
        for value, times in ((left, right), (right, left)):
            if isinstance(value, (str, list, tuple)) and isinstance(times, int):
                length = len(value) * times
                if length > MAX_RENDERED_CHARS:
                    raise SecurityError(f"a value of {length} elements is over the limit")
        return super().call_binop(context, operator, left, right)


def _raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(str(message))


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None,
             sort_keys: bool = False) -> str:  # fmt: skip
    """Jinja's own tojson escapes for HTML, which models have not seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _make_environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag], autoescape=False
    )
    environment.filters["tojson"] = _to_json
    return environment


_ENVIRONMENT = _make_environment()


def _iterates_over_content(tree: nodes.Template) -> bool:
    """A loop of the template runs over a message's content: message['content'], message.content, or a name for it."""
    names = {
        target.name
        for assign in tree.find_all(nodes.Assign)
        for target in [assign.target]
        if isinstance(target, nodes.Name) and _is_content(assign.node, set())
    }
    for macro in tree.find_all(nodes.Macro):
        names.update(argument.name for argument in macro.args if "content" in argument.name)
    return any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    if isinstance(node, nodes.Filter) and node.node is not None:
        return _is_content(node.node, names)
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        if isinstance(node.arg, nodes.Slice):
            return _is_content(node.node, names)
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name in names


def _mark_end(conversation: list[dict[str, Any]]) -> str:
    """Put a mark that occurs nowhere else behind the last message's content; the prompt is cut there."""
    mark = "\u2063end\u2063"
    while any(mark in str(message.get("content")) for message in conversation):
        mark += "\u2063"
    last = conversation[-1]
    content = last["content"]
    if isinstance(content, str):
        last["content"] = content + mark
    elif content and content[-1].get("type") == "text":
        content[-1]["text"] += mark
    else:
        content.append({"type": "text", "text": mark})
    return mark
