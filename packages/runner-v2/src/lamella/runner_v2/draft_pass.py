"""Passes of a network that drafts over the runner's rows. It writes KV into the rows' own blocks.

    row r    [ kept KV | tokens of the pass                ]     positions [starts, starts + lens), one after the other
               ^ 0       ^ starts[r]    ^ starts[r] + lens[r]

What lies behind a pass in a row's blocks is stale: a later pass starts at or before it. Passes run eagerly.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from lamella.runner_v2.assembly import DraftAssembly
from lamella.runner_v2.block_tables import BlockTables
from lamella.runner_v2.inputs import InputBatch, LayerCache, ModelInput
from lamella.runner_v2.kv_cache import allocate_caches, blocks_for
from lamella.runner_v2.memory import Arena
from lamella.runner_v2.scoring import chunk_batch
from lamella.runner_v2.step import KvGroup, KvLayout
from lamella.runner_v2.writes import Writes


class DraftPass:
    """One network, over the tables and caches of one runner. A drafter of specdec takes it as its `DraftModel`."""

    def __init__(self, draft: DraftAssembly, tables: BlockTables, writes: Writes) -> None:
        self._draft = draft
        self._tables = tables
        self._writes = writes
        self._caches: tuple[LayerCache, ...] = ()

    @property
    def vocab_size(self) -> int:
        """Ids that a pass can choose from."""
        return self._draft.config.vocab_size

    def bind(self, caches: Sequence[LayerCache]) -> None:
        """The caches of its layers, in their order."""
        self._caches = tuple(caches)

    @torch.inference_mode()
    def forward(
        self,
        rows: Sequence[int],
        starts: Sequence[int],
        lens: Sequence[int],
        ids: torch.Tensor,  # [n] int32, row after row
        hidden: torch.Tensor | None = None,  # [n, w]
    ) -> torch.Tensor:
        """[n, h] behind the tokens. rows: device rows; each has at least one token."""
        return self._run(self._batch(rows, starts, lens, ids), hidden, self._caches)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:  # [m, h] -> [m, vocab_size]
        """Of some rows of what forward() returned."""
        return self._draft.network.logits(hidden)

    def target_ids(self, ids: torch.Tensor) -> torch.Tensor:  # [m] -> [m]
        """What ids of the network's vocabulary are in the model's."""
        return self._draft.network.target_ids(ids)

    @torch.inference_mode()
    def measure(self, groups: Sequence[KvGroup], num_tokens: int, num_logits: int, device: str) -> float:
        """Seconds of a pass over so many tokens of one row, with logits of some of them, in caches of its own."""
        limits = self._draft.backend.limits
        own = [group._replace(layers=self._layers_of(group.window)) for group in groups]
        layout = KvLayout((blocks_for(num_tokens, limits.block_size) + 1,) * len(groups))
        caches = allocate_caches(own, layout, limits, Arena("profile", device))
        ids = torch.zeros(num_tokens, dtype=torch.int32, device=device)
        table = torch.arange(1, layout.num_blocks[0], dtype=torch.int32, device=device)
        batch = chunk_batch(ids, 0, table, limits.block_size, len(groups))
        seconds = []
        for _ in range(2):
            started = _now(device)
            found = self._run(batch, None, caches)
            self.target_ids(self.logits(found[:num_logits]).argmax(dim=1))
            seconds.append(_now(device) - started)
        return min(seconds)

    def _run(self, batch: InputBatch, hidden: torch.Tensor | None, caches: Sequence[LayerCache]) -> torch.Tensor:
        draft = self._draft
        backend = draft.backend.backend
        plans = tuple(backend.plan(batch, group_idx) for group_idx in range(len(batch.block_tables)))
        inputs = ModelInput(batch.token_ids, batch.positions, plans, tuple(caches))
        return draft.network.end(draft.stack.run(draft.network.begin(inputs, hidden), inputs))

    def _batch(self, rows: Sequence[int], starts: Sequence[int], lens: Sequence[int], ids: torch.Tensor) -> InputBatch:
        tables = self._tables
        begin, count = np.asarray(starts, np.int64), np.asarray(lens, np.int64)
        assert (count > 0).all(), "a row of a pass has at least one token"
        query_start = np.zeros(len(count) + 1, np.int64)
        np.cumsum(count, out=query_start[1:])
        num_tokens = int(query_start[-1])
        assert len(ids) == num_tokens, f"{len(ids)} ids for {num_tokens} tokens"
        owner = np.repeat(np.arange(len(count)), count)
        positions = begin[owner] + np.arange(num_tokens) - query_start[owner]
        ends = begin + count
        device_rows = np.asarray(rows, np.int64)
        columns, offsets = np.divmod(positions, tables.block_size)
        assert (ends <= tables.capacity[:, device_rows]).all(), "a row lacks blocks for what its drafter writes"
        wide_rows, narrow, entries, offset, place, starts_, lens_ = self._writes.upload(
            [
                device_rows,
                device_rows.astype(np.int32),
                columns + device_rows[owner] * tables.max_blocks,
                offsets,
                positions.astype(np.int32),
                query_start.astype(np.int32),
                ends.astype(np.int32),
            ]
        )
        max_seq_len = int(ends.max(initial=0))
        groups = range(len(tables))
        return InputBatch(
            num_tokens=num_tokens,
            num_rows=len(count),
            max_query_len=int(count.max(initial=0)),
            max_seq_len=max_seq_len,
            rows=narrow,
            token_ids=ids,
            positions=place,
            query_start=starts_,
            seq_lens=lens_,
            block_tables=tuple(tables.gather(g, wide_rows, max_seq_len) for g in groups),
            slot_mapping=tuple(tables.slots(g, entries, offset) for g in groups),
            logits_idx=starts_[1:] - 1,
            logits_start=torch.arange(len(count) + 1, dtype=torch.int32, device=starts_.device),
            num_single=len(count) if num_tokens == len(count) else 0,
        )

    def _layers_of(self, window: int | None) -> tuple[int, ...]:
        return tuple(i for i, rows in enumerate(self._draft.rows) if rows.window == window)


def _now(device: str) -> float:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
