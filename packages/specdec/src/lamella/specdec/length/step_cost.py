"""What a step costs by its rows and drafts: a table measured at start, kept true while steps run.

    seconds │                 ╱     table: seconds of a step by its tokens, all of whose logits are computed
            │          ______╱
            │        ╱              a step of n rows and d drafts has n + d tokens:
            │      ╱
            │   •╱                  pace(n) · (table(n) + share · (table(n + d) - table(n)))
            └───┴────┴────┴────▶ tokens
                n   n + d

pace: how much slower steps without drafts are than the table says, by class of n (contexts, other work on the machine).
share: how much of the table's extra time drafts take, one figure for all; 1 at first. Each is an average over the steps
that show it, in which older ones fade, and one step moves it only so far. While no drafts are verified the share goes
back towards 1, so that one bad measurement does not switch them off for good.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

PACE_WEIGHT, SHARE_WEIGHT = 0.2, 0.1
"""Of a new step in its average."""
LEAST_SHARE, MOST_SHARE = 0.1, 10.0
OUTLIER = 2.0
"""A figure this many times off its average counts as if it were just so far off."""
RETURN = 0.01
"""Part of the way back to 1 that the share goes with each step without drafts."""


class StepCost:
    """Seconds by rows and drafts. Fed with every step that computed nothing else."""

    def __init__(self, table: Sequence[tuple[int, float]]) -> None:
        """table: (tokens, seconds) by rising tokens, at least one. Between its places the table is linear, beyond the
        last it goes on as before it, and seconds never fall."""
        assert table, "a cost table needs at least one place"
        assert all(tokens > 0 and seconds > 0.0 for tokens, seconds in table), table
        self._tokens: list[int] = []
        self._seconds: list[float] = []
        most = 0.0
        for tokens, seconds in table:
            most = max(most, seconds)
            self._tokens.append(tokens)
            self._seconds.append(most)
        assert all(a < b for a, b in zip(self._tokens, self._tokens[1:])), "tokens of a cost table rise"
        self._paces: dict[int, float] = {}
        self._last_pace = 1.0
        self._share = 1.0
        self._ages: dict[int, int] = {}

    def seconds(self, num_rows: int, num_drafts: int) -> float:
        """Expected for a step of so many rows that verifies so many drafts."""
        return self.curve(num_rows, num_drafts)[num_drafts]

    def curve(self, num_rows: int, most_drafts: int) -> list[float]:  # [most_drafts + 1]
        """The same for 0, 1, … most_drafts drafts."""
        pace = self._paces.get(rows_class(num_rows), self._last_pace)
        plain = self._table(num_rows)
        return [
            pace * (plain + self._share * (self._table(num_rows + num_drafts) - plain))
            for num_drafts in range(most_drafts + 1)
        ]

    def age(self, num_rows: int) -> int:
        """Steps of about so many rows with drafts since the last one without."""
        return self._ages.get(rows_class(num_rows), 0)

    def observe(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """A step took so long."""
        if seconds <= 0.0:
            return
        key, plain = rows_class(num_rows), self._table(num_rows)
        if not num_drafts:
            pace = seconds / plain
            if key in self._paces:
                pace = _moved(self._paces[key], pace, PACE_WEIGHT)
            self._paces[key] = self._last_pace = pace
            self._ages[key] = 0
            self._share += RETURN * (1.0 - self._share)
            return
        self._ages[key] = self.age(num_rows) + 1
        extra = self._table(num_rows + num_drafts) - plain
        if extra > 0.0:
            pace = self._paces.get(key, self._last_pace)
            share = max((seconds / pace - plain) / extra, LEAST_SHARE)
            self._share = min(max(_moved(self._share, share, SHARE_WEIGHT), LEAST_SHARE), MOST_SHARE)

    def _table(self, num_tokens: int) -> float:
        tokens, seconds = self._tokens, self._seconds
        if len(tokens) == 1:
            return seconds[0] * num_tokens / tokens[0]
        place = min(max(bisect_left(tokens, num_tokens), 1), len(tokens) - 1)
        slope = (seconds[place] - seconds[place - 1]) / (tokens[place] - tokens[place - 1])
        return max(seconds[place - 1] + slope * (num_tokens - tokens[place - 1]), seconds[0] * 0.5)


def rows_class(num_rows: int) -> int:
    """Largest of 1 … 8, 12, 16, 24, 32, … that is not above num_rows."""
    if num_rows < 8:
        return num_rows
    power = 1 << (num_rows.bit_length() - 1)
    return power + power // 2 if num_rows >= power + power // 2 else power


def _moved(average: float, value: float, weight: float) -> float:
    return average + weight * (min(max(value, average / OUTLIER), average * OUTLIER) - average)
