"""Which records a folder holds, and the tree that they form.

    records    name -> where it lies                       name: the group's four bytes and the key
    waiting    there, but what it hangs on is not: of use again as soon as that comes
    listed     all others: in a chained group, every parent is listed too

Dropping a record drops what hangs on it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from lamella.kvtier.keys import Key

Name = bytes


def name_of(group: int, key: Key) -> Name:
    return group.to_bytes(4, "little") + key


def group_of(name: Name) -> int:
    return int.from_bytes(name[:4], "little")


class Record(NamedTuple):
    segment: int
    """Number of the segment, as the store counts them."""
    position: int
    stored_bytes: int
    num_bytes: int
    flags: int
    parent: Name | None


class RecordIndex:
    """standalone: groups in which a block is of use without the one before it (sliding windows, states)."""

    def __init__(self, standalone: Collection[int] = ()) -> None:
        self.standalone = frozenset(standalone)
        self.records: dict[Name, Record] = {}
        self.waiting: set[Name] = set()
        self.hit: set[Name] = set()
        """Read since they were written or moved."""
        self._children: dict[Name, Name | dict[Name, None]] = {}
        """Of names that are there and of ones that are not. Mostly one, and then no dict."""

    def __len__(self) -> int:
        return len(self.records)

    def __contains__(self, name: Name) -> bool:
        return name in self.records

    def add(self, name: Name, record: Record) -> list[Name]:
        """A record that is not there yet. Returns what became listed by it, parents first."""
        assert name not in self.records
        self.records[name] = record
        parent = record.parent
        if parent is not None:
            self._link(name, parent)
            lost = parent not in self.records or parent in self.waiting
            if lost and group_of(name) not in self.standalone:
                self.waiting.add(name)
                return []
        listed = [name]
        for above in listed:
            for child in self.children(above):
                if child in self.waiting:
                    self.waiting.discard(child)
                    listed.append(child)
        return listed

    def load(self, records: dict[Name, Record], waiting: set[Name]) -> None:
        """Take over what a checkpoint held, into an empty index."""
        assert not self.records
        self.records, self.waiting = records, waiting
        children = self._children
        for name, record in records.items():
            parent = record[5]
            if parent is not None:
                first = children.setdefault(parent, name)
                if first is not name:
                    self._link(name, parent)

    def move(self, name: Name, record: Record) -> None:
        """The record lies elsewhere now; its parent is the same."""
        self.records[name] = record
        self.hit.discard(name)

    def drop(self, name: Name) -> list[Name]:
        """Forget a record and what hangs on it. Returns all that is gone, listed or not; empty if it was not there."""
        if name not in self.records:
            return []
        gone = [name]
        for above in gone:
            for child in self.children(above):
                # across groups nothing hangs together: a name begins with its group
                if group_of(child) not in self.standalone:
                    gone.append(child)
        for lost in gone:
            parent = self.records.pop(lost).parent
            self.waiting.discard(lost)
            self.hit.discard(lost)
            if parent is not None:
                self._unlink(lost, parent)
        return gone

    def lose(self, names: Iterable[Name]) -> list[Name]:
        """These are gone, but copies of them may turn up: what hangs on them waits. Returns all that is no longer
        listed."""
        lost = [name for name in names if name in self.records]
        unlisted = [name for name in lost if name not in self.waiting]
        for name in lost:
            parent = self.records.pop(name).parent
            self.waiting.discard(name)
            self.hit.discard(name)
            if parent is not None:
                self._unlink(name, parent)
        front = list(unlisted)
        for above in front:
            for child in self.children(above):
                if group_of(child) not in self.standalone and child not in self.waiting:
                    self.waiting.add(child)
                    front.append(child)
        return front

    def children(self, name: Name) -> tuple[Name, ...]:
        """What is there and has this as its parent."""
        children = self._children.get(name)
        if children is None:
            return ()
        return (children,) if isinstance(children, bytes) else tuple(children)

    def listed(self) -> Iterator[tuple[int, Key, Key | None]]:
        """(group, key, parent) of what is listed, parents first."""
        records, waiting, standalone = self.records, self.waiting, self.standalone
        told: set[Name] = set()
        for name in records:
            if name in told or name in waiting:
                continue
            line = [name]
            above = records[name].parent
            if group_of(name) not in standalone:
                while above is not None and above not in told:
                    line.append(above)
                    above = records[above].parent
            for link in reversed(line):
                told.add(link)
                parent = records[link].parent
                yield group_of(link), link[4:], None if parent is None else parent[4:]

    def clear(self) -> None:
        for books in (self.records, self.waiting, self.hit, self._children):
            books.clear()

    def check(self) -> None:
        """Listed is prefix-closed, and the tree says what the records say."""
        assert self.waiting <= self.records.keys()
        assert self.hit <= self.records.keys()
        for name, record in self.records.items():
            if record.parent is None:
                assert name not in self.waiting
                continue
            assert name in self.children(record.parent)
            if group_of(name) not in self.standalone:
                lost = record.parent not in self.records or record.parent in self.waiting
                assert (name in self.waiting) == lost, "a record is listed without its parent, or waits with it"
        links = sum(1 if isinstance(c, bytes) else len(c) for c in self._children.values())
        assert links == sum(record.parent is not None for record in self.records.values())

    def _link(self, name: Name, parent: Name) -> None:
        children = self._children.get(parent)
        if children is None:
            self._children[parent] = name
        elif isinstance(children, bytes):
            self._children[parent] = {children: None, name: None}
        else:
            children[name] = None

    def _unlink(self, name: Name, parent: Name) -> None:
        children = self._children[parent]
        if isinstance(children, bytes):
            del self._children[parent]
        else:
            del children[name]
            if not children:
                del self._children[parent]
