"""Contract of `logits`: final norm and language model head.

Site: weights = the head's format; params:
    hidden, vocab   widths of this rank's head [vocab, hidden]
    eps, plus_one   of the final norm
    softcap         logits become softcap * tanh(logits / softcap), or None
    tied            the head is the embedding table

    pack([final_norm]) or pack([final_norm, head]) -> named tensors, the norm under the name "norm"
    bind(packed) -> handle    packed has the norm, and the head either from this op's pack or, if tied, from the same
                              provider's `embed`
    run(hidden [L, hidden], handle) -> [L, vocab], a fresh tensor: float32, or on a device the activations' bfloat16, as
                              the product leaves it
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from lamella.runner_v2.ops.norm import rms_norm
from lamella.runner_v2.ops.spec import Op


class DenseHead(NamedTuple):
    """Handle of the reference."""

    norm: torch.Tensor  # [hidden] float32
    weight: torch.Tensor  # [vocab, hidden]
    eps: float
    plus_one: bool
    softcap: float | None


def logits(hidden: torch.Tensor, handle: DenseHead) -> torch.Tensor:
    """softcap(rms_norm(hidden) @ head^T), float32."""
    normed = rms_norm(hidden, handle.norm, handle.eps, handle.plus_one)
    out = F.linear(normed.to(handle.weight.dtype), handle.weight).float()
    if handle.softcap is not None:
        out = torch.tanh(out / handle.softcap) * handle.softcap
    return out


LOGITS = Op("logits", logits, "final norm and language model head")
