"""The blocks of one group: who is free, who is used how often, who must not move.

                 take                       seal
    FREE ────────────────▶ FILLING ────────────────▶ SEALED
     ▲                        │ refs → 0                │ refs → 0: stays SEALED, becomes a candidate for reuse
     └────────────────────────┴─────────────────────────┘ evicted, or its key was dropped

A free block is handed out at once: FREE ones first, then candidates in the order of the eviction policy. A pinned
block is neither free nor a candidate, whatever its references.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Protocol

FREE: Final = 0
FILLING: Final = 1
SEALED: Final = 2


class Eviction(Protocol):
    """Chooses which unreferenced sealed block is reused first."""

    def add(self, block_id: int) -> None: ...
    def remove(self, block_id: int) -> None: ...
    def touch(self, block_id: int) -> None: ...
    def pick(self) -> int: ...
    def add_all(self, block_ids: Iterable[int]) -> None: ...
    def remove_all(self, block_ids: Iterable[int]) -> None: ...
    def __len__(self) -> int: ...
    def __contains__(self, block_id: int) -> bool: ...
    def __iter__(self) -> Iterator[int]: ...


class Pool:
    """States, references and pins of the block ids [1, num_blocks). Block 0 is never handed out."""

    __slots__ = ("_candidates", "_empty", "_on_evict", "last_step", "num_blocks", "pinned", "pins", "refs", "state")

    def __init__(self, num_blocks: int, candidates: Eviction, on_evict: Callable[[int], None]) -> None:
        """on_evict(block_id) is called before a candidate is reused: its key must go."""
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self.pins = [0] * num_blocks
        self.pinned: set[int] = set()
        self.state = bytearray(num_blocks)
        self.last_step = [-1] * num_blocks
        """Last step that may still read or write a freed block. The compute stream may reuse it at once; a copy has to
        wait for that step."""
        self._candidates = candidates
        self._empty = list(range(num_blocks - 1, 0, -1))
        self._on_evict = on_evict

    @property
    def capacity(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that take() can hand out."""
        return len(self._empty) + len(self._candidates)

    @property
    def num_cached(self) -> int:
        return len(self._candidates)

    def take(self, count: int) -> list[int]:
        """Hand out blocks as FILLING with one reference. There must be that many free ones."""
        empty = self._empty
        taken: list[int] = []
        for _ in range(count):
            if empty:
                block_id = empty.pop()
            else:
                block_id = self._candidates.pick()
                self._on_evict(block_id)
            assert self.refs[block_id] == 0, f"block {block_id} was handed out while referenced"
            assert self.pins[block_id] == 0, f"block {block_id} was handed out while pinned"
            self.refs[block_id] = 1
            self.state[block_id] = FILLING
            taken.append(block_id)
        return taken

    def share(self, block_id: int) -> None:
        """One more reference to a sealed block, which is no candidate from now on."""
        assert self.state[block_id] == SEALED, f"block {block_id} is shared before it is sealed"
        if self.refs[block_id] == 0 and self.pins[block_id] == 0:
            self._candidates.remove(block_id)
        self.refs[block_id] += 1

    def share_all(self, block_ids: Sequence[int]) -> None:
        """share() of each; prefixes have hundreds of blocks, and someone waits for them."""
        refs, pins, state = self.refs, self.pins, self.state
        self._candidates.remove_all([b for b in block_ids if refs[b] == 0 and pins[b] == 0])
        for block_id in block_ids:
            assert state[block_id] == SEALED, f"block {block_id} is shared before it is sealed"
            refs[block_id] += 1

    def num_candidates(self, block_ids: Sequence[int]) -> int:
        """How many of these could be reused now: sealed blocks that nobody holds."""
        refs, pins, state = self.refs, self.pins, self.state
        return len([b for b in block_ids if refs[b] == 0 and pins[b] == 0 and state[b] == SEALED])

    def is_candidate(self, block_id: int) -> bool:
        return block_id in self._candidates

    def candidates(self) -> list[int]:
        """In the order in which they would be reused."""
        return list(self._candidates)

    def seal(self, block_id: int) -> None:
        """The block is full and immutable from now on."""
        assert self.state[block_id] == FILLING, f"block {block_id} is sealed in state {self.state[block_id]}"
        self.state[block_id] = SEALED

    def seal_all(self, block_ids: Sequence[int]) -> None:
        """seal() of each."""
        state = self.state
        for block_id in block_ids:
            assert state[block_id] == FILLING, f"block {block_id} is sealed in state {state[block_id]}"
            state[block_id] = SEALED

    def unref(self, block_id: int, last_step: int) -> bool:
        """Drop one reference. True if nobody references it now; the caller then says keep() or discard()."""
        refs = self.refs[block_id] - 1
        assert refs >= 0, f"block {block_id} has no reference to drop"
        self.refs[block_id] = refs
        if refs == 0:
            self.last_step[block_id] = last_step
        return refs == 0

    def unref_all(self, block_ids: Sequence[int], last_step: int) -> list[int]:
        """unref() of each; those that nobody references now."""
        refs = self.refs
        free: list[int] = []
        for block_id in block_ids:
            left = refs[block_id] - 1
            assert left >= 0, f"block {block_id} has no reference to drop"
            refs[block_id] = left
            if left == 0:
                free.append(block_id)
        for block_id in free:
            self.last_step[block_id] = last_step
        return free

    def keep(self, block_id: int) -> None:
        """An unreferenced, unpinned, sealed block can be hit until it is reused."""
        assert self.state[block_id] == SEALED
        assert self.refs[block_id] == 0
        assert self.pins[block_id] == 0
        self._candidates.add(block_id)

    def keep_all(self, block_ids: Sequence[int]) -> None:
        """keep() of each, in this order."""
        refs, pins, state = self.refs, self.pins, self.state
        for block_id in block_ids:
            assert state[block_id] == SEALED
            assert refs[block_id] == pins[block_id] == 0
        self._candidates.add_all(block_ids)

    def refresh(self, block_id: int) -> None:
        """Make a candidate the last one to be reused."""
        self._candidates.touch(block_id)

    def discard(self, block_id: int) -> None:
        """An unreferenced, unpinned block's content is of no use: it is the first to be reused."""
        assert self.refs[block_id] == 0
        assert self.pins[block_id] == 0
        if block_id in self._candidates:
            self._candidates.remove(block_id)
        self.state[block_id] = FREE
        self._empty.append(block_id)

    def pin(self, block_id: int) -> None:
        """A copy reads or writes the block: it is not handed out until the pin is gone."""
        assert self.state[block_id] != FREE, f"block {block_id} is free and cannot be pinned"
        if self.refs[block_id] == 0 and self.pins[block_id] == 0:
            self._candidates.remove(block_id)
        self.pins[block_id] += 1
        self.pinned.add(block_id)

    def pin_all(self, block_ids: Sequence[int]) -> None:
        """pin() of each; none may come twice."""
        refs, pins, state = self.refs, self.pins, self.state
        self._candidates.remove_all([b for b in block_ids if refs[b] == 0 and pins[b] == 0])
        for block_id in block_ids:
            assert state[block_id] != FREE, f"block {block_id} is free and cannot be pinned"
            pins[block_id] += 1
        self.pinned.update(block_ids)

    def unpin_held(self, block_ids: Sequence[int]) -> list[int]:
        """Drop one pin of those that somebody holds even so; the others, which are left as they are."""
        refs, pins, pinned = self.refs, self.pins, self.pinned
        left: list[int] = []
        for block_id in block_ids:
            if not refs[block_id]:
                left.append(block_id)
                continue
            assert pins[block_id] > 0, f"block {block_id} has no pin to drop"
            pins[block_id] -= 1
            if not pins[block_id]:
                pinned.remove(block_id)
        return left

    def unpin(self, block_id: int) -> bool:
        """Drop one pin. True if nobody holds the block now; the caller then says keep() or discard()."""
        pins = self.pins[block_id] - 1
        assert pins >= 0, f"block {block_id} has no pin to drop"
        self.pins[block_id] = pins
        if not pins:
            self.pinned.remove(block_id)
        return pins == 0 and self.refs[block_id] == 0

    def check(self) -> None:
        """Every block id is in exactly one of FREE, FILLING, SEALED, and in the lists that its state demands."""
        empty = set(self._empty)
        candidates = set(self._candidates)
        assert len(empty) == len(self._empty), "a block is twice in the list of empty blocks"
        assert len(candidates) == len(self._candidates), "the number of candidates is wrong"
        assert self.refs[0] == self.pins[0] == self.state[0] == 0
        assert min(self.refs) >= 0
        assert min(self.pins) >= 0
        assert self.pinned == {block_id for block_id, pins in enumerate(self.pins) if pins}
        for block_id in range(1, self.num_blocks):
            refs, state = self.refs[block_id], self.state[block_id]
            held = refs + self.pins[block_id] > 0
            if state == FREE:
                assert not held, f"block {block_id} is held but FREE"
                empty.remove(block_id)
            elif state == FILLING:
                assert held, f"block {block_id} is FILLING and held by nobody"
                assert refs <= 1, f"block {block_id} is FILLING and shared"
            elif not held:
                candidates.remove(block_id)
        assert not empty, f"blocks {empty} are listed as empty"
        assert not candidates, f"blocks {candidates} are listed as candidates"
