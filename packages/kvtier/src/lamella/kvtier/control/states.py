"""Groups of recurrent states: a block is one whole state, not a number of tokens.

    live       num_columns blocks of a sequence, always being written, never sealed, never shared
    snapshot   a copy of the live state at one position, a multiple of block_size that the caller chooses:
               planned ─▶ written by the step that ends there ─▶ sealed: named by the key of the block that ends there

A prefix of h tokens is a hit if there is a snapshot at h. Its block is held until the sequence has gone on from it; the
caller copies it into the live state first. Snapshots hang on nothing: each can be evicted by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from lamella.kvtier.control.groups import Books, GroupBlocks
from lamella.kvtier.control.shelf import Shelf
from lamella.kvtier.events import BlockStored
from lamella.kvtier.keys import Key, KeyChain


class StateBlocks(GroupBlocks):
    """Pool and index of one group of states."""

    chained = False
    is_state = True

    def match(self, keys: Sequence[Key], max_blocks: int) -> int:
        return self.match_over(keys, max_blocks, ())

    def match_over(self, keys: Sequence[Key], max_blocks: int, books: Sequence[Books]) -> int:
        """The last position, at most max_blocks, that has a snapshot; 0 needs none."""
        for n in range(max_blocks, 0, -1):
            key = keys[n - 1]
            if key in self.index or (books and any(key in book for book in books)):
                return n
        return 0

    def left_edge(self, length: int) -> int:
        """The one block that is read: the snapshot at this position."""
        return max(0, length // self.block_size - 1)

    def num_new(self, num_tokens: int, chunk_end: int, hit: int) -> int:
        return self.group.num_columns

    def max_len(self) -> int:
        """Any length, if a live state fits beside the snapshot that it goes on from."""
        return 1 << 62 if self.pool.capacity > self.group.num_columns else 0

    def max_chunk_len(self, max_len: int) -> int:
        return max_len


class States:
    """One sequence's blocks in all groups of states, in their order."""

    __slots__ = ("live", "planned", "source")

    def __init__(self, live: list[list[int]], source: list[int]) -> None:
        self.live = live
        self.source = source
        """The snapshots that it goes on from, while they are held; empty: it began with nothing, or has gone on."""
        self.planned: dict[int, list[int]] = {}
        """Position, in blocks -> where the caller writes the snapshots."""

    def blocks(self, group: int) -> list[int]:
        """All blocks that it references in one of the groups, counted from the first group of states."""
        return [*self.live[group], *self.source[group : group + 1], *(p[group] for p in self.planned.values())]


class StateKeeper:
    """What happens to the blocks of sequences in all groups of states."""

    __slots__ = ("_shelf", "groups")

    def __init__(self, groups: Sequence[GroupBlocks], shelf: Shelf) -> None:
        self.groups = groups
        self._shelf = shelf

    def plan(self, states: States, place: int) -> tuple[int, ...] | None:
        """Blocks for snapshots at this place, one per group; None if they do not fit."""
        if place not in states.planned:
            if any(group.pool.num_free < 1 for group in self.groups):
                return None
            states.planned[place] = [group.pool.take(1)[0] for group in self.groups]
            for group in self.groups:
                self._shelf.note_evictions(group)
        return tuple(states.planned[place])

    def seal(self, states: States, chain: KeyChain, full: int) -> None:
        """Snapshots among the first `full` blocks are hits for others from now on, and what the sequence went on from
        is left to them."""
        shelf = self._shelf
        for group, block in zip(self.groups, states.source):
            shelf.drop(group, block, -1)
        states.source = []
        for place in sorted(place for place in states.planned if place <= full):
            key, parent = chain.keys[place - 1], chain.keys[place - 2] if place > 1 else None
            for group, block in zip(self.groups, states.planned.pop(place)):
                group.pool.seal(block)
                if group.index.add(key, parent, block) and shelf.max_events:
                    shelf.note(BlockStored(group.idx, key, chain.parent(place - 1), block))
                shelf.drop(group, block, -1)

    def trim(self, states: States, num_blocks: int, last_step: int) -> None:
        """Snapshots beyond so many blocks are not taken after all."""
        for place in [place for place in states.planned if place > num_blocks]:
            for group, block in zip(self.groups, states.planned.pop(place)):
                self._shelf.drop(group, block, last_step)

    def release(self, states: States, last_step: int, distrusted: Sequence[Key]) -> None:
        """The sequence is gone: live states, and snapshots that were not sealed, with it. distrusted: keys of snapshots
        that cannot be hit any more, either."""
        for n, group in enumerate(self.groups):
            for block in states.blocks(n):
                self._shelf.drop(group, block, last_step)
            self._shelf.forget_all(group, {key for key in distrusted if key in group.index})
