"""In which order sequences are served, and who gives way. A policy turns a request into a key; less is sooner.

The key decides who is admitted next, whose prompt gets the budget first, and who is preempted: the greatest.
"""

from __future__ import annotations

from typing import Final, Protocol

from lamella.engine.scheduler.config import PolicyName

Key = tuple[int, ...]


class Policy(Protocol):
    """An order of sequences."""

    def key(self, priority: int, arrival: int, index: int) -> Key:
        """Of a request's index-th sequence; arrival: the how-manieth request it was."""

    def displaces(self, waiting: Key, running: Key) -> bool:
        """Whether a waiting sequence takes the place of a running one where there is no room for both."""


class Fcfs:
    """First come, first served; nobody is displaced by somebody who waits."""

    def key(self, priority: int, arrival: int, index: int) -> Key:
        return (arrival, index)

    def displaces(self, waiting: Key, running: Key) -> bool:
        return False


class ByPriority:
    """Lower priority value first, then first come; a better value displaces a worse one, never an equal one."""

    def key(self, priority: int, arrival: int, index: int) -> Key:
        return (priority, arrival, index)

    def displaces(self, waiting: Key, running: Key) -> bool:
        return waiting[0] < running[0]


POLICIES: Final[dict[PolicyName, Policy]] = {"fcfs": Fcfs(), "priority": ByPriority()}
