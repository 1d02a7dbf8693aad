"""Eviction policies of the host tier by name. The device pool always uses lru.py: its order is the sequences' own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from lamella.kvtier.control.eviction.leaf_lru import LeafLru
from lamella.kvtier.control.eviction.s3fifo import S3Fifo
from lamella.kvtier.keys import Key


class LeafEviction(Protocol):
    """Chooses among slots of a prefix tree of which only leaves, unpinned and complete, are offered.

    insert ─▶ (offer ⇄ withhold)* ─▶ pick: evicted, or forget: its content is gone for another reason
    """

    def insert(self, slot: int, key: Key) -> None:
        """The slot got this content. It is not offered yet."""
        ...

    def use(self, slot: int) -> None:
        """The slot, and all that it hangs on, was hit."""
        ...

    def offer(self, slot: int) -> None: ...
    def withhold(self, slot: int) -> None: ...
    def forget(self, slot: int) -> None: ...
    def pick(self) -> int:
        """Remove and return the next victim. One must be offered."""
        ...

    def __len__(self) -> int:
        """Slots that are offered."""
        ...

    def __contains__(self, slot: int) -> bool: ...
    def __iter__(self) -> Iterator[int]: ...


POLICIES: dict[str, Callable[[int, list[int]], LeafEviction]] = {"lru": LeafLru, "s3fifo": S3Fifo}
"""Name -> maker(number of slots with slot 0, which is never used; slot -> slot it hangs on, 0 for none)."""
