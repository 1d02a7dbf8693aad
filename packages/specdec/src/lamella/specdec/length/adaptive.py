"""How many of its drafts each row verifies: as many as make tokens come fastest, often none.

All drafts of a step are ordered by their survival, the probability that they and those before them in their row stand:

    rows          a: .9 .8 .7     b: .4 .1                  3 rows, 5 drafts held, in this order
    order         a0 a1 a2 b0 b1                            c: none

    tokens per second with the first n of them = (rows + survivals of those n) / seconds of a step with n drafts

The n with the most wins. Survival never rises within a row, so what is taken of a row is its first drafts. Drafts must
gain START_GAIN over a plain step before they are verified at all, and go on until they gain nothing (hysteresis).

Both figures come from steps that have committed: survival from `StreakAcceptance`, seconds from `StepCost`. No draft's
id and no probability of a drawn draft is looked at. A rule that looks at them ("verify only if the draft is A") would
bend the output's law where drafts are drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

from lamella.specdec.length.acceptance import StreakAcceptance
from lamella.specdec.length.step_cost import StepCost

START_GAIN = 1.05
LEAST_SURVIVAL = 0.05
"""Drafts below it are not worth the time of ordering them."""
MAX_AGE = 64
"""Steps with drafts behind which a plain one is made, to measure what it costs now."""


class AdaptiveLength:
    """Chooses per step and row; one for all rows of an engine. Pure: what it does follows from what it was shown."""

    def __init__(self, table: Sequence[tuple[int, float]], num_methods: int = 1) -> None:
        """table: (tokens, seconds) of steps, by rising tokens; see StepCost. num_methods: how many drafters there are;
        each has probabilities of its own."""
        self.by_method = tuple(StreakAcceptance() for _ in range(num_methods))
        self.cost = StepCost(table)
        self.measures = False
        """The last choice was a plain step, to see what one costs now."""
        self._verifying = False

    @property
    def acceptance(self) -> StreakAcceptance:
        """That of the first drafter."""
        return self.by_method[0]

    def choose(
        self, streaks: Sequence[int], num_held: Sequence[int], methods: Sequence[int] | None = None
    ) -> list[int]:
        """Drafts to verify, per row of a step.

        streaks: as `acceptance` counts them. num_held: drafts that each row has. methods: place of the drafter that
        each row has them from; None: the first.
        """
        num_rows = len(num_held)
        chosen = [0] * num_rows
        self.measures = False
        if not any(num_held):
            return chosen
        if self.cost.age(num_rows) >= MAX_AGE:
            self.measures = True
            return chosen
        slots = self._slots(streaks, num_held, methods)
        seconds = self.cost.curve(num_rows, len(slots))
        best, best_rate = 0, num_rows / seconds[0] * (1.0 if self._verifying else START_GAIN)
        tokens = float(num_rows)
        for n, (survival, _) in enumerate(slots, 1):
            tokens += survival
            rate = tokens / seconds[n]
            if rate > best_rate:
                best, best_rate = n, rate
        self._verifying = best > 0
        for _, row in slots[:best]:
            chosen[row] += 1
        return chosen

    def _slots(
        self, streaks: Sequence[int], num_held: Sequence[int], methods: Sequence[int] | None
    ) -> list[tuple[float, int]]:
        """(survival, row) of every draft that may pay, the most likely first."""
        slots: list[tuple[float, int]] = []
        for row, held in enumerate(num_held):
            survival, streak = 1.0, streaks[row]
            acceptance = self.by_method[0 if methods is None else methods[row]]
            for ahead in range(held):
                survival *= acceptance.probability(streak + ahead)
                if survival < LEAST_SURVIVAL:
                    break
                slots.append((survival, row))
        slots.sort(key=_survival, reverse=True)
        return slots


def _survival(slot: tuple[float, int]) -> float:
    return slot[0]
