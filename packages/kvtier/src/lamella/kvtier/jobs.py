"""Copies of blocks between tiers, as they cross from the control plane to whoever moves bytes, and back.

    CopyJob    ──copy──▶  mover  ──▶  TicketResult(ticket, ok)
    LookupJob  ──ask───▶  mover  ──▶  LookupResult(ticket, num_present)
    ClearJob   ──────────▶  mover                                          Presence: what stores say by themselves
    Ticket: PENDING ──▶ DONE | FAILED | CANCELLED      exactly once

A location is readable only after the ticket of the job that wrote it is DONE. Locations are free of ranks: the same
slot id in every rank's region; a ticket is done when all ranks are, failed when any is.
"""

from __future__ import annotations

from enum import Enum
from typing import Literal, NamedTuple

from lamella.kvtier.keys import Key

Tier = Literal["device", "host", "disk", "external"]
TicketId = int


class Location(NamedTuple):
    """Where one block's bytes lie."""

    tier: Tier
    group: int
    slot: int
    """Device: block id. Host: slot of the slab. Disk and external: 0, the key names the record."""
    name: str = ""
    """External: of which manager."""


class CopyJob(NamedTuple):
    """Copy one block. Source and target stay pinned until the ticket ends."""

    ticket: TicketId
    key: Key
    source: Location
    target: Location
    num_bytes: int
    after_step: int = -1
    """The source is complete, or the target no longer read, once this step has run; -1: already."""
    parent: Key | None = None
    """Key of the block before it: a store keeps it, so that its index has its tree again after a restart."""


class LookupJob(NamedTuple):
    """Ask an external manager how many of these blocks, from the first on, it has."""

    ticket: TicketId
    tier_name: str
    group: int
    keys: tuple[Key, ...]


class ClearJob(NamedTuple):
    """A store forgets everything it holds; what is in flight to it does not count either. Has no ticket."""

    tier: Tier
    name: str = ""


class TicketResult(NamedTuple):
    """How a job ended, over all ranks."""

    ticket: TicketId
    ok: bool
    error: str | None = None
    seconds: float = 0.0
    """That the tier was busy with it: of a batch, its share of the batch's time, so that sums are true."""


class LookupResult(NamedTuple):
    """Answer to a LookupJob; an error answers 0."""

    ticket: TicketId
    num_present: int
    seconds: float = 0.0


class Presence(NamedTuple):
    """What a store says about its content beside tickets: found at the start, reclaimed, written by another process."""

    tier: Tier
    name: str
    added: tuple[tuple[int, Key, Key | None], ...] = ()
    """(group, key, parent), parents first."""
    removed: tuple[tuple[int, Key], ...] = ()


Job = CopyJob | LookupJob | ClearJob
"""What the control plane hands to whoever moves bytes, in order."""

TierEvent = TicketResult | LookupResult | Presence
"""What it gets back."""


class TicketState(Enum):
    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Ticket:
    """Handle of one copy in flight. It ends exactly once; a second end is a broken invariant."""

    __slots__ = ("error", "job", "state")

    def __init__(self, job: CopyJob) -> None:
        self.job = job
        self.state = TicketState.PENDING
        self.error: str | None = None

    @property
    def readable(self) -> bool:
        """Whether the target's bytes may be read."""
        return self.state is TicketState.DONE

    def complete(self, result: TicketResult) -> None:
        """End as DONE or FAILED. What is unknown counts as failed: then the caller recomputes."""
        assert result.ticket == self.job.ticket, f"result of ticket {result.ticket} given to {self.job.ticket}"
        self._end(TicketState.DONE if result.ok else TicketState.FAILED)
        self.error = result.error

    def cancel(self) -> None:
        """End without a result: the job was never started."""
        self._end(TicketState.CANCELLED)

    def _end(self, state: TicketState) -> None:
        assert self.state is TicketState.PENDING, f"ticket {self.job.ticket} ends twice: {self.state} then {state}"
        self.state = state
