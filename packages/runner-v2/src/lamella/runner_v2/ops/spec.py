"""Ops, sites and providers: which function does the work at a place in the model.

An op is a named function whose body is the reference. A layer states a site in its constructor and receives Picked:
a plain callable, unchecked on the hot path, and the packing of its weights. A provider is a set of implementations.
A fused op is an op whose reference body calls the smaller ops; the layer that owns the neighbours asks for the widest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from lamella.runner_v2.quant.scheme import WeightFormat


@dataclass(frozen=True, slots=True)
class Op:
    """A named function with its reference."""

    name: str
    reference: Callable[..., Any]
    doc: str = ""


@dataclass(frozen=True, slots=True)
class Site:
    """A place where a layer needs an op."""

    op: str
    device: str
    dtype: torch.dtype
    """Of the activations."""
    weights: tuple[WeightFormat, ...] = ()
    """Formats of the weight parts that are used here."""
    tp_size: int = 1
    params: Mapping[str, Any] = field(default_factory=dict)
    """Widths, eps, activation, window ...: whatever the op's contract names."""


class Picked(NamedTuple):
    """What a layer gets.

    pack(parts) makes named tensors of raw weights (pure; the store keeps them); bind(packed, ...) makes of those
    tensors the handle that run takes (once, at load); run is the hot path and checks nothing. pack and bind are None
    for ops without weights. What bind takes beside the packed tensors is in the op's contract.
    """

    op: str
    provider: str
    run: Callable[..., Any]
    pack: Callable[..., Mapping[str, torch.Tensor]] | None = None
    bind: Callable[..., Any] | None = None
    batch_invariant: bool = False
    """A row's bits do not depend on what else is in the batch, nor on how its prompt was cut into chunks."""
    max_num_tokens: int | None = None
    """The implementation serves up to so many tokens of a step; the table lets the next provider serve longer ones."""


class Provider(Protocol):
    """A set of implementations of ops."""

    name: str

    def supports(self, site: Site) -> str | None:
        """None if this provider can serve the site, else the reason why not."""

    def pick(self, site: Site) -> Picked:
        """The implementation for a site that supports() accepted."""
