"""Groups of ranks: one rank alone, and several ranks that are threads of one process."""

from __future__ import annotations

import threading
from functools import reduce

import torch

from lamella.runner_v2.errors import ConfigError


class SoloGroup:
    """A group of one: nothing to exchange."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return x


class ThreadGroup:
    """One rank's end of a group whose ranks are threads of this process.

    Each call has two meetings: all have put their tensor on the table; all have read what they need. A rank that does
    not come within timeout_s breaks the group, and every rank's call raises threading.BrokenBarrierError.
    """

    def __init__(self, rank: int, table: list[torch.Tensor | None], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.size = len(table)
        self._table = table
        self._barrier = barrier

    @classmethod
    def create(cls, size: int, timeout_s: float = 60.0) -> list[ThreadGroup]:
        """The ends of a new group, in rank order; each goes to a thread of its own."""
        if size < 1:
            raise ConfigError(f"a group has at least one rank, not {size}")
        table: list[torch.Tensor | None] = [None] * size
        barrier = threading.Barrier(size, timeout=timeout_s)
        return [cls(rank, table, barrier) for rank in range(size)]

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return reduce(torch.add, self._exchange(x))

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat(self._exchange(x), dim=dim)

    def abort(self) -> None:
        """Break the group: this rank will not come to another meeting."""
        self._barrier.abort()

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._table[self.rank] = x.clone()
        self._barrier.wait()
        tensors = [tensor for tensor in self._table if tensor is not None]
        self._barrier.wait()
        return tensors
