"""The one home of every device tensor that weights produce. Layers hold views."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lamella.runner_v2.memory import Arena


class WeightStore:
    """Named tensors in an arena. Storing under a known name writes into the same storage, so that whoever holds a view
    (a layer, a captured graph) sees the new weights."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._tensors: dict[str, torch.Tensor] = {}

    def put(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor in and return the stored one. A second put of the name asserts the same shape and type."""
        stored = self._tensors.get(name)
        if stored is None:
            stored = self.arena.empty(tensor.shape, tensor.dtype)
            self._tensors[name] = stored
        new, old = (tuple(tensor.shape), tensor.dtype), (tuple(stored.shape), stored.dtype)
        assert new == old, f"{name}: {new} into {old}"
        return stored.copy_(tensor)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        """Names, in the order in which they were stored."""
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def total_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())
