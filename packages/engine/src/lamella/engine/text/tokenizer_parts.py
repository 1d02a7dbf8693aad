"""What a reader of a tokenizer's files hands to `Tokenizer`, whatever the files look like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import tokenizers


@dataclass(frozen=True)
class TokenizerParts:
    """A vocabulary with what the files say of its use."""

    backend: tokenizers.Tokenizer
    source: str
    """Path, for messages."""
    vocab_size: int
    """Highest id plus one."""
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    """Ids that end a sequence; the first one is the tokenizer's own EOS."""
    unk_id: int | None = None
    pad_id: int | None = None
    add_bos: bool | None = None
    """BOS goes in front of a prompt; None: what the backend's post-processor does."""
    add_eos: bool | None = None
    special_ids: frozenset[int] = frozenset()
    """Ids left out of text when special tokens are skipped."""
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    """Jinja sources by name; the usual one is called "default"."""
