"""Brings what steps chose to the host, while later ones run."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch


class HostResult(NamedTuple):
    """Small results of a step on the host."""

    ids: npt.NDArray[np.int32]  # [L] chosen at each logits row
    statuses: npt.NDArray[np.uint8]  # [L] see sampling/rows.py
    num_accepted: npt.NDArray[np.int32]  # [S] drafts that stand, per sampling row
    next_ids: npt.NDArray[np.int32]  # [S]


class OutputCopy:
    """A copy that was started behind its step and is read late. On a CPU there is nothing to wait for; the result is a
    copy all the same, because its reader changes it."""

    def __init__(
        self,
        ids: torch.Tensor,  # [L]
        statuses: torch.Tensor,  # [L]
        num_accepted: torch.Tensor | None = None,  # [S]
        next_ids: torch.Tensor | None = None,  # [S]
    ) -> None:
        """Begin to copy. Without the last two no row checked drafts, and ids are what comes next."""
        tensors = (
            (ids, statuses) if num_accepted is None or next_ids is None else (ids, statuses, num_accepted, next_ids)
        )
        self._event: torch.Event | None = None
        if ids.is_cuda:
            self._copies = tuple(_to_pinned(t) for t in tensors)
            self._event = torch.Event(ids.device)
            self._event.record()
        else:
            self._copies = tuple(t.clone() for t in tensors)

    def wait(self) -> HostResult:
        """The result, once it is there."""
        if self._event is not None:
            self._event.synchronize()
        ids, statuses, *drafted = (t.numpy() for t in self._copies)
        num_accepted, next_ids = drafted if drafted else (np.zeros(len(ids), np.int32), ids.copy())
        return HostResult(ids, statuses, num_accepted, next_ids)


def _to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
