"""Reference attention over the paged KV cache, in torch.

                 first = max(0, first query - window + 1)             seq_len
    row's keys   |  left of the window, null or stale  [  gathered    )  |  stale: masked, values zeroed

Keys and values are gathered block by block. Rows with equally few queries (decode, drafts) and similar lengths are
computed together; a long prompt chunk goes by itself, in tiles of queries, which bounds the scores held at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch

from lamella.runner_v2.attention.metadata import AttentionLimits, PagedPlan, QueryTile
from lamella.runner_v2.inputs import InputBatch, LayerCache

_MAX_SCORES = 1 << 22
"""Scores held at a time, over all heads."""
_SHORT_QUERY = 16
"""Up to so many queries of a row are computed together with those of other rows."""


class PagedAttention:
    """Torch reference of the AttentionBackend protocol.

    With batch_invariant every query is computed by itself, over a copy of exactly the keys that it sees: shapes, and so
    bits, depend on its position alone.
    """

    name = "torch"

    def __init__(self, batch_invariant: bool = False) -> None:
        self.batch_invariant = batch_invariant
        self._limits: AttentionLimits | None = None

    def supports(self, limits: AttentionLimits) -> str | None:
        return None

    def bind(self, limits: AttentionLimits) -> None:
        self._limits = limits

    def plan(self, batch: InputBatch, group_idx: int, lane: int = 0) -> PagedPlan:
        """Plans own their tensors here, so every lane is free."""
        limits = self._bound
        slots = batch.slot_mapping[group_idx]
        written = None
        if bool((slots < 0).any()):
            written = torch.nonzero(slots >= 0).squeeze(1)
            slots = slots[written]
        plan = PagedPlan(
            positions=batch.positions,
            window=limits.windows[group_idx],
            written=written,
            block_idx=torch.div(slots, limits.block_size, rounding_mode="floor"),
            block_offset=slots % limits.block_size,
            tables=batch.block_tables[group_idx].long(),
            query_start=batch.query_start.tolist(),
            seq_lens=batch.seq_lens.tolist(),
            tiles=[],
        )
        if not self.batch_invariant:
            plan.tiles.extend(self._tiles(plan))
        return plan

    def write(self, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, plan: PagedPlan) -> None:
        if plan.written is not None:
            k, v = k[plan.written], v[plan.written]
        cache.k[plan.block_idx, :, plan.block_offset] = k.to(cache.k.dtype)
        cache.v[plan.block_idx, :, plan.block_offset] = v.to(cache.v.dtype)

    def run(
        self,
        q: torch.Tensor,  # [T, num_heads, head_dim]
        k: torch.Tensor | None,  # [T, num_kv_heads, head_dim]
        v: torch.Tensor | None,
        cache: LayerCache,
        plan: PagedPlan,
        out: torch.Tensor,  # [T, num_heads, head_dim]
        lse: torch.Tensor | None = None,  # [T, num_heads]
    ) -> None:
        if k is not None and v is not None:
            self.write(k, v, cache, plan)
        if self.batch_invariant:
            self._run_singly(q, cache, plan, out, lse)
            return
        for tile in plan.tiles:
            # [G, num_kv_heads, keys, head_dim]
            keys, values = (_gather(pool, tile.blocks).float() for pool in cache)
            values = values.masked_fill(~tile.key_mask[:, None, :, None], 0.0)
            result, sums = self._attend(q[tile.tokens].float(), keys, values, tile.mask)
            out[tile.tokens] = result.to(out.dtype)
            if lse is not None:
                lse[tile.tokens] = sums

    @property
    def _bound(self) -> AttentionLimits:
        assert self._limits is not None, "bind() comes before plan() and run()"
        return self._limits

    def _tiles(self, plan: PagedPlan) -> Iterator[QueryTile]:
        """The step's queries, short rows of one query length and similar sequence lengths together."""
        together: dict[int, list[int]] = defaultdict(list)
        for row, seq_len in enumerate(plan.seq_lens):
            start, end = plan.query_start[row], plan.query_start[row + 1]
            if end - start > _SHORT_QUERY:
                most = max(1, _MAX_SCORES // (self._bound.num_heads * seq_len))
                for lo in range(start, end, most):
                    yield self._tile(plan, [row], lo - start, min(most, end - lo))
            elif end > start:
                together[end - start].append(row)
        for num_queries, rows in together.items():
            rows.sort(key=lambda row: plan.seq_lens[row])
            group: list[int] = []
            for row in rows:
                scores = (len(group) + 1) * self._bound.num_heads * num_queries * plan.seq_lens[row]
                if group and (scores > _MAX_SCORES or plan.seq_lens[row] > 2 * plan.seq_lens[group[0]] + 64):
                    yield self._tile(plan, group, 0, num_queries)
                    group = []
                group.append(row)
            yield self._tile(plan, group, 0, num_queries)

    def _tile(self, plan: PagedPlan, rows: list[int], first_query: int, num_queries: int) -> QueryTile:
        """num_queries of each row, from its first_query-th on."""
        block_size, device = self._bound.block_size, plan.tables.device

        def ints(values: Iterable[int]) -> torch.Tensor:
            return torch.tensor(list(values), dtype=torch.int64, device=device)

        def upto(end: int) -> torch.Tensor:
            return torch.arange(end, device=device)

        starts = ints(plan.query_start[row] for row in rows)
        query_lens = ints(plan.query_start[row + 1] - plan.query_start[row] for row in rows)
        seq_lens = ints(plan.seq_lens[row] for row in rows)
        queries = first_query + upto(num_queries)
        tokens = starts[:, None] + queries
        positions = (seq_lens - query_lens)[:, None] + queries  # [G, num_queries]
        first_block = torch.zeros_like(starts)
        if plan.window is not None:
            first_block = (positions[:, 0] - plan.window + 1).clamp_(min=0) // block_size
        num_blocks = int((positions[:, -1] // block_size - first_block).max()) + 1
        columns = first_block[:, None] + upto(num_blocks)
        key_positions = first_block[:, None] * block_size + upto(num_blocks * block_size)
        mask = key_positions[:, None, :] <= positions[:, :, None]
        key_mask = key_positions <= positions[:, -1:]
        if plan.window is not None:
            mask &= key_positions[:, None, :] > positions[:, :, None] - plan.window
            key_mask &= key_positions > positions[:, :1] - plan.window
        # a row shorter than its tile's longest one reads its last column again, behind the mask
        blocks = plan.tables[ints(rows)].gather(1, columns.clamp_(max=plan.tables.shape[1] - 1))
        return QueryTile(tokens, blocks, key_mask, mask.unsqueeze(1))

    def _attend(
        self,
        q: torch.Tensor,  # [G, num_queries, num_heads, head_dim] float32
        keys: torch.Tensor,  # [G, num_kv_heads, num_keys, head_dim] float32
        values: torch.Tensor,  # likewise
        mask: torch.Tensor | None,  # [G, 1, num_queries, num_keys]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Softmax attention with grouped query heads -> [G, num_queries, num_heads, head_dim], log-sum-exp."""
        limits = self._bound
        groups, num_queries, num_heads, head_dim = q.shape
        num_kv_heads = limits.num_kv_heads
        # heads that share a KV head become rows of one product: [G, num_kv_heads, share * num_queries, head_dim]
        stacked = q.transpose(1, 2).reshape(groups, num_kv_heads, -1, head_dim)
        scores = torch.matmul(stacked, keys.transpose(2, 3)).mul_(limits.scale)
        scores = scores.view(groups, num_heads, num_queries, -1)
        if limits.softcap is not None:
            scores = torch.tanh(scores / limits.softcap) * limits.softcap
        if mask is not None:
            scores.masked_fill_(~mask, -torch.inf)
        lse = torch.logsumexp(scores, dim=-1)
        probs = torch.softmax(scores, dim=-1).view(groups, num_kv_heads, -1, keys.shape[2])
        result = torch.matmul(probs, values).view(groups, num_heads, num_queries, head_dim)
        return result.transpose(1, 2), lse.transpose(1, 2)

    def _run_singly(
        self, q: torch.Tensor, cache: LayerCache, plan: PagedPlan, out: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        for row, seq_len in enumerate(plan.seq_lens):
            start, end = plan.query_start[row], plan.query_start[row + 1]
            num_blocks = -(-seq_len // self._bound.block_size)
            keys, values = (_gather(pool, plan.tables[row : row + 1, :num_blocks]).float() for pool in cache)
            for token in range(start, end):
                position = seq_len - (end - token)
                first = 0 if plan.window is None else max(0, position - plan.window + 1)
                seen = slice(first, position + 1)
                result, sums = self._attend(
                    q[token : token + 1, None].float().clone(),
                    keys[:, :, seen].clone(memory_format=torch.contiguous_format),
                    values[:, :, seen].clone(memory_format=torch.contiguous_format),
                    None,
                )
                out[token] = result[0, 0].to(out.dtype)
                if lse is not None:
                    lse[token] = sums[0, 0]


def _gather(pool: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Blocks [G, n] of a pool [num_blocks, heads, block_size, dim] -> [G, heads, n * block_size, dim]."""
    gathered = pool[blocks].transpose(1, 2)
    return gathered.reshape(*gathered.shape[:2], -1, pool.shape[3])
