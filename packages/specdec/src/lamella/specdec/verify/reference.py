"""Verification in plain Python: what `greedy` and `one_hot` must equal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lamella.specdec.batch import NO_DRAFT, Verdict


def verify_one_hot(
    target_ids: Sequence[int], drafts: Sequence[Sequence[int]], logits_start: Sequence[int]
) -> Verdict[list[int]]:
    """Accept the drafts that equal what the target chose at their positions, up to the first that does not.

    target_ids      id that the target chose at each logits row
    drafts          per row; NO_DRAFT ends it
    logits_start    row i's logits rows are [logits_start[i], logits_start[i + 1]); the first belongs to the last known
                    token, so k logits rows judge k - 1 drafts: further ones are not looked at
    """
    accepted: list[int] = []
    next_ids: list[int] = []
    for i, row in enumerate(drafts):
        start, end = logits_start[i], logits_start[i + 1]
        count = 0
        while start + count + 1 < end and count < len(row) and row[count] == target_ids[start + count]:
            count += 1
        accepted.append(count)
        next_ids.append(target_ids[start + count] if end > start else NO_DRAFT)
    return Verdict(accepted, next_ids)


def verify_greedy(
    logits: Sequence[Sequence[float]], drafts: Sequence[Sequence[int]], logits_start: Sequence[int]
) -> Verdict[list[int]]:
    """verify_one_hot against the best id of each logits row [vocab]: the lowest id wins a tie, NaN counts as -inf."""
    return verify_one_hot([_best(row) for row in logits], drafts, logits_start)


def _best(logits: Sequence[float]) -> int:
    scores = [-math.inf if math.isnan(logit) else logit for logit in logits]
    return scores.index(max(scores))
