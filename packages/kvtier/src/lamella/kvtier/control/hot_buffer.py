"""Resident on host, hot on device: which rows of a running sequence's history lie in its small buffer on the device.

For attention that selects rows (top-k of the history), the host tier can be the home of a sequence's blocks. A step
resolves the rows that it selected, and whoever computes reads the misses from the host while it runs:

    selected rows ─▶ resident: the device block still holds it       read there
                  ─▶ hot:      in the buffer                         read there, and most recent from now on
                  ─▶ missed:   gets the slot of the least recent row that this step does not select; to be fetched

Device blocks are a write-back cache of the host: a block whose host copy is complete may be released while it is still
readable, and stays resident until the pool hands it out again. Rows are never dirty: new rows are written to their
device block, and only a complete, written-back block is taken away. This is the account of what the device's kernels
do by themselves inside a step, row by row, and the reference to test them against.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

MAX_HOT_ROWS = 32_768
"""Slot ids fit 16 bits."""


class Resolved(NamedTuple):
    """Where a step reads each selected row."""

    slots: list[int]
    """Per selected row: its slot in the buffer; -1: resident, read its device block."""
    misses: list[tuple[int, int]]
    """(row, slot): to be fetched from the host before it is read."""
    victims: list[int]
    """Rows that lost their slots to the misses; a slot that was empty has no victim."""


class HotBuffer:
    """One sequence's rows [0, length) of one group of layers that select the same rows."""

    __slots__ = ("_num_rows_per_block", "_order", "_released", "_row_of", "_written_blocks", "length", "num_slots")

    def __init__(self, num_slots: int, num_rows_per_block: int) -> None:
        """num_slots: at least as many as the rows of one step; asserted at each resolve()."""
        assert 0 < num_slots <= MAX_HOT_ROWS, f"{num_slots} hot rows, at most {MAX_HOT_ROWS} have slot ids"
        self.num_slots = num_slots
        self.length = 0
        """Rows written so far."""
        self._num_rows_per_block = num_rows_per_block
        # row -> slot, least recent first; slots that never had a row come before all of them
        self._order: dict[int, int] = {}
        self._row_of = [-1] * num_slots
        self._written_blocks = 0
        self._released: set[int] = set()

    # ---- device blocks ---------------------------------------------------------------------------------------------

    def append(self, num_rows: int) -> None:
        """New rows, written to their device blocks."""
        self.length += num_rows

    def written_back(self, num_blocks: int) -> None:
        """The host holds the first num_blocks whole blocks from now on: they may be released."""
        assert self._written_blocks <= num_blocks <= self.length // self._num_rows_per_block
        self._written_blocks = num_blocks

    def may_release(self, block_idx: int) -> bool:
        """Whether the device block at this place of the table may go to the pool."""
        return block_idx < self._written_blocks

    def take_away(self, block_idx: int) -> None:
        """The pool has handed out the block that was at this place: its rows are read from the host from now on."""
        assert self.may_release(block_idx), f"block {block_idx} is taken away before the host has it"
        self._released.add(block_idx)

    def is_resident(self, row: int) -> bool:
        return row // self._num_rows_per_block not in self._released

    # ---- a step ----------------------------------------------------------------------------------------------------

    def resolve(self, rows: Sequence[int]) -> Resolved:
        """Find or make a place for each row that a step selects; rows that occur twice are found twice.

        Asserts that there are such rows, and that the distinct ones that are not resident have room.
        """
        order, row_of = self._order, self._row_of
        wanted: dict[int, None] = {}
        for row in rows:
            assert 0 <= row < self.length, f"row {row} of {self.length}"
            if not self.is_resident(row):
                wanted[row] = None
        assert len(wanted) <= self.num_slots, f"a step selects {len(wanted)} rows, the buffer has {self.num_slots}"
        missing = [row for row in wanted if row not in order]
        for row in wanted:
            if row in order:
                order[row] = order.pop(row)  # most recent
        misses: list[tuple[int, int]] = []
        victims: list[int] = []
        for row in missing:
            if len(order) < self.num_slots:
                slot = row_of.index(-1)
            else:
                # hits of this step are behind all others, and there are fewer of them than slots
                victim = next(iter(order))
                slot = order.pop(victim)
                victims.append(victim)
            order[row] = slot
            row_of[slot] = row
            misses.append((row, slot))
        return Resolved([order[row] if row in wanted else -1 for row in rows], misses, victims)

    def invalidate(self, rows: Iterable[int]) -> None:
        """What these rows' slots hold is not to be trusted (a failed fetch): they are misses next time."""
        for row in rows:
            slot = self._order.pop(row, -1)
            if slot >= 0:
                self._row_of[slot] = -1

    def roll_back(self, length: int) -> None:
        """Rows [length, end) were rejected: they are not there any more. Asserts that the host did not have them."""
        assert self._written_blocks * self._num_rows_per_block <= length <= self.length
        self.invalidate([row for row in self._order if row >= length])
        self.length = length

    def hot_rows(self) -> list[int]:
        """Least recent first."""
        return list(self._order)

    def check(self) -> None:
        """Rows and slots say the same."""
        assert {row: slot for slot, row in enumerate(self._row_of) if row >= 0} == self._order
        assert all(row < self.length for row in self._order)
        assert all(block < self._written_blocks for block in self._released)
        assert self._written_blocks * self._num_rows_per_block <= self.length
