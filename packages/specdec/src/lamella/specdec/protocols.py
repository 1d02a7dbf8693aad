"""What this package asks of its callers, and what it promises them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from lamella.specdec.batch import DraftBatch


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


class DrafterNeeds(NamedTuple):
    """What a drafter asks of the engine around it."""

    max_drafts: int
    """Most drafts of a row in one step."""
    host_ids: bool
    """Token ids must be on the host before propose()."""
    one_hot: bool
    """Drafts are chosen, not drawn: verification needs no draft probabilities."""


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
