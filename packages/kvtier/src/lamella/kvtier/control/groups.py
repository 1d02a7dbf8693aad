"""What the kinds of groups keep of a sequence, and the longest prefix that all of them hold.

    full      [0 ……………………………… len)        every block, read by every later token
    sliding   null … null [window | len)      blocks wholly left of the window go back to the pool

A prefix of h tokens is a hit if every group holds what a token at position h reads of it: a full group all blocks left
of h, a sliding one those of the window that ends at h. Each group may only shorten the prefix, so asking them in turn
until nobody does so ends at the longest common one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lamella.kvtier.control.eviction.lru import Lru
from lamella.kvtier.control.pool import Pool
from lamella.kvtier.control.prefix_index import PrefixIndex
from lamella.kvtier.keys import Key
from lamella.kvtier.layout import Group


class Books(Protocol):
    """What a tier below the device holds of one group."""

    def match(self, keys: Sequence[Key], max_blocks: int) -> int:
        """How many of keys[:max_blocks] it holds, up to the first that it does not. Full groups only."""
        ...

    def __contains__(self, key: Key) -> bool: ...


class Matches(Protocol):
    """Finds what one group holds of a prefix."""

    def match(self, keys: Sequence[Key], max_blocks: int) -> int: ...


class JointMatch:
    """A group's blocks on the device and in lower tiers, as one."""

    __slots__ = ("books", "group")

    def __init__(self, group: GroupBlocks, books: Sequence[Books]) -> None:
        self.group = group
        self.books = books

    def match(self, keys: Sequence[Key], max_blocks: int) -> int:
        return self.group.match_over(keys, max_blocks, self.books)


class GroupBlocks:
    """One group's pool and index; this class keeps every block (kind full)."""

    def __init__(self, idx: int, group: Group, num_blocks: int) -> None:
        self.idx = idx
        self.group = group
        self.block_size = group.block_size
        self.index = PrefixIndex(num_blocks)
        self.pool = Pool(num_blocks, Lru(num_blocks), self.forget)
        self.evicted: list[Key] = []
        """Keys whose last copy was evicted since the manager last looked."""

    slides = False
    chained = True
    """Whether a block can be hit only behind the block before it."""
    is_state = False

    def match(self, keys: Sequence[Key], max_blocks: int) -> int:
        """Longest prefix, in blocks and at most max_blocks, of which this group holds what is read later."""
        return self.index.match(keys, max_blocks)

    def match_over(self, keys: Sequence[Key], max_blocks: int, books: Sequence[Books]) -> int:
        """match(), where each block may be here or in any of the books."""
        held = self.index.match(keys, max_blocks)
        for book in books:
            if held < max_blocks:
                held = max(held, book.match(keys, max_blocks))
        return held

    def left_edge(self, length: int) -> int:
        """First block that tokens from position `length` on read."""
        return 0

    def entry_len(self, num_tokens: int, chunk_end: int) -> int:
        """Slots that a new sequence gets: here the whole prompt, so that a chunk never fails half-way."""
        return num_tokens

    def num_new(self, num_tokens: int, chunk_end: int, hit: int) -> int:
        """Blocks that a new sequence gets beside its hit of so many blocks."""
        return max(0, -(-self.entry_len(num_tokens, chunk_end) // self.block_size) - hit)

    def max_chunk_len(self, max_len: int) -> int:
        """Most tokens of one step for a sequence of up to max_len tokens that is alone."""
        return max_len

    def max_len(self) -> int:
        """Longest sequence that fits, alone; a number no sequence reaches where there is no limit."""
        return self.pool.capacity * self.block_size

    def find(self, key: Key) -> int:
        """A block with this content; one that is in use where there is a choice. It must be in the index."""
        if self.index.has_copies(key):
            blocks = self.index.blocks(key)
            return next((b for b in blocks if self.pool.refs[b]), blocks[0])
        block_id = self.index.find(key)
        assert block_id is not None
        return block_id

    def find_all(self, keys: Sequence[Key]) -> list[int]:
        """find() of each."""
        found = self.index.find_all(keys)
        return [self.find(key) for key in keys] if found is None else found

    def forget(self, block_id: int) -> None:
        """The block's content is about to be overwritten: it can no longer be hit."""
        key = self.index.key_of(block_id)
        assert key is not None
        if self.index.remove(block_id):
            self.evicted.append(key)
            if self.pool.pinned and self.chained:
                self._forget_orphans(key)

    def _forget_orphans(self, key: Key) -> None:
        """A prefix is evicted after all that hangs on it, but not after what a copy has pinned: that is unlisted, so
        that the index holds whole prefixes only."""
        index = self.index
        if not any(index.parent_of(block) == key for block in self.pool.pinned):
            return
        for orphan in index.descendants({key}):
            for block in index.blocks(orphan):
                index.remove(block)
                if not self.pool.refs[block] and not self.pool.pins[block]:
                    self.pool.discard(block)
            self.evicted.append(orphan)


class SlidingBlocks(GroupBlocks):
    """A group of which only the last window of tokens is read."""

    slides = True
    chained = False

    def match(self, keys: Sequence[Key], max_blocks: int) -> int:
        return self.match_over(keys, max_blocks, ())

    def match_over(self, keys: Sequence[Key], max_blocks: int, books: Sequence[Books]) -> int:
        needed = self.group.window_blocks
        index = self.index
        run = 0
        end = max_blocks  # blocks [end - run, end) are held
        for n in range(max_blocks - 1, -1, -1):
            if run >= needed:
                return end
            if keys[n] in index or (books and any(keys[n] in book for book in books)):
                run += 1
            else:
                end = n
                run = 0
        return end

    def left_edge(self, length: int) -> int:
        assert self.group.window is not None
        return max(0, length - self.group.window + 1) // self.block_size

    def entry_len(self, num_tokens: int, chunk_end: int) -> int:
        return min(num_tokens, chunk_end)

    def max_chunk_len(self, max_len: int) -> int:
        """A chunk of q tokens at position c touches [c - window + 1, c + q), in the worst case not aligned."""
        assert self.group.window is not None
        if self.pool.capacity * self.block_size >= max_len:
            return max_len
        return min(max_len, (self.pool.capacity - 1) * self.block_size - self.group.window + 2)

    def max_len(self) -> int:
        if self.max_chunk_len(1 << 62) >= 1:
            return 1 << 62
        return super().max_len()


def longest_match(groups: Sequence[Matches], keys: Sequence[Key], max_blocks: int) -> int:
    """Longest prefix, in blocks, that is a hit in every group."""
    hit = max_blocks
    agreed = 0
    while hit and agreed < len(groups):
        for group in groups:
            shorter = group.match(keys, hit)
            if shorter < hit:
                hit = shorter
                agreed = 1  # the others have to confirm the shorter one
            else:
                agreed += 1
            if agreed == len(groups) or not hit:
                break
    return hit
