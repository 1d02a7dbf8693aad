"""The side of the engine that meets people: model files on disk, tokenizer, chat template. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lamella.engine.config.schema import EngineOptions
from lamella.engine.console import dim, note
from lamella.engine.models import ModelSource, resolve_model
from lamella.engine.text.chat_template import ChatTemplate
from lamella.engine.text.tokenizer import Tokenizer, load_tokenizer


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
