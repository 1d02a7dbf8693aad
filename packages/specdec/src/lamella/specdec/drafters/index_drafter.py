"""What drafters have in common that look rows' ids up in an index, and what the indexes' references have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from lamella.specdec.batch import DraftBatch
from lamella.specdec.config import SpeculativeConfig
from lamella.specdec.errors import InputError
from lamella.specdec.protocols import DrafterNeeds, DraftView

MAX_TOKEN_ID = 2**31 - 1


class TokenIndex(Protocol):
    """What such a drafter asks of an index; see ReferenceIndex for the meaning."""

    def observe(self, rows: Sequence[int], generations: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None: ...
    def propose(self, rows: Sequence[int], generations: Sequence[int], max_lens: Sequence[int]) -> list[list[int]]: ...
    def forget(self, rows: Sequence[int]) -> None: ...


class IndexDrafter:
    """Hands rows to its index. Satisfies `Drafter`."""

    def __init__(self, config: SpeculativeConfig, index: TokenIndex) -> None:
        self.needs = DrafterNeeds(max_drafts=config.num_speculative_tokens, host_ids=True, one_hot=True)
        self._index = index

    def observe(self, view: DraftView) -> None:
        """Take in the ids that are new since each row was last seen. Raises InputError if a row became shorter within
        its generation, or has an id below 0."""
        self._index.observe(view.rows, view.generations, view.token_ids)

    def propose(self, view: DraftView, max_len: int | Sequence[int]) -> DraftBatch:
        """Up to max_len drafts per row, never more than num_speculative_tokens. Changes no later answer."""
        limit = self.needs.max_drafts
        lens = [max_len] * len(view.rows) if isinstance(max_len, int) else max_len
        return DraftBatch(self._index.propose(view.rows, view.generations, [min(n, limit) for n in lens]))

    def forget(self, rows: Sequence[int]) -> None:
        """Drop these rows."""
        self._index.forget(rows)


class ReferenceRow:
    """A row in one generation, and its ids so far."""

    __slots__ = ("generation", "ids")

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.ids: list[int] = []


R = TypeVar("R", bound=ReferenceRow)


class ReferenceIndex(ABC, Generic[R]):
    """Rows by (row, generation); the subclass says what is learnt of an id, and what is drafted behind it."""

    def __init__(self) -> None:
        self._rows: dict[int, R] = {}

    def __len__(self) -> int:
        """Number of rows known."""
        return len(self._rows)

    def observe(self, rows: Sequence[int], generations: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        """Append to each row the ids beyond those it already has; a new generation starts the row afresh."""
        if not len(rows) == len(generations) == len(token_ids):
            raise InputError("rows, generations and token_ids must be of one length")
        for row, generation, ids in zip(rows, generations, token_ids):
            known = self._rows.get(row)
            if known is None or known.generation != generation:
                self.forget([row])
                known = self._rows[row] = self._new_row(generation)
            if len(ids) < len(known.ids):
                raise InputError(
                    f"row {row} had {len(known.ids)} ids and now has {len(ids)}: forget the row first, "
                    "or raise its generation"
                )
            for position in range(len(known.ids), len(ids)):
                token_id = int(ids[position])
                if not 0 <= token_id <= MAX_TOKEN_ID:
                    raise InputError(
                        f"row {row} has token id {token_id} at position {position}, valid ids are 0 to {MAX_TOKEN_ID}"
                    )
                self._append(known, token_id)
            self._appended(known)

    def propose(self, rows: Sequence[int], generations: Sequence[int], max_lens: Sequence[int]) -> list[list[int]]:
        """Per row at most max_len drafts; none if nothing matches or the row is not known in this generation."""
        if not len(rows) == len(generations) == len(max_lens):
            raise InputError("rows, generations and max_lens must be of one length")
        drafts: list[list[int]] = []
        for row, generation, max_len in zip(rows, generations, max_lens):
            known = self._rows.get(row)
            fresh = known is not None and known.generation == generation
            drafts.append(self._propose(known, max_len) if known is not None and fresh else [])
        return drafts

    def forget(self, rows: Sequence[int]) -> None:
        """Drop these rows; unknown ones are ignored."""
        for row in rows:
            gone = self._rows.pop(row, None)
            if gone is not None:
                self._dropped(gone)

    @abstractmethod
    def _new_row(self, generation: int) -> R: ...

    @abstractmethod
    def _append(self, row: R, token_id: int) -> None: ...

    @abstractmethod
    def _propose(self, row: R, max_len: int) -> list[int]: ...

    def _appended(self, row: R) -> None:
        """observe() has appended what was new."""

    def _dropped(self, row: R) -> None:
        """The row is gone."""
