"""The forms in which Python callers give prompts and parameters, brought to one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lamella.engine.errors import RequestError
from lamella.engine.intake import Intake
from lamella.engine.request import Request, SamplingParams

Prompt = str | list[int] | Mapping[str, Any]
"""A text, token ids, or {"prompt": text} / {"prompt_token_ids": ids}, with "cache_salt" if wanted."""
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
    params.validate(intake.vocab_size, max_logprobs)
    cache_salt = None
    if isinstance(prompt, Mapping):
        unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}
        if unknown or ("prompt" in prompt) == ("prompt_token_ids" in prompt):
            raise RequestError(
                f"a prompt given as a dict has either 'prompt' or 'prompt_token_ids', and 'cache_salt' if wanted; "
                f"got {sorted(prompt)}",
                "prompt",
            )
        cache_salt = prompt.get("cache_salt")
        prompt = prompt.get("prompt", prompt.get("prompt_token_ids"))
    if not isinstance(prompt, (str, list, tuple)):
        raise RequestError(f"a prompt is a text or a list of token ids, not {type(prompt).__name__}", "prompt")
    request = intake.request(
        prompt, params, add_special_tokens=add_special_tokens, priority=priority, cache_salt=cache_salt
    )
    return Asked(request, prompt if isinstance(prompt, str) else None)


def listed_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list. A list of integers is one prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    listed = list(prompts)
    if listed and all(isinstance(item, int) for item in listed):
        return [listed]  # type: ignore[list-item]
    return listed  # type: ignore[return-value]


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
