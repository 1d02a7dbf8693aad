"""What drafters and verification exchange: plain data, no torch.

Positions of a row with num_drafts = 3, of which the target keeps the first two:

    known ids      ... t7 | d0 d1 d2        the step feeds [t7, d0, d1, d2]
    logits rows            r0 r1 r2 r3      r_i is the target's choice behind d_(i-1)
    verdict                d0 d1 x          num_accepted = 2, next_ids = x, chosen at r2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

Ids = TypeVar("Ids")
"""A tensor [num_rows] where verification runs in torch, list[int] in the plain-Python reference."""

NO_DRAFT = -1
"""Stands where a padded row of drafts has none: never looked up, never accepted."""

ANY_METHOD = -1
"""Stands for a row that every drafter may propose for."""


class Computed(NamedTuple):
    """What a step has added to rows for good, for drafters with a network: rejected drafts are not in it.

    row i:   positions [starts[i], ends[i])           computed by the target; hidden has a row for each
             positions [starts[i], ends[i] + ahead[i])   ids has them, row after row: known behind the end too
    """

    places: Sequence[int]
    """In the view, of the rows that have any."""
    starts: Sequence[int]
    ends: Sequence[int]
    ahead: Sequence[int]
    """At least 1: the id that was chosen last, or the prompt's next one."""
    ids: Any  # tensor [sum(ends - starts + ahead)] int32
    hidden: Any = None  # tensor [sum(ends - starts), w]


class Rows(NamedTuple):
    """Rows of a batch as a drafter sees them; satisfies `DraftView`."""

    rows: Sequence[int]
    """Identities: whatever numbers the caller keeps sequences under."""
    generations: Sequence[int]
    """Raised when a row's number changes owner; all 0 will do where numbers are never used again."""
    token_ids: Sequence[Sequence[int]]
    """Per row: all known ids, prompt and output. Must only grow within a generation."""
    methods: Sequence[int] = ()
    """Per row: place of the one drafter that may propose for it, ANY_METHOD: each; empty: each for all rows."""
    computed: Computed | None = None
    """What the step added, for drafters that need it."""

    @classmethod
    def single(cls, token_ids: Sequence[int]) -> Rows:
        """One sequence, row 0."""
        return cls((0,), (0,), (token_ids,))


class DraftBatch(NamedTuple):
    """Proposals on the host, in the order of the view."""

    ids: Sequence[Sequence[int]]
    """Per row, without padding: empty where there is nothing to propose."""
    methods: Sequence[int] | None = None
    """Per row: place of the drafter that proposed; None: there is but one."""

    @property
    def lens(self) -> list[int]:
        """Number of drafts per row."""
        return [len(row) for row in self.ids]

    def padded(self, width: int) -> list[list[int]]:
        """Rows of exactly `width` ids, NO_DRAFT behind the last draft. Asserts that no row is longer."""
        assert all(len(row) <= width for row in self.ids), (self.lens, width)
        return [[*row, *[NO_DRAFT] * (width - len(row))] for row in self.ids]


@dataclass(frozen=True, slots=True)
class Verdict(Generic[Ids]):
    """Outcome of checking drafts against the target, per row.

    The row's new tokens are its first num_accepted drafts and then next_id. Rows without logits (an unfinished prompt
    chunk) have num_accepted 0 and next_id NO_DRAFT.
    """

    num_accepted: Ids
    next_ids: Ids
    """The bonus token if all drafts were accepted, else what the target chose at the first rejected one."""
