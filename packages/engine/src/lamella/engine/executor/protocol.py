"""What the engine core asks of the workers, in process or not. One language for one rank and for many.

    open ─▶ RankReports ─▶ allocate ─▶ submit, provide, copy ─▶ poll ─▶ … ─▶ close

Steps run in the order of submit and end in that order. Copies are independent of steps: an idle engine with one
loading request must still get its tickets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from lamella.kvtier import Job, TierEvent
from lamella.runner_v2.step import Common, KvLayout, Mask, RankReport, Step, StepOutput


class RankDied(NamedTuple):
    """A worker is gone: the engine cannot go on."""

    rank: int
    reason: str


class Events(NamedTuple):
    """What poll() brought."""

    outputs: Sequence[StepOutput] = ()
    """In the order of submit."""
    tickets: Sequence[TierEvent] = ()
    """How copies ended, and what else the tiers tell. Those of copies that a step waited for come no later than its
    output."""
    died: RankDied | None = None


class Executor(Protocol):
    """All ranks of one replica."""

    depth: int
    """Most steps in flight."""

    def open(self) -> tuple[RankReport, ...]:
        """Load the model on every rank. KV groups and free bytes are known before KV is allocated."""

    def allocate(self, layout: KvLayout) -> None:
        """Allocate the KV cache on every rank."""

    def submit(self, step: Step) -> None:
        """Start a step; at most `depth` are in flight. Returns before it has run, where the executor can."""

    def provide(self, step_id: int, masks: Sequence[Mask]) -> None:
        """Masks for rows of a submitted step; only its sampling waits for them."""

    def copy(self, jobs: Sequence[Job]) -> None:
        """Start copies of blocks between tiers; each ends in one ticket. Steps submitted later wait for those that
        write device blocks."""

    def call(self, method: str, args: Mapping[str, Any]) -> list[Any]:
        """An operation on every rank; no step may be in flight. One answer per rank."""

    def poll(self, timeout_s: float | None) -> Events:
        """What has ended. Waits up to timeout_s (None: as long as it takes) for the first, if anything is under way."""

    def close(self) -> None:
        """End the workers. Steps in flight are lost."""


class Rendezvous(Protocol):
    """Where replicas in lock-step agree on the shape of their next step."""

    def agree(self, local: Common) -> Common:
        """Called once per step, between plan and submit; every replica gets the same answer."""


class Alone:
    """The rendezvous of a replica that is not in lock-step with others."""

    def agree(self, local: Common) -> Common:
        """What one replica wants is what all want."""
        return local
