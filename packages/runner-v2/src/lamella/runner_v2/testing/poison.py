"""Fresh memory full of NaN, so that reading what nobody has written cannot go unseen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_INTEGER = -0x5A5A


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a tensor with NaN, or with a number that no index should have."""
    if tensor.is_floating_point():
        return tensor.fill_(torch.nan)
    if tensor.dtype in (torch.int16, torch.int32, torch.int64):
        return tensor.fill_(_INTEGER)
    return tensor


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside, torch.empty and its kin return poisoned tensors. Not for several threads at once."""

    def poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def make_poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
            return poison(make(*args, **kwargs))

        return make_poisoned

    places = ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty"))
    originals = [getattr(owner, name) for owner, name in places]
    try:
        for (owner, name), original in zip(places, originals, strict=True):
            setattr(owner, name, poisoned(original))
        yield
    finally:
        for (owner, name), original in zip(places, originals, strict=True):
            setattr(owner, name, original)
