"""The n-grams of token rows, indexed as they grow: the reference of the native `_C.NgramIndex`, with equal results.

    ids of a row   a b c x a b c         recorded: every n-gram that ends before the last id
                   ───── ▲     ─────     the last 3 ids occurred before; what followed, x a b c, is proposed
                         └ end of the earlier occurrence

Appending an id costs one dictionary entry per allowed length, looking up at most one probe per allowed length: neither
depends on how long the row is.
"""

from __future__ import annotations

from collections.abc import Sequence

from lamella.specdec.errors import InputError

MAX_TOKEN_ID = 2**31 - 1


class ReferenceNgramIndex:
    """Index over rows by (row, generation). Lengths min_len to max_len; earliest: keep the first occurrence of each."""

    def __init__(self, min_len: int, max_len: int, earliest: bool) -> None:
        self._min_len = min_len
        self._max_len = max_len
        self._earliest = earliest
        self._rows: dict[int, _Row] = {}

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
                known = self._rows[row] = _Row(generation)
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

    def propose(self, rows: Sequence[int], generations: Sequence[int], max_lens: Sequence[int]) -> list[list[int]]:
        """Per row max_len drafts, or none if no n-gram occurred before or the row is not known in this generation."""
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
            self._rows.pop(row, None)

    def _append(self, row: _Row, token_id: int) -> None:
        end = len(row.ids)
        for n in range(self._min_len, min(self._max_len, end) + 1):
            ngram = tuple(row.ids[end - n :])
            if not (self._earliest and ngram in row.ends):
                row.ends[ngram] = end
        row.ids.append(token_id)

    def _propose(self, row: _Row, max_len: int) -> list[int]:
        end = len(row.ids)
        for n in range(min(self._max_len, end), self._min_len - 1, -1):
            match_end = row.ends.get(tuple(row.ids[end - n :]))
            if match_end is not None:
                drafts: list[int] = []
                for position in range(match_end, match_end + max_len):
                    # behind the row's end, the continuation is the drafts themselves
                    drafts.append(row.ids[position] if position < end else drafts[position - end])
                return drafts
        return []


class _Row:
    """ids seen so far, and for each n-gram in ids[0, len - 1) the position behind the occurrence that counts."""

    __slots__ = ("ends", "generation", "ids")

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.ids: list[int] = []
        self.ends: dict[tuple[int, ...], int] = {}
