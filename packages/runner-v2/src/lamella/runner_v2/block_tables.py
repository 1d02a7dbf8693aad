"""Block tables of all device rows, persistent on the device and changed by deltas only.

table of a row in a group:   [ b0 | b1 | b2 | 0 | 0 | ... ]     entry i holds positions [i * block_size, ...)
                               ^ 0 also left of a sliding window: the null block
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from lamella.runner_v2.kv_cache import NULL_BLOCK, blocks_for
from lamella.runner_v2.writes import DirectWrites, Writes


class BlockTables:
    """One table [max_num_rows + 1, max_blocks] int32 per group; that of the spare row, which pads batches, has null
    blocks only."""

    def __init__(
        self,
        num_groups: int,
        max_num_rows: int,
        max_len: int,
        block_size: int,
        device: str,
        writes: Writes | None = None,
    ) -> None:
        """writes: how changes reach the device; None: directly, in the host's memory."""
        self.block_size = block_size
        self.max_blocks = blocks_for(max_len, block_size)
        self._tables = [
            torch.full((max_num_rows + 1, self.max_blocks), NULL_BLOCK, dtype=torch.int32, device=device)
            for _ in range(num_groups)
        ]
        self._writes = DirectWrites() if writes is None else writes
        self.capacity = np.zeros((num_groups, max_num_rows), dtype=np.int64)
        """Tokens that each row's blocks reach to, per group (on the host)."""
        self._touched = np.zeros((num_groups, max_num_rows), dtype=np.int64)
        """Entries at the front of each row that may hold a block."""

    def __len__(self) -> int:
        return len(self._tables)

    def __getitem__(self, group: int) -> torch.Tensor:  # [max_num_rows + 1, max_blocks]
        return self._tables[group]

    def reset(self, row: int, blocks: Sequence[Sequence[int]]) -> None:
        """A row got a new owner with these blocks per group."""
        assert len(blocks) == len(self._tables), f"{len(blocks)} tables for {len(self._tables)} groups"
        for group, block_ids in enumerate(blocks):
            rest = int(self._touched[group, row]) - len(block_ids)  # of the owner before
            if rest > 0:
                self._writes.put(self._tables[group], row * self.max_blocks + len(block_ids), [NULL_BLOCK] * rest)
            self._touched[group, row] = 0
            self.write(row, group, 0, block_ids)

    def write(self, row: int, group: int, start: int, block_ids: Sequence[int]) -> None:
        """table[start : start + len(block_ids)] = block_ids; the table ends there."""
        end = start + len(block_ids)
        assert 0 <= start <= end <= self.max_blocks, f"row {row}: blocks [{start}, {end}) of {self.max_blocks}"
        self._writes.put(self._tables[group], row * self.max_blocks + start, block_ids)
        self.capacity[group, row] = end * self.block_size
        self._touched[group, row] = max(end, self._touched[group, row])

    def gather(self, group: int, rows: torch.Tensor, max_len: int) -> torch.Tensor:
        """Tables of device rows ([R] int64), as far as max_len tokens need them -> [R, blocks] int32."""
        return self._tables[group].narrow(1, 0, blocks_for(max_len, self.block_size)).index_select(0, rows)

    def slots(
        self,
        group: int,
        tokens: torch.Tensor,  # [T] int64 place of each token's block in the flattened table
        offsets: torch.Tensor,  # [T] int64 place of the token in its block
    ) -> torch.Tensor:
        """Slots [T] int64 of tokens; -1 where the row has no block there."""
        blocks = self._tables[group].view(-1).index_select(0, tokens)
        slots = blocks * self.block_size + offsets
        return torch.where(blocks == NULL_BLOCK, -1, slots)
