"""The forms in which Python callers give prompts and parameters, brought to one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from lamella.engine.errors import RequestError
from lamella.engine.intake import Intake
from lamella.engine.request import Request, SamplingParams
from lamella.engine.text.chat_template import ChatTemplate
from lamella.engine.text.tokenizer import Tokenizer

Prompt = str | list[int] | Mapping[str, Any]
"""A text, token ids, or {"prompt": text} / {"prompt_token_ids": ids}, if wanted with CACHE_KEYS."""
CACHE_KEYS = ("cache_salt", "use_prefix_cache", "use_kv_tiers")
"""Blocks are shared with prompts of the same salt only; False: without the prefix cache, or without the tiers below the
device."""
Messages = Sequence[Mapping[str, Any]]


class Asked(NamedTuple):
    """A request with the text it came from."""

    request: Request
    text: str | None


def ask(
    intake: Intake,
    prompt: Prompt,
    params: SamplingParams,
    *,
    max_logprobs: int,
    priority: int = 0,
    add_special_tokens: bool = True,
) -> Asked:
    """Check prompt and parameters, and make a request of them. Raises RequestError naming what is wrong."""
    if not isinstance(params, SamplingParams):
        raise RequestError(f"sampling_params must be SamplingParams, not {type(params).__name__}", "sampling_params")
    params = params.typed()
    params.validate(intake.vocab_size, max_logprobs)
    cache: dict[str, Any] = {}
    if isinstance(prompt, Mapping):
        unknown = set(prompt) - {"prompt", "prompt_token_ids", *CACHE_KEYS}
        if unknown or ("prompt" in prompt) == ("prompt_token_ids" in prompt):
            raise RequestError(
                f"a prompt given as a dict has either 'prompt' or 'prompt_token_ids', and what is wanted of "
                f"{', '.join(CACHE_KEYS)}; got {', '.join(map(repr, prompt)) or 'nothing'}",
                "prompt",
            )
        cache = {name: prompt[name] for name in CACHE_KEYS if prompt.get(name) is not None}
        for name, value in cache.items():
            if not isinstance(value, str if name == "cache_salt" else bool):
                wanted = "a text" if name == "cache_salt" else "true or false"
                raise RequestError(f"{name} must be {wanted}, not {type(value).__name__}", name)
        name, kind = ("prompt", str) if "prompt" in prompt else ("prompt_token_ids", (list, tuple))
        if not isinstance(prompt[name], kind):
            wanted = "a text" if kind is str else "a list of token ids"
            raise RequestError(f"{name} must be {wanted}, not {type(prompt[name]).__name__}", "prompt")
        prompt = prompt[name]
    if type(priority) is not int or not -(2**31) <= priority < 2**31:
        raise RequestError(f"priority must be an integer of 32 bits, got {priority!r}", "priority")
    if not isinstance(prompt, (str, list, tuple)):
        raise RequestError(f"a prompt is a text or a list of token ids, not {type(prompt).__name__}", "prompt")
    request = intake.request(prompt, params, add_special_tokens=add_special_tokens, priority=priority, **cache)
    return Asked(request, prompt if isinstance(prompt, str) else None)


def check_streams(asked: Asked) -> None:
    """Raise RequestError if a stream of text, which is of one answer, would have several."""
    n = asked.request.params.n
    if n != 1:
        raise RequestError(f"a stream is of one answer, but n is {n}", "n")


def render(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Messages,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """A conversation as the prompt's ids. To continue its last message excludes to begin a new one."""
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Iterable):
        raise RequestError(f"messages must be a list of messages, not {type(messages).__name__}", "messages")
    text = template.render(
        list(messages),
        add_generation_prompt=add_generation_prompt and not continue_final_message,
        continue_final_message=continue_final_message,
        variables=variables,
    )
    # the template writes the special tokens itself
    return tokenizer.encode(text, False)


def listed_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list. A list of integers is one prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, (bytes, bytearray)) or not isinstance(prompts, Iterable):
        raise RequestError(f"prompts are a text, token ids, or a list of these, not {type(prompts).__name__}", "prompt")
    listed = list(prompts)
    if listed and isinstance(listed[0], int) and _are_ids(listed):
        return [listed]  # type: ignore[list-item]
    return listed  # type: ignore[return-value]


def _are_ids(items: list[Any]) -> bool:
    try:
        msgspec.convert(items, list[int])  # several times as fast as the check below
    except msgspec.ValidationError:
        return all(isinstance(item, int) for item in items)
    return True


def listed_params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int, defaults: Mapping[str, Any]
) -> list[SamplingParams]:
    """Parameters for each of count prompts; None gives the model's defaults."""
    if params is None:
        params = SamplingParams(**defaults)
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise RequestError(f"{count} prompts but {len(params)} sampling params", "sampling_params")
    return list(params)
