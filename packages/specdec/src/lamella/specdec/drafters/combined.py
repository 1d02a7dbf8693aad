"""Several drafters at work on the same rows: each row drafts by the one whose proposals have stood best in it.

All of them propose for a row, one proposal is used, and all are judged by what the target then said:

    proposals   a: x y z      used                        target says  x q        a: 1 of 2 stood
                b: x q        kept aside                                          b: 2 of 2
                c: –                                                              c: 0 of 2

A drafter's record in a row is the average of that number over the steps in which any of them proposed, where older
steps fade. A row goes on with its drafter until another's record is SWITCH_GAIN times as good and SWITCH_MARGIN better
(hysteresis). It begins with the record of all rows, which moves more slowly, and the very first row with the first
drafter. Where the row's drafter finds nothing, the best of the others stands in.

Records are made of ids that are known, so no choice looks at what the drafts to be judged next will show.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lamella.specdec.batch import ANY_METHOD, DraftBatch
from lamella.specdec.protocols import Drafter, DrafterNeeds, DraftView

RECORD_WEIGHT = 0.2
"""Of a new step in a row's average."""
OVERALL_WEIGHT = 0.02
"""Of a new step in that of all rows."""
SWITCH_GAIN, SWITCH_MARGIN = 1.25, 0.25


class Record(NamedTuple):
    """How a row's drafters fare."""

    gains: tuple[float, ...]
    """Per drafter: its average number of drafts that stood."""
    preferred: int
    """The one that the row drafts by."""

    def judged(self, stood: Sequence[int], weight: float = RECORD_WEIGHT) -> Record:
        """With one step more, of this weight."""
        gains = tuple(gain + weight * (count - gain) for gain, count in zip(self.gains, stood))
        best = max(range(len(gains)), key=lambda method: gains[method])
        enough = gains[self.preferred] * SWITCH_GAIN + SWITCH_MARGIN
        return Record(gains, best if gains[best] > enough else self.preferred)

    def choose(self, proposals: Sequence[Sequence[int]]) -> int:
        """Whose proposal is used: the preferred one's, or of those who have any the best, the first of equal ones."""
        if proposals[self.preferred]:
            return self.preferred
        found = [method for method, drafts in enumerate(proposals) if drafts]
        return max(found, key=lambda method: self.gains[method]) if found else self.preferred


class CombinedDrafter:
    """Satisfies `Drafter`; its proposals name the drafter that each came from.

    A row whose view names one of them drafts by that one alone.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        """In order of preference; at least one."""
        assert drafters
        needs = [drafter.needs for drafter in drafters]
        self.needs = DrafterNeeds(
            max_drafts=max(need.max_drafts for need in needs),
            host_ids=True,  # they are what judges
            one_hot=all(need.one_hot for need in needs),
            network=any(need.network for need in needs),
            lookahead=max(need.lookahead for need in needs),
            ids_ahead=max(need.ids_ahead for need in needs),
            key_lookahead=max(need.key_lookahead for need in needs),
        )
        self._drafters = tuple(drafters)
        self._overall = Record((0.0,) * len(drafters), 0)
        self._records: dict[int, tuple[int, Record]] = {}
        """Row -> (generation, record)."""
        self._open: dict[int, tuple[int, tuple[Sequence[int], ...]]] = {}
        """Row -> (number of ids, proposal of each drafter), until it is judged."""

    def observe(self, view: DraftView) -> None:
        """Let every drafter take in the new ids, and judge the last proposals by them."""
        for drafter in self._drafters:
            drafter.observe(view)
        if not self._open:
            return
        for row, generation, ids in zip(view.rows, view.generations, view.token_ids):
            if row not in self._open:
                continue
            record = self._record(row, generation)
            known_len, proposals = self._open.get(row, (len(ids), ()))  # those of a former owner are gone
            if len(ids) <= known_len:
                continue
            del self._open[row]
            emitted = ids[known_len:]
            stood = [_standing(drafts, emitted) for drafts in proposals]
            self._records[row] = (generation, record.judged(stood))
            self._overall = self._overall.judged(stood, OVERALL_WEIGHT)

    def propose(self, view: DraftView, max_len: int | Sequence[int]) -> DraftBatch:
        """Up to max_len drafts per row, all of one drafter. Changes no later answer, but for what it will be judged by
        what was proposed last."""
        limits = [max_len] * len(view.rows) if isinstance(max_len, int) else max_len
        only = view.methods or [ANY_METHOD] * len(view.rows)
        proposed = [
            drafter.propose(
                view, [limit if named in (ANY_METHOD, method) else 0 for limit, named in zip(limits, only)]
            ).ids
            for method, drafter in enumerate(self._drafters)
        ]
        ids: list[Sequence[int]] = []
        methods: list[int] = []
        for place, (row, generation, named) in enumerate(zip(view.rows, view.generations, only)):
            proposals = tuple(drafts[place] for drafts in proposed)
            method = named
            if named == ANY_METHOD:
                method = self._record(row, generation).choose(proposals)
                if any(proposals):
                    self._open[row] = (len(view.token_ids[place]), proposals)
                else:
                    self._open.pop(row, None)
            ids.append(proposals[method])
            methods.append(method)
        return DraftBatch(ids, methods)

    def forget(self, rows: Sequence[int]) -> None:
        """Drop these rows everywhere."""
        for drafter in self._drafters:
            drafter.forget(rows)
        for row in rows:
            self._records.pop(row, None)
            self._open.pop(row, None)

    def record(self, row: int) -> Record | None:
        """How the row's drafters fare; None: it was never judged."""
        known = self._records.get(row)
        return None if known is None else known[1]

    def _record(self, row: int, generation: int) -> Record:
        """That of the row's present owner."""
        known = self._records.get(row)
        if known is not None and known[0] == generation:
            return known[1]
        if known is not None:
            self._open.pop(row, None)
        self._records[row] = (generation, self._overall)
        return self._overall


def _standing(drafts: Sequence[int], emitted: Sequence[int]) -> int:
    count = 0
    for draft, token_id in zip(drafts, emitted):
        if draft != token_id:
            break
        count += 1
    return count
