"""A drafter that says what it is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lamella.specdec.batch import DraftBatch
from lamella.specdec.errors import InputError
from lamella.specdec.protocols import DrafterNeeds, DraftView


class ScriptedDrafter:
    """Drafts from a function of the known ids; satisfies `Drafter`.

    script(token_ids) -> drafts of any number, cut to what is allowed. Remembers what it was shown: `seen` maps a row to
    (generation, number of ids), `forgotten` lists the rows it was told to forget.
    """

    def __init__(self, script: Callable[[Sequence[int]], Sequence[int]], max_drafts: int) -> None:
        self.needs = DrafterNeeds(max_drafts=max_drafts, host_ids=True, one_hot=True)
        self.seen: dict[int, tuple[int, int]] = {}
        self.forgotten: list[int] = []
        self._script = script

    def observe(self, view: DraftView) -> None:
        """Note the lengths of the rows. Raises InputError like every drafter: ids only grow, and are not negative."""
        for row, generation, ids in zip(view.rows, view.generations, view.token_ids, strict=True):
            known_generation, known_len = self.seen.get(row, (generation, 0))
            start = known_len if known_generation == generation else 0
            if len(ids) < start:
                raise InputError(f"row {row} had {start} ids and now has {len(ids)}")
            if any(token_id < 0 for token_id in ids[start:]):
                raise InputError(f"row {row} has a token id below 0")
            self.seen[row] = (generation, len(ids))

    def propose(self, view: DraftView, max_len: int | Sequence[int]) -> DraftBatch:
        """What the script says, for rows that were observed in their generation."""
        lens = [max_len] * len(view.rows) if isinstance(max_len, int) else max_len
        drafts: list[list[int]] = []
        for row, generation, ids, limit in zip(view.rows, view.generations, view.token_ids, lens, strict=True):
            known = self.seen.get(row, (None, 0))[0] == generation
            allowed = max(0, min(limit, self.needs.max_drafts))
            drafts.append(list(self._script(ids))[:allowed] if known else [])
        return DraftBatch(drafts)

    def forget(self, rows: Sequence[int]) -> None:
        """Note that these rows changed owner."""
        for row in rows:
            self.seen.pop(row, None)
            self.forgotten.append(row)
