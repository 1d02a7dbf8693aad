"""What lies below the device: sizes, policies and limits, resolved."""

from __future__ import annotations

from dataclasses import dataclass, field

from lamella.kvtier.control.admission import AdmissionPlan
from lamella.kvtier.control.cost import CostModel
from lamella.kvtier.control.eviction.registry import POLICIES
from lamella.kvtier.errors import LayoutError

RESERVED = ("device", "host", "disk")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPlan:
    """Raises LayoutError for values out of range."""

    host_slots: tuple[int, ...]
    """Per group: groups have blocks of different sizes, so each has slots of its own size."""
    eviction: str = "lru"
    """Of the host tier: lru or s3fifo."""
    admission: AdmissionPlan = field(default_factory=AdmissionPlan)
    """Into the host tier."""
    has_disk: bool = False
    externals: tuple[str, ...] = ()
    """Names of external managers, in the order in which they are asked."""
    max_demoting: int = 4096
    """Copies from the device to the host in flight."""
    max_storing: int = 256
    """Copies from the host to one slower tier in flight."""
    max_waiting: int = 65_536
    """Blocks that wait for such a copy; what comes beyond is not stored."""
    max_storing_share: float = 0.5
    """Share of a group's host slots that are kept from being evicted before they are stored."""
    max_loading_share: float = 0.5
    """Share of a group's host slots that waiting sequences' loads may hold."""
    cost: CostModel = field(default_factory=CostModel)

    def __post_init__(self) -> None:
        if min(self.host_slots, default=0) < 1:
            raise LayoutError(f"every group needs a host slot, got {self.host_slots}")
        if min(self.max_demoting, self.max_storing, self.max_waiting) < 1:
            raise LayoutError("max_demoting, max_storing and max_waiting must be at least 1")
        for name in ("max_storing_share", "max_loading_share"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise LayoutError(f"{name} must be in (0, 1], got {getattr(self, name)}")
        if self.eviction not in POLICIES:
            raise LayoutError(f"eviction {self.eviction!r} is none of {', '.join(POLICIES)}")
        if len(set(self.externals)) < len(self.externals) or set(self.externals) & set(RESERVED):
            raise LayoutError(f"external managers need names of their own, got {self.externals}")

    @property
    def slow_tiers(self) -> tuple[str, ...]:
        """Names of what lies below the host, fastest first."""
        return (("disk",) if self.has_disk else ()) + self.externals
