"""Least recently used first: an intrusive doubly linked list over block ids, every operation O(1).

    head ─▶ next victim … most recently added ─▶ tail          block 0, never a member, is the list's own knot

A sequence's blocks are added in reverse order of position, so a tail goes before the prefix it hangs on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

_OUT = -1


class Lru:
    """Candidates for reuse in the order in which they became unreferenced."""

    __slots__ = ("_len", "_next", "_prev")

    def __init__(self, num_blocks: int) -> None:
        self._next = [_OUT] * num_blocks
        self._prev = [_OUT] * num_blocks
        self._next[0] = self._prev[0] = 0
        self._len = 0

    def add(self, block_id: int) -> None:
        """Append as most recent. It must not be a member."""
        links_next, links_prev = self._next, self._prev
        assert links_next[block_id] == _OUT, f"block {block_id} is already a candidate"
        last = links_prev[0]
        links_next[last] = block_id
        links_prev[block_id] = last
        links_next[block_id] = 0
        links_prev[0] = block_id
        self._len += 1

    def remove(self, block_id: int) -> None:
        """Take a member out, wherever it stands: it is in use again."""
        after, before = self._next[block_id], self._prev[block_id]
        assert block_id != 0, "the null block is never a candidate"
        assert after != _OUT, f"block {block_id} is not a candidate"
        self._next[before] = after
        self._prev[after] = before
        self._next[block_id] = self._prev[block_id] = _OUT
        self._len -= 1

    def add_all(self, block_ids: Iterable[int]) -> None:
        """add() of each, in this order."""
        links_next, links_prev = self._next, self._prev
        last = links_prev[0]
        count = 0
        for block_id in block_ids:
            assert links_next[block_id] == _OUT, f"block {block_id} is already a candidate"
            links_next[last] = block_id
            links_prev[block_id] = last
            links_next[block_id] = 0  # so that none can come twice
            last = block_id
            count += 1
        links_prev[0] = last
        self._len += count

    def remove_all(self, block_ids: Iterable[int]) -> None:
        """remove() of each."""
        links_next, links_prev = self._next, self._prev
        count = 0
        for block_id in block_ids:
            after, before = links_next[block_id], links_prev[block_id]
            assert block_id != 0, "the null block is never a candidate"
            assert after != _OUT, f"block {block_id} is not a candidate"
            links_next[before] = after
            links_prev[after] = before
            links_next[block_id] = links_prev[block_id] = _OUT
            count += 1
        self._len -= count

    def touch(self, block_id: int) -> None:
        """Make a member the most recent one."""
        self.remove(block_id)
        self.add(block_id)

    def pick(self) -> int:
        """Remove and return the next victim. There must be one."""
        block_id = self._next[0]
        self.remove(block_id)
        return block_id

    def __len__(self) -> int:
        return self._len

    def __contains__(self, block_id: int) -> bool:
        return block_id != 0 and self._next[block_id] != _OUT

    def __iter__(self) -> Iterator[int]:
        """From the next victim on. Only for checks."""
        block_id = self._next[0]
        while block_id != 0:
            yield block_id
            block_id = self._next[block_id]
