"""What happens to cached content, for those who route requests by it or watch it."""

from __future__ import annotations

from typing import NamedTuple

from lamella.kvtier.keys import Key


class BlockStored(NamedTuple):
    """A block got its key and can be hit."""

    group: int
    key: Key
    parent: Key
    block_id: int


class BlockRemoved(NamedTuple):
    """The last copy of this content left the device."""

    group: int
    key: Key


class Cleared(NamedTuple):
    """Nothing can be hit any more: all keys were dropped."""


Event = BlockStored | BlockRemoved | Cleared
