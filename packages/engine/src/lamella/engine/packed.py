"""Token ids as one array of 32-bit numbers: what reads all ids of a long prompt reads this.

A list is an object per id. Every walk over 32,768 of them takes up to a millisecond, and someone waits for the first
token meanwhile; so the ids are packed once, and block keys and the runner share the array.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any

import msgspec


def pack(token_ids: Sequence[int]) -> array[int]:
    """The ids, in 32 bits each. OverflowError for one that has no place there."""
    return array("I", token_ids)


@cache
def ids_below(vocab_size: int) -> Any:
    """The type of a list of ids of this vocabulary: msgspec.convert() checks one in a single walk, and in a fraction of
    the time that loops take."""
    return list[Annotated[int, msgspec.Meta(ge=0, lt=vocab_size)]]
