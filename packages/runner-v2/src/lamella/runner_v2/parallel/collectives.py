"""What ranks do together. A layer receives its group and never asks how many processes there are."""

from __future__ import annotations

from typing import Protocol

import torch


class Collectives(Protocol):
    """One rank's end of a group. Every rank makes the same calls in the same order."""

    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, added in rank order: every rank gets the same bits. May return x itself."""

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """The ranks' tensors, concatenated in rank order along dim."""
