"""The n-grams of token rows, indexed as they grow: the reference of the native `_C.NgramIndex`, with equal results.

    ids of a row   a b c x a b c         recorded: every n-gram that ends before the last id
                   ───── ▲     ─────     the last 3 ids occurred before; what followed, x a b c, is proposed
                         └ end of the earlier occurrence

Appending an id costs one dictionary entry per allowed length, looking up at most one probe per allowed length: neither
depends on how long the row is.
"""

from __future__ import annotations

from lamella.specdec.drafters.index_drafter import ReferenceIndex, ReferenceRow


class ReferenceNgramIndex(ReferenceIndex["_Row"]):
    """Index over rows by (row, generation). Lengths min_len to max_len; earliest: keep the first occurrence of each."""

    def __init__(self, min_len: int, max_len: int, earliest: bool) -> None:
        super().__init__()
        self._min_len = min_len
        self._max_len = max_len
        self._earliest = earliest

    def _new_row(self, generation: int) -> _Row:
        return _Row(generation)

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


class _Row(ReferenceRow):
    """For each n-gram in ids[0, len - 1) the position behind the occurrence that counts."""

    __slots__ = ("ends",)

    def __init__(self, generation: int) -> None:
        super().__init__(generation)
        self.ends: dict[tuple[int, ...], int] = {}
