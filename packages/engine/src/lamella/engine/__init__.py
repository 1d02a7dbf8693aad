"""lamella's engine: `LLM` and `AsyncLLM` in Python, `lamella serve` over HTTP.

Names are loaded when they are first used, so that importing this package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lamella.engine.async_llm import AsyncLLM
    from lamella.engine.offline import LLM
    from lamella.engine.outputs import CompletionOutput, RequestOutput
    from lamella.engine.request import SamplingParams

__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "RequestOutput", "SamplingParams"]

_HOMES = {
    "LLM": "offline",
    "AsyncLLM": "async_llm",
    "CompletionOutput": "outputs",
    "RequestOutput": "outputs",
    "SamplingParams": "request",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
