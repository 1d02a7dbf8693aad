"""How a store works, decided before it opens."""

from __future__ import annotations

from dataclasses import dataclass

from lamella.kvtier.data.disk.header import PAGE
from lamella.kvtier.errors import KvTierError

SEGMENT_BYTES = 128 << 20
_MIN_SEGMENTS = 8
"""A segment is at most this part of the capacity: one is always kept free, to copy into what survives a reclaim."""
_MIN_CAPACITY = 1 << 20


@dataclass(frozen=True, slots=True)
class StorePlan:
    fingerprint: bytes
    """16 bytes, under which the blocks' bytes mean something."""
    capacity_bytes: int
    """All files of the folder together."""
    segment_bytes: int = SEGMENT_BYTES
    depth: int = 32
    """Transfers in flight."""
    batch_bytes: int = 2 << 20
    """Records are written together up to this size."""
    writing_bytes: int = 32 << 20
    """Writes in flight: more would only make reads wait."""
    max_writes: int = 1024
    """Writes that may wait; further ones are refused."""
    standalone: frozenset[int] = frozenset()
    """Groups in which a block is of use without the one before it."""
    compress: bool = False
    rescan_s: float = 1.0
    """How often the folder is looked at for what other processes wrote and removed."""
    retry_s: float = 1.0
    """After a failed write, none is tried for this long; doubled with each failure, up to a minute."""
    stall_s: float = 10.0
    """If a transfer takes longer, what waits behind it ends as failed instead of waiting too."""

    def __post_init__(self) -> None:
        if len(self.fingerprint) != 16:
            raise KvTierError(f"a fingerprint has 16 bytes, got {len(self.fingerprint)}; take Layout.fingerprint()")
        if self.capacity_bytes < _MIN_CAPACITY:
            raise KvTierError(
                f"the disk tier may have {self.capacity_bytes} bytes, which is less than {_MIN_CAPACITY}; give more"
            )
        if self.depth < 1 or self.segment_bytes < 2 * PAGE:
            raise KvTierError(f"depth {self.depth} and segment_bytes {self.segment_bytes} are too small")
        fitting = min(self.segment_bytes, self.capacity_bytes // _MIN_SEGMENTS)
        object.__setattr__(self, "segment_bytes", fitting // PAGE * PAGE)
