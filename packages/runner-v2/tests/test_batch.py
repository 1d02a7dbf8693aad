"""Batches against a builder that loops over rows in plain Python."""

import random
import time
from typing import NamedTuple

import numpy as np
import pytest
import torch

from lamella.runner_v2.batch import BatchBuilder
from lamella.runner_v2.block_tables import BlockTables
from lamella.runner_v2.sampling.params import RowParams
from lamella.runner_v2.state import SequenceState
from lamella.runner_v2.step import NewRow, Work

BLOCK_SIZE = 4
MAX_LEN = 64
MAX_DRAFTS = 3


class Rows(NamedTuple):
    """Rows with random ids and scattered blocks in two groups."""

    state: SequenceState
    tables: BlockTables
    builder: BatchBuilder
    blocks: dict[int, list[list[int]]]


def make_rows(num_rows: int, rng: random.Random) -> Rows:
    state = SequenceState(num_rows, MAX_LEN, MAX_DRAFTS, "cpu", keep_host_ids=False)
    tables = BlockTables(2, num_rows, state.width, BLOCK_SIZE, "cpu")
    blocks = {}
    free = [rng.sample(range(1, 1000), 999) for _ in range(2)]
    for row in range(num_rows):
        num_ids = rng.randint(2, MAX_LEN - 8)
        blocks[row] = [[free[group].pop() for _ in range(tables.max_blocks)] for group in range(2)]
        ids = [rng.randrange(500) for _ in range(num_ids)]
        computed = rng.choice([0, num_ids - 1, rng.randrange(num_ids)])
        state.add(NewRow(row, row + 1, ids, num_ids, computed, RowParams(), ([], [])))
        tables.reset(row, blocks[row])
        drafts = torch.tensor([[rng.randrange(500) for _ in range(MAX_DRAFTS)]], dtype=torch.int32)
        if computed == num_ids - 1:
            state.put_drafts(torch.tensor([row]), drafts)
    return Rows(state, tables, BatchBuilder(state, tables, 10_000, "cpu"), blocks)


@pytest.mark.parametrize("seed", range(8))
def test_equals_plain_loops(seed: int) -> None:
    rng = random.Random(seed)
    rows = make_rows(6, rng)
    state = rows.state
    order = rng.sample(range(6), rng.randint(1, 6))
    query_lens, verify_lens = [], []
    for row in order:
        left = int(state.known_len[row] - state.computed_len[row])
        verify = rng.randint(0, MAX_DRAFTS) if left == 1 else 0
        verify_lens.append(verify)
        query_lens.append(1 + verify if left == 1 else rng.randint(1, left))
    layout = rows.builder.layout(Work(tuple(order), tuple(query_lens), tuple(verify_lens), (0,) * len(order)))
    batch = rows.builder.build(layout)
    inputs, drafts = batch.inputs, batch.drafts

    ids, positions, slots, logits_idx, starts, logits_starts = [], [], ([], []), [], [0], [0]
    expected_drafts, choosing = [], []
    for row, query_len, verify in zip(order, query_lens, verify_lens, strict=True):
        start = int(state.computed_len[row])
        for position in range(start, start + query_len):
            ids.append(int(state.all_token_ids[row, position]))
            positions.append(position)
            for group in range(2):
                block = rows.blocks[row][group][position // BLOCK_SIZE]
                slots[group].append(block * BLOCK_SIZE + position % BLOCK_SIZE)
        starts.append(len(ids))
        if start + query_len >= int(state.known_len[row]):
            logits_idx.extend(range(len(ids) - 1 - verify, len(ids)))
            choosing.extend((row, start + query_len - verify + i, i) for i in range(1 + verify))
            held = ids[len(ids) - verify :] if verify else []
            expected_drafts.append(held + [-1] * (max(verify_lens) - verify))
        logits_starts.append(len(logits_idx))
    assert inputs.rows.tolist() == order
    narrow = (inputs.rows, inputs.token_ids, inputs.positions, inputs.query_start, inputs.seq_lens, inputs.logits_idx)
    assert {t.dtype for t in narrow} == {torch.int32}
    assert {t.dtype for t in inputs.slot_mapping} == {torch.int64}
    assert inputs.token_ids.tolist() == ids
    assert inputs.positions.tolist() == positions
    assert [s.tolist() for s in inputs.slot_mapping] == list(slots)
    assert inputs.query_start.tolist() == starts
    assert inputs.logits_start.tolist() == logits_starts
    assert inputs.logits_idx.tolist() == logits_idx
    ends = [int(state.computed_len[row]) + n for row, n in zip(order, query_lens, strict=True)]
    assert inputs.seq_lens.tolist() == ends
    assert (inputs.max_seq_len, inputs.max_query_len) == (max(ends), max(query_lens))
    for group in range(2):
        table = inputs.block_tables[group].tolist()
        assert table == [rows.blocks[row][group][: len(table[0])] for row in order]
        assert len(table[0]) * BLOCK_SIZE >= max(ends)
    assert drafts.tolist() == (expected_drafts if max(verify_lens) else [[]] * len(expected_drafts))
    layout_of_logits = rows.builder.logits_rows(layout, drafts)
    chosen = zip(layout_of_logits.rows, layout_of_logits.positions, layout_of_logits.draft_idx, strict=True)
    assert [tuple(map(int, entry)) for entry in chosen] == choosing
    for i, (row, _, draft_idx) in enumerate(choosing):
        place = sorted({r for r, _, _ in choosing}, key=[r for r, _, _ in choosing].index).index(row)
        assert layout_of_logits.prefix(i) == (expected_drafts[place][:draft_idx] if max(verify_lens) else [])


def test_layout_is_kept_while_nothing_changes() -> None:
    rows = make_rows(2, random.Random(1))
    state = rows.state
    state.remove(0, 1)
    state.add(NewRow(0, 5, list(range(10)), 10, 0, RowParams(), ([], [])))
    work = Work((0,), (5,), (0,), (0,))
    first = rows.builder.layout(work)
    assert rows.builder.layout(None) is first
    assert rows.builder.layout(Work((0,), (5,), (0,), (0,))) is first
    state.plan_ahead(first.rows, first.query_lens)
    last_chunk = rows.builder.layout(None)
    assert not first.samples.any()
    assert last_chunk.samples.all()


def test_missing_blocks_and_free_rows() -> None:
    rows = make_rows(2, random.Random(1))
    rows.tables.reset(0, ([3], [4]))
    rows.state.remove(0, 1)
    with pytest.raises(AssertionError, match="work on a free row"):
        rows.builder.layout(Work((0,), (1,), (0,), (0,)))
    rows.state.add(NewRow(0, 5, list(range(10)), 10, 0, RowParams(), ([], [])))
    rows.builder.layout(Work((0,), (4,), (0,), (0,)))
    with pytest.raises(AssertionError, match="lacks blocks"):
        rows.builder.layout(Work((0,), (5,), (0,), (0,)))


def test_steady_decode_is_cheap() -> None:
    """64 decoding rows: everything that builds the batch, in well under a millisecond even on a busy machine."""
    num_rows = 64
    state = SequenceState(num_rows, 4096, 0, "cpu", keep_host_ids=False)
    tables = BlockTables(1, num_rows, state.width, 16, "cpu")
    builder = BatchBuilder(state, tables, 2048, "cpu")
    for row in range(num_rows):
        state.add(NewRow(row, 1, list(range(600)), 600, 599, RowParams(), ([],)))
        tables.reset(row, (list(range(1, 80)),))
    work = Work(tuple(range(num_rows)), (1,) * num_rows, (0,) * num_rows, (0,) * num_rows)
    next_ids = torch.zeros(num_rows, dtype=torch.int32)
    best = 1.0
    with torch.inference_mode():
        for _ in range(60):
            begin = time.perf_counter()
            layout = builder.layout(work)
            batch = builder.build(layout)
            builder.logits_rows(layout, batch.drafts)
            state.plan_ahead(layout.rows, layout.query_lens)
            state.advance(layout.device_rows, layout.device_query_lens, layout.device_sampled, next_ids)
            best = min(best, time.perf_counter() - begin)
    assert best < 1e-3
    assert np.all(state.planned_len == 659)
