"""The seam between layers and attention over the paged KV cache.

    backend.bind(limits)                    once, before the first step: allocate plan buffers
    plan = backend.plan(batch, group_idx)   once per step and group
    backend.write(k, v, cache, plan)        per layer: put this step's keys and values into their slots
    backend.run(q, None, None, cache, plan, out)

Writing and reading are separate calls, so that fused or grouped writes stay possible.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from lamella.runner_v2.attention.metadata import AttentionLimits
from lamella.runner_v2.inputs import InputBatch, LayerCache


class AttentionBackend(Protocol):
    """Attention of queries over their own row's keys and values, causal, in the slots of a group's cache."""

    name: str
    batch_invariant: bool
    """A query's result does not depend on the other rows of the batch, nor on how its prompt was cut into chunks."""

    def supports(self, limits: AttentionLimits) -> str | None:
        """None if this backend can serve such a model, else the reason why not."""

    def bind(self, limits: AttentionLimits) -> None:
        """Take the fixed sizes and allocate what plans need."""

    def plan(self, batch: InputBatch, group_idx: int, lane: int = 0) -> Any:
        """Prepare a step for one group. The plan is valid until the next plan for the same group and lane.

        A plan has an attribute `positions` ([T] int32, the batch's own), so that a layer needs nothing but its plan.
        """

    def write(self, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, plan: Any) -> None:
        """Put k and v ([T, num_kv_heads, head_dim]) into the batch's slots; tokens with slot -1 are left out."""

    def run(
        self,
        q: torch.Tensor,  # [T, num_heads, head_dim], rotated
        k: torch.Tensor | None,  # [T, num_kv_heads, head_dim], rotated: written first; None: already written
        v: torch.Tensor | None,
        cache: LayerCache,
        plan: Any,
        out: torch.Tensor,  # [T, num_heads, head_dim], written
        lse: torch.Tensor | None = None,  # [T, num_heads] float32, written: natural log of the sum of exponentials
    ) -> None:
        """Attention of every token of the batch over [max(0, p - window + 1), p] of its row."""
