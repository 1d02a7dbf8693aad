"""Logits of every position of one text: for evaluating a model and for judging kernels against a reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lamella.runner_v2.assembly import Assembly
from lamella.runner_v2.errors import ConfigError
from lamella.runner_v2.inputs import InputBatch, ModelInput
from lamella.runner_v2.kv_cache import allocate_caches, blocks_for
from lamella.runner_v2.memory import Arena
from lamella.runner_v2.step import KvLayout


@torch.inference_mode()
def score(assembly: Assembly, token_ids: Sequence[int], device: str = "cpu") -> torch.Tensor:
    """Logits behind each token of one text, [num_tokens, vocab] float32, in one chunk with caches of its own.

    ConfigError if a step cannot have so many tokens.
    """
    limits = assembly.backend.limits
    most = min(limits.max_num_tokens, limits.max_model_len)
    if not 0 < len(token_ids) <= most:
        raise ConfigError(f"a step has 1 to {most} tokens, not {len(token_ids)}")
    num_groups = len(assembly.groups)
    num_blocks = blocks_for(len(token_ids), limits.block_size) + 1
    layout = KvLayout((num_blocks,) * num_groups)
    caches = allocate_caches(assembly.groups, layout, limits, Arena("score", device), assembly.draft_rows)
    ids = torch.tensor(list(token_ids), dtype=torch.int32, device=device)
    batch = prompt_batch(ids, limits.block_size, num_groups)
    plans = tuple(assembly.backend.backend.plan(batch, group_idx) for group_idx in range(num_groups))
    inputs = ModelInput(batch.token_ids, batch.positions, plans, caches)
    carried = assembly.stack.run(assembly.model.embed(inputs), inputs)
    return assembly.model.finish(carried, batch.positions)


def prompt_batch(token_ids: torch.Tensor, block_size: int, num_groups: int) -> InputBatch:
    """One row that computes a whole prompt of ids [T] int32 in blocks 1, 2, ..., with logits of its last token."""
    num_blocks = blocks_for(len(token_ids), block_size)
    table = torch.arange(1, num_blocks + 1, dtype=torch.int32, device=token_ids.device)
    return chunk_batch(token_ids, 0, table, block_size, num_groups)


def chunk_batch(
    token_ids: torch.Tensor,  # [T] int32
    start: int,
    table: torch.Tensor,  # [num_blocks] int32
    block_size: int,
    num_groups: int,
) -> InputBatch:
    """One row that computes [start, start + T) in the blocks of a table, with logits of its last token."""
    num_tokens, device = len(token_ids), token_ids.device
    end = start + num_tokens

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    positions = torch.arange(start, end, dtype=torch.int32, device=device)
    slots = table.long()[positions // block_size] * block_size + positions % block_size
    return InputBatch(
        num_tokens=num_tokens,
        num_rows=1,
        max_query_len=num_tokens,
        max_seq_len=end,
        rows=ints(0),
        token_ids=token_ids,
        positions=positions,
        query_start=ints(0, num_tokens),
        seq_lens=ints(end),
        block_tables=(table.unsqueeze(0),) * num_groups,
        slot_mapping=(slots,) * num_groups,
        logits_idx=ints(num_tokens - 1),
        logits_start=ints(0, 1),
    )
