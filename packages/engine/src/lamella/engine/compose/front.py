"""The side of the engine that meets people: model files on disk, tokenizer, chat template. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lamella.engine.compose.core_config import CoreConfig
from lamella.engine.config.schema import EngineOptions
from lamella.engine.console import dim, note
from lamella.engine.models import ModelSource, resolve_model
from lamella.engine.text.chat_template import ChatTemplate
from lamella.engine.text.tokenizer import Tokenizer, load_tokenizer
from lamella.specdec.config import NETWORK_METHODS


@dataclass(frozen=True, slots=True)
class Front:
    """A model's files, with what reads and writes its text."""

    source: ModelSource
    tokenizer: Tokenizer
    template: ChatTemplate
    say: Callable[[str], None]
    """Where progress goes."""

    @property
    def path(self) -> str:
        return str(self.source.path)


def find_model(options: EngineOptions, *, progress: bool) -> ModelSource:
    """Where MODEL lies on disk; pulls it if it is a name that is not there yet."""
    return resolve_model(options.model, revision=options.revision, progress=progress)


def core_config(options: EngineOptions, source: ModelSource, *, progress: bool) -> CoreConfig:
    """What the core is built from: drafting networks are found, and pulled, as MODEL is."""
    if options.speculative_config is not None:
        options = replace(options, speculative_config=_with_paths(options.speculative_config, progress))
    return CoreConfig(options=options, model_path=str(source.path), progress=progress)


def _with_paths(config: Mapping[str, Any], progress: bool) -> dict[str, Any]:
    """A speculative config in which models are named by their paths."""
    found = dict(config)
    if config.get("method") in NETWORK_METHODS and isinstance(config.get("model"), str):
        found["model"] = str(resolve_model(config["model"], progress=progress).path)
    if isinstance(config.get("fallback"), Mapping):
        found["fallback"] = _with_paths(config["fallback"], progress)
    return found


def load_front(options: EngineOptions, *, progress: bool, source: ModelSource | None = None) -> Front:
    """Find the model, read its tokenizer and template. Raises StartError with what is missing."""
    source = source or find_model(options, progress=progress)
    tokenizer = load_tokenizer(source.path)
    template = ChatTemplate(tokenizer, options.chat_template)
    return Front(source, tokenizer, template, _say if progress else _quiet)


def _say(text: str) -> None:
    note(dim(text))


def _quiet(_text: str) -> None:
    pass
