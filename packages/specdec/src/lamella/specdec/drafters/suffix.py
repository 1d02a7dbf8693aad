"""Suffix drafter: no model, no weights, drafts the most frequent continuation in the row and in finished outputs.

The native index serves where it was built; else its Python reference, with the same drafts, after one warning.
"""

from __future__ import annotations

import warnings
from typing import Protocol

from lamella.specdec.config import SuffixConfig
from lamella.specdec.drafters.index_drafter import IndexDrafter, TokenIndex
from lamella.specdec.drafters.suffix_index import ReferenceSuffixIndex

try:
    from lamella.specdec import _C as native
except ImportError:  # built without a compiler
    native = None  # type: ignore[assignment]

_warned = False


class SuffixIndex(TokenIndex, Protocol):
    """What can be asked of it besides; see ReferenceSuffixIndex for the meaning."""

    @property
    def num_cached_requests(self) -> int: ...
    @property
    def num_cached_tokens(self) -> int: ...
    @property
    def num_nodes(self) -> int: ...


class SuffixDrafter(IndexDrafter):
    """Proposes what most often followed the row's end, in the row itself or in finished outputs.

    Rows draft as many tokens as their match and the counts justify, so lengths differ by row and step, 0 included.
    A step costs O(new ids · depth) in observe() and at most O(depth²) a row in propose(), whatever the context's length
    and however many outputs are held. forget() costs O(depth) per id of the output that it keeps, and as much per id
    that leaves for it.
    """

    def __init__(self, config: SuffixConfig, index: SuffixIndex | None = None) -> None:
        super().__init__(config, index if index is not None else open_index(config))
        self.config = config


def open_index(config: SuffixConfig) -> SuffixIndex:
    """An empty index: the native one, or the Python reference after one warning per process."""
    global _warned
    if native is not None:
        return native.SuffixIndex(*index_arguments(config))
    if not _warned:
        _warned = True
        warnings.warn(
            "lamella.specdec was built without its native module: the suffix drafter runs in Python, with the same "
            "drafts but slower and larger; install a C++ compiler and reinstall lamella-specdec",
            RuntimeWarning,
            stacklevel=3,
        )
    return ReferenceSuffixIndex(*index_arguments(config))


def index_arguments(config: SuffixConfig) -> tuple[int, int, int, float, float, float]:
    """What both indexes are made with, in their order."""
    return (
        config.max_tree_depth,
        config.max_cached_requests,
        config.max_cached_tokens,
        config.max_spec_factor,
        config.max_spec_offset,
        config.min_token_prob,
    )
