"""N-gram drafter, also known as prompt lookup: no model, no weights, drafts from the sequence's own earlier text.

The native index serves where it was built; else its Python reference, with the same drafts, after one warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Protocol

from lamella.specdec.batch import DraftBatch
from lamella.specdec.config import NgramConfig
from lamella.specdec.drafters.ngram_index import ReferenceNgramIndex
from lamella.specdec.protocols import DrafterNeeds, DraftView

try:
    from lamella.specdec import _C as native
except ImportError:  # built without a compiler
    native = None  # type: ignore[assignment]

_warned = False


class NgramIndex(Protocol):
    """What the drafter asks of an index; see ReferenceNgramIndex for the meaning."""

    def observe(self, rows: Sequence[int], generations: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None: ...
    def propose(self, rows: Sequence[int], generations: Sequence[int], max_lens: Sequence[int]) -> list[list[int]]: ...
    def forget(self, rows: Sequence[int]) -> None: ...


class NgramDrafter:
    """Proposes what followed the row's last n-gram when it occurred before. Satisfies `Drafter`.

    A step costs O(new ids · lengths) in observe() and O(lengths) a row in propose(), whatever the context's length.
    """

    def __init__(self, config: NgramConfig, index: NgramIndex | None = None) -> None:
        self.config = config
        self.needs = DrafterNeeds(max_drafts=config.num_speculative_tokens, host_ids=True, one_hot=True)
        self._index = index if index is not None else open_index(config)

    def observe(self, view: DraftView) -> None:
        """Index the ids that are new since each row was last seen. Raises InputError if a row became shorter within
        its generation, or has an id below 0."""
        self._index.observe(view.rows, view.generations, view.token_ids)

    def propose(self, view: DraftView, max_len: int | Sequence[int]) -> DraftBatch:
        """Up to max_len drafts per row, never more than num_speculative_tokens. Changes nothing."""
        limit = self.config.num_speculative_tokens
        lens = [max_len] * len(view.rows) if isinstance(max_len, int) else max_len
        return DraftBatch(self._index.propose(view.rows, view.generations, [min(n, limit) for n in lens]))

    def forget(self, rows: Sequence[int]) -> None:
        """Drop what is known of these rows."""
        self._index.forget(rows)


def open_index(config: NgramConfig) -> NgramIndex:
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
