"""How likely a row's next drafts stand, learnt while it runs.

The one thing looked at is the row's streak: how many of its latest drafts in a row were what the target said. A drafter
that copies from earlier text is right over and over while the copy lasts, and at chance before and behind it:

    drafts          . . x a b c d e x          x: the target said something else    .: no draft
    streak before   0 0 0 0 1 2 3 4 5 0

    survival of draft j of a row with streak s = P(s) · P(s + 1) · … · P(s + j)

P is counted over all rows; old counts fade. A draft that was not verified counts too, where the target's own choice
shows whether it would have stood: so a row whose drafts are not verified is followed all the same, at no cost.

A streak is made of steps that have committed. It depends on nothing that the drafts to be judged next will show, so
lengths chosen by it keep the target's law even where drafts are drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_STREAK = 15
"""Longer ones count as this one."""
PRIOR_WEIGHT = 3.0
FULL_WEIGHT = 128.0
"""Observations of a streak at which its counts are halved."""


class StreakAcceptance:
    """P(streak) for streaks 0 to MAX_STREAK."""

    def __init__(self) -> None:
        # rises from 0.4: what a fresh match is worth differs most between texts, a long copy is safe in all
        priors = [(streak + 1.0) / (streak + 2.5) for streak in range(MAX_STREAK + 1)]
        self._stood = [PRIOR_WEIGHT * prior for prior in priors]
        self._judged = [PRIOR_WEIGHT] * (MAX_STREAK + 1)

    def probability(self, streak: int) -> float:
        """That the next draft of a row with this streak stands."""
        place = min(streak, MAX_STREAK)
        return self._stood[place] / self._judged[place]

    def observe(self, streak: int, drafts: Sequence[int], emitted: Sequence[int]) -> int:
        """Count what became of a row's drafts; returns its streak now.

        drafts: all that it held, verified or not. emitted: the ids of the step. The first draft that differs ends the
        streak, and so does a step without drafts; drafts behind the last emitted id were not judged.
        """
        if not drafts:
            return 0
        for draft, token_id in zip(drafts, emitted):
            stands = draft == token_id
            self._count(streak, stands)
            if not stands:
                return 0
            streak += 1
        return streak

    def _count(self, streak: int, stands: bool) -> None:
        place = min(streak, MAX_STREAK)
        if self._judged[place] >= FULL_WEIGHT:
            self._judged[place] /= 2
            self._stood[place] /= 2
        self._judged[place] += 1
        self._stood[place] += stands
