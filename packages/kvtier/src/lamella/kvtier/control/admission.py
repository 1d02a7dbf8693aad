"""Whether a sealed block is worth a slot of the host tier.

A tail that is never asked for again costs a copy and may push out what is asked for. But a block that is not kept on
its first use cannot be hit on its second: admission costs a sequence's first repetition, and saves the tier from noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from lamella.kvtier.errors import LayoutError
from lamella.kvtier.keys import Key


@dataclass(frozen=True, slots=True)
class AdmissionPlan:
    """Which blocks the tier takes in. Raises LayoutError for values out of range."""

    mode: Literal["all", "reused"] = "all"
    """reused: only blocks that are computed or hit the second time."""
    always_blocks: int = 0
    """With reused: the first blocks of every sequence are taken in at once, since many may share them."""
    headroom: float = 0.0
    """With reused: while more than this share of the slots is empty, everything is taken in. 0: never."""
    recent_keys: int = 65_536
    """With reused: how many blocks are remembered as seen, at least; at most twice as many."""
    max_tenant_share: float = 1.0
    """Share of the tier's bytes that the blocks of one tenant may take."""

    def __post_init__(self) -> None:
        if self.mode not in ("all", "reused"):
            raise LayoutError(f"admission must be all or reused, got {self.mode!r}")
        if self.always_blocks < 0 or self.recent_keys < 1:
            raise LayoutError(f"admission: always_blocks {self.always_blocks}, recent_keys {self.recent_keys}")
        if not (0.0 <= self.headroom <= 1.0 and 0.0 < self.max_tenant_share <= 1.0):
            raise LayoutError(
                f"admission: headroom {self.headroom} must be in [0, 1], "
                f"max_tenant_share {self.max_tenant_share} in (0, 1]"
            )


class Admission(Protocol):
    """Judges each block of each sequence once, in order."""

    def wants(self, key: Key, position: int, reused: bool, empty_share: float) -> bool:
        """position: of the block in its sequence, in blocks. reused: it was a hit. empty_share: of the tier's slots."""
        ...

    def note(self, key: Key) -> None:
        """The block was used, but is not asked for: one before it was refused."""
        ...


class AdmitAll:
    """Everything."""

    def wants(self, key: Key, position: int, reused: bool, empty_share: float) -> bool:
        return True

    def note(self, key: Key) -> None:
        pass


class AdmitReused:
    """What was used before, the first blocks of a sequence, and anything while the tier has room."""

    def __init__(self, plan: AdmissionPlan) -> None:
        self._always_blocks = plan.always_blocks
        self._headroom = plan.headroom or 2.0
        self._seen = RecentKeys(plan.recent_keys)

    def wants(self, key: Key, position: int, reused: bool, empty_share: float) -> bool:
        again = self._seen.note(key)
        return again or reused or position < self._always_blocks or empty_share > self._headroom

    def note(self, key: Key) -> None:
        self._seen.note(key)


class RecentKeys:
    """A bounded memory of keys: two generations, of which the older is forgotten as a whole."""

    __slots__ = ("_max_keys", "_old", "_young")

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._young: set[bytes] = set()
        self._old: set[bytes] = set()

    def note(self, key: Key) -> bool:
        """Remember a key; whether it was remembered already. Eight bytes stand for it: a rare mistake admits a block
        too early, nothing else."""
        short = key[:8]
        if short in self._young:
            return True
        again = short in self._old
        self._young.add(short)
        if len(self._young) >= self._max_keys:
            self._old, self._young = self._young, set()
        return again

    def __len__(self) -> int:
        return len(self._young) + len(self._old)


def make_admission(plan: AdmissionPlan) -> Admission:
    """The object that the plan describes."""
    return AdmitAll() if plan.mode == "all" else AdmitReused(plan)
