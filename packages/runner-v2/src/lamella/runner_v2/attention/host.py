"""Native attention over the paged cache, for CPUs.

Scores and softmax are float32 whatever the cache's type. Keys are walked in tiles at absolute positions, so that a
query's result depends neither on the other rows of the batch nor on how its prompt was cut into chunks.
Importing this module fails with ImportError where the native module was not built.
"""

from __future__ import annotations

import torch

from lamella.runner_v2 import _C
from lamella.runner_v2.attention.metadata import AttentionLimits
from lamella.runner_v2.inputs import InputBatch, LayerCache


class HostAttention:
    """AttentionBackend over the host kernels. Its plans borrow the batch's tensors."""

    name = "host"
    batch_invariant = True

    def __init__(self) -> None:
        self._windows: tuple[int | None, ...] = ()
        self._native: _C.Attention | None = None

    def supports(self, limits: AttentionLimits) -> str | None:
        if torch.device(limits.device).type != "cpu":
            return f"device {limits.device}"
        if limits.dtype != torch.float32:
            return f"activations are {limits.dtype}, not float32"
        if limits.kv_dtype not in (torch.float16, torch.float32):
            return f"cache of {limits.kv_dtype}"
        if limits.block_size & (limits.block_size - 1):
            return f"block_size {limits.block_size} is not a power of two"
        if limits.head_dim > _C.MAX_HEAD_DIM:
            return f"head_dim {limits.head_dim} above {_C.MAX_HEAD_DIM}"
        return None

    def bind(self, limits: AttentionLimits) -> None:
        self._windows = limits.windows
        self._native = _C.Attention(
            limits.num_heads, limits.num_kv_heads, limits.head_dim, limits.scale, limits.softcap or 0.0
        )

    def plan(self, batch: InputBatch, group_idx: int, lane: int = 0) -> _C.Plan:
        """The batch's tensors must stay as they are while the plan is used."""
        return _C.Plan(
            batch.positions,
            batch.query_start,
            batch.seq_lens,
            batch.block_tables[group_idx],
            batch.slot_mapping[group_idx],
            self._windows[group_idx] or 0,
        )

    def write(self, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, plan: _C.Plan) -> None:
        self._bound.write(k, v, cache.k, cache.v, plan)

    def run(
        self,
        q: torch.Tensor,  # [T, num_heads, head_dim]
        k: torch.Tensor | None,  # [T, num_kv_heads, head_dim]
        v: torch.Tensor | None,
        cache: LayerCache,
        plan: _C.Plan,
        out: torch.Tensor,  # [T, num_heads, head_dim]
        lse: torch.Tensor | None = None,  # [T, num_heads]
    ) -> None:
        if k is not None and v is not None:
            self.write(k, v, cache, plan)
        self._bound.run(q, cache.k, cache.v, plan, out, lse)

    @property
    def _bound(self) -> _C.Attention:
        assert self._native is not None, "bind() comes before write() and run()"
        return self._native
