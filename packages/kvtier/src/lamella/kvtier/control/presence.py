"""What a tier below the host holds, as far as it has told.

    listed    can be found; in a full group only behind the block before it, so that each tier holds prefixes
    waiting   there, but what it hangs on is not: listed as soon as that comes

Content comes in any order (an index that is read at the start), and goes by segments (space is reclaimed).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from lamella.kvtier.control.prefix_index import first_missing
from lamella.kvtier.keys import Key


class PresenceBook:
    """Keys of one group in one tier."""

    __slots__ = ("_chained", "_children", "_waiting", "listed")

    def __init__(self, chained: bool) -> None:
        """chained: a block is of use only behind the block before it."""
        self._chained = chained
        self.listed: dict[Key, Key | None] = {}
        """What can be found -> its parent. To be read only; faster than asking the book."""
        self._waiting: dict[Key, Key | None] = {}
        self._children: dict[Key, Key | dict[Key, None]] = {}
        """Of listed and waiting keys, and of ones not there. Mostly one, and then no dict."""

    def match(self, keys: Sequence[Key], max_blocks: int) -> int:
        """How many of keys[:max_blocks] are here, up to the first that is not. Chained books only."""
        return first_missing(keys, max_blocks, self.listed)

    def add(self, key: Key, parent: Key | None) -> None:
        """The tier has this block. Nothing happens if that is known."""
        if key in self.listed or key in self._waiting:
            return
        if not self._chained or parent is None:
            self.listed[key] = parent
        else:
            self._link(key, parent)
            if parent not in self.listed:
                self._waiting[key] = parent
                return
            self.listed[key] = parent
        if key in self._children:
            self._list_children(key)

    def remove(self, key: Key) -> bool:
        """The tier has it no more; what hangs on it waits. Whether it was here."""
        if key in self._waiting:
            self._unlink(key, self._waiting.pop(key))
            return True
        if key not in self.listed:
            return False
        self._unlink(key, self.listed.pop(key))
        front = [*self._children_of(key)]
        while front:
            child = front.pop()
            if child in self.listed:
                self._waiting[child] = self.listed.pop(child)
                front.extend(self._children_of(child))
        return True

    def clear(self) -> None:
        self.listed.clear()
        self._waiting.clear()
        self._children.clear()

    def __contains__(self, key: Key) -> bool:
        return key in self.listed

    def __len__(self) -> int:
        """What can be found."""
        return len(self.listed)

    def __iter__(self) -> Iterator[Key]:
        return iter(self.listed)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def check(self) -> None:
        """Listed is a forest with its roots; waiting ones wait for something."""
        assert not self.listed.keys() & self._waiting.keys()
        if not self._chained:
            assert not self._waiting
            return
        for key, parent in self.listed.items():
            assert parent is None or parent in self.listed, "a listed block hangs on one that is not"
            assert parent is None or key in self._children_of(parent)
        for key, parent in self._waiting.items():
            assert parent is not None
            assert parent not in self.listed, "a block waits for one that is listed"
            assert key in self._children_of(parent)
        total = sum(len(self._children_of(parent)) for parent in self._children)
        assert total == sum(p is not None for b in (self.listed, self._waiting) for p in b.values())

    def _list_children(self, key: Key) -> None:
        front = [*self._children_of(key)]
        while front:
            child = front.pop()
            if child in self._waiting:
                self.listed[child] = self._waiting.pop(child)
                front.extend(self._children_of(child))

    def _children_of(self, key: Key) -> Collection[Key]:
        children = self._children.get(key)
        if children is None:
            return ()
        return (children,) if isinstance(children, bytes) else children

    def _link(self, key: Key, parent: Key) -> None:
        children = self._children.get(parent)
        if children is None:
            self._children[parent] = key
        elif isinstance(children, bytes):
            self._children[parent] = {children: None, key: None}
        else:
            children[key] = None

    def _unlink(self, key: Key, parent: Key | None) -> None:
        if parent is None or not self._chained:
            return
        children = self._children[parent]
        if isinstance(children, bytes):
            del self._children[parent]
        else:
            del children[key]
            if not children:
                del self._children[parent]
