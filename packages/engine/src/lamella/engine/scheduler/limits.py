"""What a request may ask of this engine: checked before it is queued, so that no later stage has to refuse it."""

from __future__ import annotations

from array import array

import msgspec

from lamella.engine.errors import RequestError, UnsupportedFieldError
from lamella.engine.packed import ids_below, pack
from lamella.engine.request import Request, check_spec_method
from lamella.engine.scheduler.config import SchedulerConfig
from lamella.kvtier import TierManager


def check_request(request: Request, config: SchedulerConfig, manager: TierManager, vocab_size: int) -> array[int]:
    """The prompt's ids, packed. Raises RequestError, naming the field and both figures, if the request can never be
    served."""
    prompt_len = len(request.prompt_ids)
    if not prompt_len:
        raise RequestError("the prompt is empty", "prompt")
    if request.adapter is not None:
        raise UnsupportedFieldError(f"adapter {request.adapter!r}: this engine serves no adapters", "adapter")
    check_spec_method(request.params.spec_method, config.draft_methods)
    if request.priority and config.policy == "fcfs":
        raise RequestError(
            f"priority is {request.priority}, but this engine serves first come, first served; start it with "
            "--scheduling-policy priority (scheduling_policy='priority' in Python)",
            "priority",
        )
    if request.max_tokens < 0:
        raise RequestError(f"max_tokens must be at least 0, got {request.max_tokens}", "max_tokens")
    room = config.max_model_len - (request.max_tokens > 0)
    if prompt_len > room:
        raise RequestError(
            f"the prompt has {prompt_len} tokens, but the context of {config.max_model_len} tokens holds {room} "
            f"beside the output",
            "prompt",
        )
    packed = _packed(request.prompt_ids, vocab_size)
    longest = min(prompt_len + request.max_tokens, config.max_model_len)
    if longest + config.lookahead > manager.max_len:
        size = manager.block_size
        raise RequestError(
            f"prompt and output of up to {longest} tokens need {-(-(longest + config.lookahead) // size)} KV blocks of "
            f"{size} tokens, but only {manager.max_len // size} exist",
            "max_tokens" if prompt_len + config.lookahead < manager.max_len else "prompt",
        )
    return packed


def _packed(prompt_ids: list[int], vocab_size: int) -> array[int]:
    try:
        msgspec.convert(prompt_ids, ids_below(vocab_size))
    except msgspec.ValidationError:
        for token in (min(prompt_ids), max(prompt_ids)):
            if not 0 <= token < vocab_size:
                message = f"the prompt has token id {token}, valid ids are 0 to {vocab_size - 1}"
                raise RequestError(message, "prompt") from None
    return pack(prompt_ids)
