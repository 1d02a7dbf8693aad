"""The borders of a decode step: its inputs from the state of rows, and that state one token further."""

import torch
from timing import seconds

from lamella import kernels_cuda as kernels

ROWS, BLOCK, LENGTH = 256, 16, 131_072
TARGET_US = 3.0  # a launch with three dependent loads


def rows(emit):
    token_ids = torch.randint(0, 100_000, (ROWS + 1, LENGTH), device="cuda", dtype=torch.int32)
    for groups, batch, context in ((1, 1, 1024), (1, 32, 8192), (1, 256, 4096), (4, 32, 8192), (1, 1, 131_000)):
        tables = [torch.randint(1, 10**6, (ROWS + 1, LENGTH // BLOCK), device="cuda").int() for _ in range(groups)]
        computed = torch.full((ROWS + 1,), context - 1, device="cuda", dtype=torch.int32)
        chosen = torch.randperm(ROWS, device="cuda")[:batch].int()
        ids, positions, seq_lens = (torch.empty(batch, device="cuda", dtype=torch.int32) for _ in range(3))
        slots = [torch.empty(batch, device="cuda", dtype=torch.int64) for _ in tables]
        out = [torch.empty(batch, LENGTH // BLOCK, device="cuda", dtype=torch.int32) for _ in tables]

        def prepare(
            chosen=chosen, computed=computed, tables=tables, ids=ids, positions=positions, lens=seq_lens, slots=slots,
            out=out,
        ):  # fmt: skip
            kernels.prepare_decode(
                chosen, token_ids, computed, tables, BLOCK, ROWS,
                ids=ids, positions=positions, seq_lens=lens, slots=slots, block_tables=out,
            )  # fmt: skip

        emit(
            f"prepare_decode, {groups} groups, b{batch} ctx {context}",
            seconds([prepare]),
            TARGET_US * 1e-6,
            None,
            test="test_batch.py",
        )
        if groups == 1 and context < LENGTH // 2:
            moved = computed.clone()
            emit(
                f"advance_decode, b{batch}",
                seconds([lambda c=chosen, n=ids, k=moved: kernels.advance_decode(c, k, token_ids, n, ROWS)]),
                TARGET_US * 1e-6,
                None,
                test="test_batch.py",
            )
