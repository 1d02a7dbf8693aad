"""Token ids as one array of 32-bit numbers: what reads all ids of a long prompt reads this.

A list is an object per id. Every walk over 32,768 of them takes up to a millisecond, and someone waits for the first
token meanwhile; so the ids are packed once, and checks, block keys and the runner share the array.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence


def pack(token_ids: Sequence[int]) -> array[int]:
    """The ids, in 32 bits each. OverflowError for one that has no place there."""
    return array("I", token_ids)


def is_within(packed: array[int], vocab_size: int) -> bool:
    """Whether the vocabulary has all of these ids."""
    import numpy as np  # what plans steps does without

    return int(np.frombuffer(packed, np.uint32).max(initial=0)) < vocab_size
