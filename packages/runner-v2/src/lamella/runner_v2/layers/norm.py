"""RMSNorm, alone and behind a partial sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from lamella.runner_v2.layers.materials import Materials
from lamella.runner_v2.ops.spec import Picked
from lamella.runner_v2.weights.slots import RawPart, Slot


def pack_norm(parts: Sequence[RawPart]) -> dict[str, torch.Tensor]:
    """A norm's weight is float32 whatever the checkpoint stores."""
    return {"weight": parts[0].data.float()}


class _Weight:
    """The weight of a norm and its slot."""

    def __init__(self, materials: Materials, key: str) -> None:
        part = materials.parts[key]
        self.width = part.shape[0]
        self.tensor = torch.empty(0)
        self.slot = Slot(key, (part,), pack_norm, self._take)

    def _take(self, packed: Mapping[str, torch.Tensor]) -> None:
        self.tensor = packed["weight"]


class Norm:
    """RMSNorm over the last dimension."""

    def __init__(self, materials: Materials, key: str) -> None:
        config = materials.config
        self._weight = _Weight(materials, key)
        params = {"width": self._weight.width, "eps": config.norm_eps, "plus_one": config.norm_plus_one}
        self._run = materials.table.pick(materials.site("rms_norm", params)).run

    def slots(self) -> list[Slot]:
        return [self._weight.slot]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:  # [..., width]
        out: torch.Tensor = self._run(x, self._weight.tensor)
        return out


class ReduceAdd:
    """The end of a block: sum the ranks' partial sums, norm them where the model does, add the residual stream."""

    def __init__(self, materials: Materials, post_norm: Norm | None) -> None:
        self._group = materials.group
        self._post_norm = post_norm

    def slots(self) -> list[Slot]:
        return [] if self._post_norm is None else self._post_norm.slots()

    def __call__(self, partial: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:  # [T, hidden]
        return residual + self.reduce(partial)

    def reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """The block's whole contribution to the residual stream."""
        delta = self._group.all_reduce(partial)
        return delta if self._post_norm is None else self._post_norm(delta)


class ReduceAddNorm:
    """The end of one block and the norm of the next one."""

    def __init__(self, materials: Materials, key: str, post_norm: Norm | None, add_norm: Picked) -> None:
        """add_norm: the picked add_rms_norm."""
        self._reduce = ReduceAdd(materials, post_norm)
        self._weight = _Weight(materials, key)
        self._run = add_norm.run

    def slots(self) -> list[Slot]:
        return [*self._reduce.slots(), self._weight.slot]

    def __call__(
        self, partial: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:  # [T, hidden] each
        """(norm of the new residual stream, the new residual stream)"""
        normed, added = self._run(self._reduce.reduce(partial), residual, self._weight.tensor)
        return normed, added
