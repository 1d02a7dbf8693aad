"""What a disk store counts since it was opened."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class StoreCounts:
    reads: int = 0
    """That gave the bytes asked for."""
    writes: int = 0
    duplicates: int = 0
    """Writes of what was there already."""
    bytes_read: int = 0
    """Of blocks, headers and padding not counted."""
    bytes_written: int = 0
    absent: int = 0
    """Reads of what was not there."""
    faults: Counter[str] = field(default_factory=Counter)
    """Records, segments and checkpoints that were not what they should be, and failed transfers, by kind."""
    refused: Counter[str] = field(default_factory=Counter)
    """Writes that were not tried or did not succeed, by reason."""
    moved: int = 0
    """Records copied forward."""
    dropped: int = 0
    """Records that left the index."""
    reclaimed: int = 0
    """Segments."""
    cuts: int = 0
    """Segments that ended in something else than a whole record."""
