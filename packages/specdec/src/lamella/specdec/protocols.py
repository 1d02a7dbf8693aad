"""What this package asks of its callers, and what it promises them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from lamella.specdec.batch import DraftBatch


class ComputedView(Protocol):
    """What a step has added to rows for good; see `batch.Computed` for the meaning."""

    @property
    def places(self) -> Sequence[int]: ...
    @property
    def starts(self) -> Sequence[int]: ...
    @property
    def ends(self) -> Sequence[int]: ...
    @property
    def ahead(self) -> Sequence[int]: ...
    @property
    def ids(self) -> Any: ...
    @property
    def hidden(self) -> Any: ...


class DraftView(Protocol):
    """The rows of a step as a drafter may see them."""

    @property
    def rows(self) -> Sequence[int]:
        """Identities of the rows."""

    @property
    def generations(self) -> Sequence[int]:
        """Raised when a row changes owner."""

    @property
    def token_ids(self) -> Sequence[Sequence[int]]:
        """Per row: all known ids, prompt and output."""

    @property
    def methods(self) -> Sequence[int]:
        """Per row: place of the one drafter among several that may propose for it, ANY_METHOD: each; empty: each for
        all rows. Read by who combines drafters only."""

    @property
    def computed(self) -> ComputedView | None:
        """Of the step that ends; only where a drafter needs it."""


class DrafterNeeds(NamedTuple):
    """What a drafter asks of the engine around it."""

    max_drafts: int
    """Most drafts of a row in one step."""
    host_ids: bool
    """Token ids must be on the host before propose()."""
    one_hot: bool
    """Drafts are chosen, not drawn: verification needs no draft probabilities."""
    network: bool = False
    """A network must be lent by bind(), and views must tell what was computed."""
    lookahead: int = 0
    """Slots behind the computed tokens of a row that the network may write to."""
    ids_ahead: int = 1
    """Most ids behind what was computed that it reads, as far as they are known."""
    key_lookahead: int = 0
    """What the network keeps of a token depends on so many ids behind it: a key of cached blocks must name them too."""


class Drafter(Protocol):
    """Proposes what may come next. Draws no randomness of its own."""

    @property
    def needs(self) -> DrafterNeeds: ...

    def observe(self, view: DraftView) -> None:
        """Take in the ids that are new since each row was last seen. Called every step, prompt chunks too."""

    def propose(self, view: DraftView, max_len: int | Sequence[int]) -> DraftBatch:
        """Up to max_len drafts per row (one limit for all, or one each), of ids already observed."""

    def forget(self, rows: Sequence[int]) -> None:
        """Drop what is known of these rows. Rows never seen are ignored."""
