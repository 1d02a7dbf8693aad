"""How the host changes what lies on a device between steps: rows' ids, lengths, block tables, sampling parameters.

    put, put, put ...       while a step is prepared
    flush                   before it is launched: one copy over the link, one kernel per tensor that changes

Nothing waits for the device. On a CPU there is nothing to gather, and every put is a plain assignment.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int32]

_SPAN_FROM = 1024
"""Values of a segment from which it is copied as it lies: a place for each triples what goes over the link."""


class Writes(Protocol):
    """Changes of persistent int32 tensors, which are contiguous."""

    def put(self, target: torch.Tensor, start: int, values: Sequence[int] | npt.NDArray[np.integer[Any]]) -> None:
        """target.view(-1)[start : start + len(values)] = values, at the next flush at the latest."""

    def flush(self) -> None:
        """From now on whoever follows on the device's current stream sees what was put."""

    def upload(self, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
        """Arrays on the device, in one copy; their memory here may be reused at once."""


class DirectWrites:
    """For tensors in the host's memory."""

    def put(self, target: torch.Tensor, start: int, values: Sequence[int] | npt.NDArray[np.integer[Any]]) -> None:
        target.view(-1).numpy()[start : start + len(values)] = values

    def flush(self) -> None:
        return

    def upload(self, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
        return [torch.from_numpy(array) for array in arrays]


class StagedWrites:
    """For a device that runs behind the host."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._pinned = self._device.type == "cuda"
        self._pending: dict[int, _Pending] = {}
        """By address of the target."""

    def put(self, target: torch.Tensor, start: int, values: Sequence[int] | npt.NDArray[np.integer[Any]]) -> None:
        if not len(values):
            return
        pending = self._pending.get(target.data_ptr())
        if pending is None:
            pending = self._pending[target.data_ptr()] = _Pending(target.view(-1))
        pending.add(start, np.asarray(values, np.int32))

    def flush(self) -> None:
        if not self._pending:
            return
        found = list(self._pending.values())
        self._pending.clear()
        arrays: list[npt.NDArray[Any]] = []
        moves: list[tuple[torch.Tensor, bool]] = []  # in order; whether the values come with a place for each
        for pending in found:
            target = pending.target
            for starts, parts in pending.rounds():
                if len(parts) == 1 and len(parts[0]) >= _SPAN_FROM:
                    moves.append((target.narrow(0, starts[0], len(parts[0])), False))
                    arrays.append(parts[0])
                    continue
                lens = np.fromiter((len(part) for part in parts), np.int64, len(parts))
                ends = np.cumsum(lens)
                # place in the tensor, less the place among the values: the same for all of a segment
                shifts = np.repeat(np.asarray(starts, np.int64) - (ends - lens), lens)
                arrays += [shifts + np.arange(ends[-1]), np.concatenate(parts)]
                moves.append((target, True))
        tensors = iter(self.upload(arrays))
        for target, scattered in moves:
            if scattered:
                target.index_copy_(0, next(tensors), next(tensors))
            else:
                target.copy_(next(tensors))

    def upload(self, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
        sizes = [-(-array.nbytes // 16) * 16 for array in arrays]  # so that any type may follow any other
        total = sum(sizes)
        # memory that torch's allocator does not hand out again before the copy has been made
        staged = torch.empty(total, dtype=torch.uint8, pin_memory=self._pinned)
        raw = staged.numpy()
        end = 0
        places = []
        for array, size in zip(arrays, sizes):
            raw[end : end + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            places.append(end)
            end += size
        on_device = staged.to(self._device, non_blocking=True)
        typed: dict[np.dtype[Any], torch.Tensor] = {}
        found = []
        for array, place in zip(arrays, places):
            whole = typed.get(array.dtype)
            if whole is None:
                whole = typed[array.dtype] = on_device.view(torch.from_numpy(array[:0]).dtype)
            part = whole.narrow(0, place // array.itemsize, array.size)
            found.append(part if array.ndim == 1 else part.view(array.shape))
        return found


class _Pending:
    """Segments that wait to be written into one tensor, in the order of put."""

    def __init__(self, target: torch.Tensor) -> None:
        self.target = target
        self._starts: list[int] = []
        self._parts: list[Ints] = []

    def add(self, start: int, values: Ints) -> None:
        self._starts.append(start)
        self._parts.append(values)

    def rounds(self) -> list[tuple[list[int], list[Ints]]]:
        """Segments that may be written in any order, and those that must come behind them: within one kernel the order
        of writes is not known. A long segment is a round of its own."""
        ends = [start + len(part) for start, part in zip(self._starts, self._parts)]
        order = sorted(range(len(ends)), key=self._starts.__getitem__)
        if all(ends[a] <= self._starts[b] for a, b in pairwise(order)):
            long = [i for i in order if ends[i] - self._starts[i] >= _SPAN_FROM]
            short = [i for i in order if ends[i] - self._starts[i] < _SPAN_FROM]
            together = [short] if short else []
            return [
                ([self._starts[i] for i in places], [self._parts[i] for i in places])
                for places in [*([i] for i in long), *together]
            ]
        return [([start], [part]) for start, part in zip(self._starts, self._parts)]
