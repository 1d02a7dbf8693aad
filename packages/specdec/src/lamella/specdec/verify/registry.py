"""Which implementation of the verifications serves a device: Triton's kernels on GPUs, torch's operations elsewhere."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import NamedTuple, Protocol

import torch

from lamella.specdec.batch import Verdict
from lamella.specdec.verify.block import verify_block
from lamella.specdec.verify.one_hot import verify_one_hot
from lamella.specdec.verify.rejection import verify_rejection
from lamella.specdec.verify.synthetic import SyntheticAcceptance

Verify = Callable[..., Verdict[torch.Tensor]]


class Synthetic(Protocol):
    """What `SyntheticAcceptance` is, on whatever device."""

    def verify(
        self,
        target_ids: torch.Tensor,  # [num_logits]
        drafts: torch.Tensor,  # [num_rows, width]
        logits_start: torch.Tensor,  # [num_rows + 1]
        accept_uniforms: torch.Tensor,  # [num_rows, width]
    ) -> Verdict[torch.Tensor]: ...


class Verifiers(NamedTuple):
    """The verifications of chains of drafts; arguments as in the torch modules of these names."""

    name: str
    """torch or triton."""
    one_hot: Verify
    rejection: Verify
    block: Verify
    synthetic: Callable[..., Synthetic]
    """(rates, device)."""


TORCH = Verifiers("torch", verify_one_hot, verify_rejection, verify_block, SyntheticAcceptance)


def verifiers(device: torch.device) -> Verifiers:
    """Those for tensors on a device. Without Triton installed a GPU has torch's, too."""
    return _on_gpu() if device.type == "cuda" else TORCH


@cache
def _on_gpu() -> Verifiers:
    if importlib.util.find_spec("triton") is None:
        return TORCH
    from lamella.specdec.verify.triton import chain, one_hot

    return Verifiers(
        "triton", one_hot.verify_one_hot, chain.verify_rejection, chain.verify_block, one_hot.SyntheticAcceptance
    )
