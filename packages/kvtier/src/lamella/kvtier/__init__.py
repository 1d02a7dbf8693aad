"""KV cache blocks on tiers: pool, chained keys, prefix index and the books of every copy.

    manager = TierManager(Layout((Group("full", "full", block_size=16, bytes_per_block=1024),), (1024,)))

The control plane is pure Python, deterministic and free of clocks, threads, files and torch.
"""

from lamella.kvtier.control.admission import AdmissionPlan
from lamella.kvtier.control.cost import CostModel
from lamella.kvtier.control.manager import Acquired, Growth, TierManager
from lamella.kvtier.control.plan import TierPlan
from lamella.kvtier.control.prefetch import LoadState
from lamella.kvtier.errors import CapacityError, ExternalManagerError, KvTierError, LayoutError, TierConfigError
from lamella.kvtier.jobs import (
    ClearJob,
    CopyJob,
    Job,
    Location,
    LookupJob,
    LookupResult,
    Presence,
    Ticket,
    TicketResult,
    TicketState,
    TierEvent,
)
from lamella.kvtier.keys import Extras, Key, KeyChain, Media
from lamella.kvtier.layout import NULL_BLOCK, Group, Layout
from lamella.kvtier.stats import TierStats

__all__ = [
    "NULL_BLOCK",
    "Acquired",
    "AdmissionPlan",
    "CapacityError",
    "ClearJob",
    "CopyJob",
    "CostModel",
    "ExternalManagerError",
    "Extras",
    "Group",
    "Growth",
    "Job",
    "Key",
    "KeyChain",
    "KvTierError",
    "Layout",
    "LayoutError",
    "LoadState",
    "Location",
    "LookupJob",
    "LookupResult",
    "Media",
    "Presence",
    "Ticket",
    "TicketResult",
    "TicketState",
    "TierConfigError",
    "TierEvent",
    "TierManager",
    "TierPlan",
    "TierStats",
]
