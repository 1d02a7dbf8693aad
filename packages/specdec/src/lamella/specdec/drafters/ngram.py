"""N-gram drafter, also known as prompt lookup: no model, no weights, drafts from the sequence's own earlier text.

The native index serves where it was built; else its Python reference, with the same drafts, after one warning.
"""

from __future__ import annotations

import warnings

from lamella.specdec.config import NgramConfig
from lamella.specdec.drafters.index_drafter import IndexDrafter, TokenIndex
from lamella.specdec.drafters.ngram_index import ReferenceNgramIndex

try:
    from lamella.specdec import _C as native
except ImportError:  # built without a compiler
    native = None  # type: ignore[assignment]

_warned = False


class NgramDrafter(IndexDrafter):
    """Proposes what followed the row's last n-gram when it occurred before.

    A step costs O(new ids · lengths) in observe() and O(lengths) a row in propose(), whatever the context's length.
    """

    def __init__(self, config: NgramConfig, index: TokenIndex | None = None) -> None:
        super().__init__(config, index if index is not None else open_index(config))
        self.config = config


def open_index(config: NgramConfig) -> TokenIndex:
    """An empty index: the native one, or the Python reference after one warning per process."""
    global _warned
    arguments = (config.prompt_lookup_min, config.prompt_lookup_max, config.match == "earliest")
    if native is not None:
        return native.NgramIndex(*arguments)
    if not _warned:
        _warned = True
        warnings.warn(
            "lamella.specdec was built without its native module: the n-gram drafter runs in Python, with the same "
            "drafts but slower; install a C++ compiler and reinstall lamella-specdec",
            RuntimeWarning,
            stacklevel=3,
        )
    return ReferenceNgramIndex(*arguments)
