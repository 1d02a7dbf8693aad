"""Brings what a step chose to the host."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch


class HostResult(NamedTuple):
    """Small results of a step on the host."""

    ids: npt.NDArray[np.int32]  # [L] chosen at each logits row
    num_accepted: npt.NDArray[np.int32]  # [S] drafts that stand, per sampling row
    next_ids: npt.NDArray[np.int32]  # [S]


class OutputCopy:
    """Copies that are started early and read late. On a CPU there is nothing to wait for; the result is a copy all the
    same, because its reader changes it."""

    def start(self, ids: torch.Tensor, num_accepted: torch.Tensor, next_ids: torch.Tensor) -> None:
        """Begin to copy. One copy at a time."""
        self._pending = tuple(t.to("cpu", copy=True, non_blocking=True) for t in (ids, num_accepted, next_ids))
        self._event = torch.Event(ids.device) if ids.is_cuda else None
        if self._event is not None:
            self._event.record()

    def wait(self) -> HostResult:
        """The result of the last start()."""
        if self._event is not None:
            self._event.synchronize()
        ids, num_accepted, next_ids = (t.numpy() for t in self._pending)
        return HostResult(ids, num_accepted, next_ids)
