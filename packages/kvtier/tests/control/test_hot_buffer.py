from __future__ import annotations

from random import Random

import pytest

from lamella.kvtier import Group, LayoutError
from lamella.kvtier.control.hot_buffer import HotBuffer

PER_BLOCK = 4


class NaiveBuffer:
    """The same rules on a list of rows."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.rows: list[int] = []  # least recent first
        self.gone: set[int] = set()  # blocks

    def resolve(self, rows: list[int]) -> tuple[list[int], list[int]]:
        wanted = [row for row in dict.fromkeys(rows) if row // PER_BLOCK in self.gone]
        hits = [row for row in wanted if row in self.rows]
        misses = [row for row in wanted if row not in self.rows]
        for row in hits:
            self.rows.remove(row)
            self.rows.append(row)
        victims = []
        for row in misses:
            if len(self.rows) == self.num_slots:
                victims.append(self.rows.pop(0))
            self.rows.append(row)
        return misses, victims


@pytest.mark.parametrize("seed", range(40))
def test_traces_against_a_list_of_rows(seed: int) -> None:
    """Every slot that a step reads holds the row that it selected, fetched from a host that has it."""
    rng = Random(seed)
    top_k = rng.randint(1, 6)
    num_slots = top_k + rng.randint(0, 6)
    buffer, naive = HotBuffer(num_slots, PER_BLOCK), NaiveBuffer(num_slots)
    memory = [-1] * num_slots
    written = 0
    for _ in range(120):
        action = rng.randrange(10)
        if action < 3:
            buffer.append(rng.randint(1, 5))
        elif action == 3:
            written = rng.randint(written, buffer.length // PER_BLOCK)
            buffer.written_back(written)
        elif action == 4:
            for block in range(written):
                if rng.random() < 0.5:
                    assert buffer.may_release(block)
                    buffer.take_away(block)
                    naive.gone.add(block)
        elif action == 5 and rng.random() < 0.3:
            length = rng.randint(written * PER_BLOCK, buffer.length)
            buffer.roll_back(length)
        elif action == 6 and naive.rows:
            row = rng.choice(naive.rows)
            buffer.invalidate([row])
            naive.rows.remove(row)
        elif buffer.length:
            rows = [rng.randrange(buffer.length) for _ in range(top_k)]
            misses, victims = naive.resolve(rows)
            resolved = buffer.resolve(rows)
            assert [row for row, _ in resolved.misses] == misses
            assert resolved.victims == victims
            for row, slot in resolved.misses:
                assert row < written * PER_BLOCK, "fetched from a host that does not have it"
                memory[slot] = row
            for row, slot in zip(rows, resolved.slots):
                assert (slot < 0) == buffer.is_resident(row)
                assert slot < 0 or memory[slot] == row
        buffer.check()
        assert buffer.hot_rows() == naive.rows


def test_a_block_is_kept_until_the_host_has_it() -> None:
    buffer = HotBuffer(4, PER_BLOCK)
    buffer.append(9)
    assert not buffer.may_release(0)
    buffer.written_back(2)
    assert [buffer.may_release(n) for n in range(3)] == [True, True, False]
    assert buffer.resolve([0, 8]).slots == [-1, -1]
    buffer.take_away(0)
    assert buffer.resolve([0, 8, 0]) == ([0, -1, 0], [(0, 0)], [])
    with pytest.raises(AssertionError, match="before the host has it"):
        buffer.take_away(2)


def test_a_step_must_fit() -> None:
    buffer = HotBuffer(2, PER_BLOCK)
    buffer.append(8)
    buffer.written_back(2)
    buffer.take_away(0)
    with pytest.raises(AssertionError, match="selects 3 rows"):
        buffer.resolve([0, 1, 2])
    assert buffer.resolve([0, 1, 4, 5, 6]).slots == [0, 1, -1, -1, -1]


def test_which_groups_have_hot_rows() -> None:
    assert Group("g", "full", 16, 1, hot_rows=2048).hot_rows == 2048
    with pytest.raises(LayoutError, match="no hot rows"):
        Group("g", "sliding", 16, 1, window=4, hot_rows=8)
