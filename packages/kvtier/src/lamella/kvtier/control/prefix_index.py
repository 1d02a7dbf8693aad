"""Which block of a group holds the content that a key names.

Usually one block per key. Two sequences that compute the same prompt at the same time fill a block each, and block
tables are append-only, so both stay: a key can have several copies as long as sequences use them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Protocol

from lamella.kvtier.keys import Key


class Holds(Protocol):
    """Anything that knows which keys it has."""

    def __contains__(self, key: Key, /) -> bool: ...


def first_missing(keys: Sequence[Key], max_blocks: int, held: Holds) -> int:
    """How many of keys[:max_blocks] are held, where whoever holds a key holds all before it: a binary search."""
    if max_blocks and keys[max_blocks - 1] in held:
        return max_blocks
    return bisect_left(range(max_blocks), True, key=lambda n: keys[n] not in held)


class PrefixIndex:
    """key -> block ids, and back. A block is in the index exactly while its content can be hit."""

    __slots__ = ("_copies", "_first", "_key_of", "_parent_of")

    def __init__(self, num_blocks: int) -> None:
        self._first: dict[Key, int] = {}
        self._copies: dict[Key, list[int]] = {}
        """Further blocks with the same content; rarely any."""
        self._key_of: list[Key | None] = [None] * num_blocks
        self._parent_of: list[Key | None] = [None] * num_blocks

    def find(self, key: Key) -> int | None:
        """The first block with this content."""
        return self._first.get(key)

    def find_all(self, keys: Sequence[Key]) -> list[int] | None:
        """The blocks with these contents, which must be here; None where some content may have several."""
        if self._copies:
            return None
        first = self._first
        return [first[key] for key in keys]

    def match(self, keys: Sequence[Key], max_blocks: int) -> int:
        """first_missing() of this index; full groups only."""
        return first_missing(keys, max_blocks, self._first)

    def blocks(self, key: Key) -> list[int]:
        """All blocks with this content."""
        first = self._first.get(key)
        if first is None:
            return []
        return [first, *self._copies.get(key, ())]

    @property
    def any_copies(self) -> bool:
        """Whether any content has several blocks."""
        return bool(self._copies)

    def has_copies(self, key: Key) -> bool:
        return key in self._copies

    def add(self, key: Key, parent: Key | None, block_id: int) -> bool:
        """Content of a block that was just sealed. parent: None for a sequence's first block.

        False if another block holds the same content already.
        """
        assert self._key_of[block_id] is None, f"block {block_id} has a key already"
        self._key_of[block_id] = key
        self._parent_of[block_id] = parent
        if key not in self._first:
            self._first[key] = block_id
            return True
        self._copies.setdefault(key, []).append(block_id)
        return False

    def add_all(self, keys: Sequence[Key], first: int, block_ids: Sequence[int]) -> int:
        """add() of the blocks of keys[first], keys[first + 1], …; how many have a content that was here already."""
        key_of, parent_of, held = self._key_of, self._parent_of, self._first
        parent = keys[first - 1] if first else None
        num_copies = 0
        for n, block_id in enumerate(block_ids, first):
            assert key_of[block_id] is None, f"block {block_id} has a key already"
            key = keys[n]
            key_of[block_id] = key
            parent_of[block_id] = parent
            if held.setdefault(key, block_id) != block_id:
                self._copies.setdefault(key, []).append(block_id)
                num_copies += 1
            parent = key
        return num_copies

    def remove(self, block_id: int) -> bool:
        """The block's content can no longer be hit there. True if that was its last copy."""
        key = self._key_of[block_id]
        assert key is not None, f"block {block_id} has no key"
        self._key_of[block_id] = self._parent_of[block_id] = None
        copies = self._copies.get(key)
        if copies is None:
            assert self._first[key] == block_id
            del self._first[key]
            return True
        if self._first[key] == block_id:
            self._first[key] = copies.pop(0)
        else:
            copies.remove(block_id)
        if not copies:
            del self._copies[key]
        return False

    def key_of(self, block_id: int) -> Key | None:
        return self._key_of[block_id]

    def parent_of(self, block_id: int) -> Key | None:
        return self._parent_of[block_id]

    def descendants(self, keys: set[Key]) -> set[Key]:
        """Of keys and everything that hangs on them, what is here. Walks the whole index: for rare events only."""
        children: dict[Key, list[Key]] = {}
        for key, block_id in self._first.items():
            for copy in (block_id, *self._copies.get(key, ())):
                parent = self._parent_of[copy]
                if parent is not None:
                    children.setdefault(parent, []).append(key)
        found: set[Key] = set()
        front = list(keys)
        while front:
            key = front.pop()
            if key not in found:
                found.add(key)
                front.extend(children.get(key, ()))
        return {key for key in found if key in self._first}

    def __len__(self) -> int:
        """Number of different contents."""
        return len(self._first)

    def __contains__(self, key: Key) -> bool:
        return key in self._first

    def __iter__(self) -> Iterator[Key]:
        return iter(self._first)

    def check(self) -> None:
        """key -> blocks and block -> key say the same."""
        listed = [(block_id, key) for key, block_id in self._first.items()]
        listed += [(block_id, key) for key, blocks in self._copies.items() for block_id in blocks]
        assert all(self._copies.values()), "an empty list of copies"
        assert self._copies.keys() <= self._first.keys()
        assert len(dict(listed)) == len(listed), "a block is listed twice"
        keyed = {block_id: key for block_id, key in enumerate(self._key_of) if key is not None}
        assert dict(listed) == keyed, "blocks and keys disagree"
