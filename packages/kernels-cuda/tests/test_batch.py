import pytest
import torch
from oracles import batch as oracle
from poison import poisoned

from lamella import kernels_cuda as kernels

pytestmark = pytest.mark.gpu
KEPT = -(2**30)  # what an entry holds that was not written


class State:
    """Rows with any lengths, a spare row behind them that has null blocks only."""

    def __init__(self, num_rows=40, width=3000, block_size=16, groups=2, max_blocks=None, longest=None):
        self.block_size, self.spare = block_size, num_rows
        max_blocks = max_blocks or -(-width // block_size)
        longest = min(longest or width - 1, max_blocks * block_size - 1)
        self.token_ids = torch.randint(-3, 200_000, (num_rows + 1, width), device="cuda", dtype=torch.int32)
        self.computed_len = torch.randint(0, longest + 1, (num_rows + 1,), device="cuda", dtype=torch.int32)
        self.computed_len[:3] = torch.tensor([0, longest, block_size - 1])[: min(3, num_rows)]
        self.computed_len[num_rows] = 0
        self.tables = []
        for _ in range(groups):
            table = torch.randint(1, 2**31 - 1, (num_rows + 1, max_blocks), device="cuda", dtype=torch.int32)
            table[torch.rand_like(table, dtype=torch.float32) < 0.1] = 0  # null blocks, as left of a window
            table[num_rows] = 0
            self.tables.append(table)

    def rows(self, *numbers):
        return torch.tensor(numbers, dtype=torch.int32, device="cuda")

    def outputs(self, batch):
        ids, positions, seq_lens = (poisoned(batch, dtype=torch.int32) for _ in range(3))
        return {
            "ids": ids,
            "positions": positions,
            "seq_lens": seq_lens,
            "slots": [poisoned(batch, dtype=torch.int64) for _ in self.tables],
            "block_tables": [poisoned(batch, table.shape[1], dtype=torch.int32) for table in self.tables],
        }

    def check(self, rows, out=None, what=""):
        out = self.outputs(len(rows)) if out is None else out
        kernels.prepare_decode(rows, self.token_ids, self.computed_len, self.tables, self.block_size, self.spare, **out)
        ids, positions, seq_lens, slots, tables = oracle.prepare(
            rows.cpu(), self.token_ids.cpu(), self.computed_len.cpu(), [t.cpu() for t in self.tables],
            self.block_size, self.spare,
        )  # fmt: skip
        assert out["ids"].tolist() == ids, f"ids {what}"
        assert out["positions"].tolist() == positions, f"positions {what}"
        assert out["seq_lens"].tolist() == seq_lens, f"seq_lens {what}"
        for g, (expected_slots, expected_tables) in enumerate(zip(slots, tables)):
            assert out["slots"][g].tolist() == expected_slots, f"slots of group {g} {what}"
            for i, (row, expected) in enumerate(zip(out["block_tables"][g].tolist(), expected_tables)):
                assert row[: len(expected)] == expected, f"block table {i} of group {g} {what}"
                assert all(entry == KEPT for entry in row[len(expected) :]), f"behind table {i} of group {g} {what}"


@pytest.mark.parametrize("groups", [1, 2, 3, 4])
@pytest.mark.parametrize("block_size", [1, 16, 48, 64])
def test_prepare(groups, block_size):
    state = State(groups=groups, block_size=block_size)
    order = torch.randperm(40, device="cuda").int()
    for rows in (order, order[:1], order[3:8], order[:0]):
        state.check(rows, what=f"{groups} groups, blocks of {block_size}, {len(rows)} rows")


@pytest.mark.parametrize("max_blocks", [1, 3, 4, 187, 188, 2047, 2048, 2049, 8191, 8192])
def test_prepare_widths_of_tables(max_blocks):
    state = State(num_rows=9, width=140_000, max_blocks=max_blocks, groups=2)
    state.check(state.rows(*range(9)), what=f"{max_blocks} blocks")


def test_prepare_tables_of_different_widths_and_strides():
    state = State(groups=3, width=1000)
    wide = torch.randint(1, 10**6, (41, 200), device="cuda", dtype=torch.int32)
    state.tables[1] = wide[:, :63]
    state.tables[2] = wide[:, 1:90]
    rows = state.rows(5, 2, 1, 0, 39)
    out = state.outputs(5)
    out["block_tables"][0] = poisoned(5, 128, dtype=torch.int32)[:, 3 : 3 + state.tables[0].shape[1]]
    state.check(rows, out)


def test_prepare_a_batch_with_spare_rows():
    state = State()
    state.tables[0][state.spare] = 5  # whatever its blocks are, nothing may be written for it
    state.check(state.rows(7, 3, state.spare, state.spare, 11, state.spare))


def test_prepare_with_rows_that_are_not_there():
    state = State()
    out = state.outputs(3)
    rows = state.rows(-1, 4, 41)
    kernels.prepare_decode(rows, state.token_ids, state.computed_len, state.tables, 16, state.spare, **out)
    assert out["seq_lens"][[0, 2]].tolist() == [0, 0]
    assert out["ids"][[0, 2]].tolist() == [0, 0]
    assert out["positions"][[0, 2]].tolist() == [0, 0]
    assert [slots[[0, 2]].tolist() for slots in out["slots"]] == [[-1, -1]] * 2
    assert all((table[[0, 2]] == KEPT).all() for table in out["block_tables"])
    assert int(out["positions"][1]) == int(state.computed_len[4])


def test_prepare_beyond_2_31_elements():
    num_rows, width = 17_000, 131_072
    token_ids = torch.zeros(num_rows + 1, width, device="cuda", dtype=torch.int32)
    token_ids[num_rows - 1, width - 2] = 77
    computed = torch.full((num_rows + 1,), width - 2, device="cuda", dtype=torch.int32)
    table = torch.full((num_rows + 1, width // 16), 2**31 - 1, device="cuda", dtype=torch.int32)
    rows = torch.tensor([num_rows - 1], device="cuda", dtype=torch.int32)
    ids, positions, seq_lens = (poisoned(1, dtype=torch.int32) for _ in range(3))
    slots, tables = [poisoned(1, dtype=torch.int64)], [poisoned(1, width // 16, dtype=torch.int32)]
    kernels.prepare_decode(
        rows, token_ids, computed, [table], 16, num_rows,
        ids=ids, positions=positions, seq_lens=seq_lens, slots=slots, block_tables=tables,
    )  # fmt: skip
    assert ids.tolist() == [77]
    assert slots[0].tolist() == [(2**31 - 1) * 16 + 14]
    assert (tables[0] == 2**31 - 1).all()
    kernels.advance_decode(rows, computed, token_ids, ids, num_rows)
    assert int(token_ids[num_rows - 1, width - 1]) == 77
    assert int(computed[num_rows - 1]) == width - 1


@pytest.mark.parametrize("batch", [0, 1, 40, 300])
def test_advance(batch):
    state = State(num_rows=300, width=50)
    rows = torch.randperm(300, device="cuda").int()[:batch]
    if batch > 4:
        rows[[1, 3, batch - 1]] = state.spare
    next_ids = torch.randint(0, 200_000, (batch,), device="cuda", dtype=torch.int32)
    lens, ids = state.computed_len.cpu(), state.token_ids.cpu()
    oracle.advance(rows.cpu(), lens, ids, next_ids.cpu(), state.spare)
    kernels.advance_decode(rows, state.computed_len, state.token_ids, next_ids, state.spare)
    assert torch.equal(state.computed_len.cpu(), lens), f"lengths, batch {batch}"
    assert torch.equal(state.token_ids.cpu(), ids), f"ids, batch {batch}"


def test_steps_in_a_graph():
    state = State(num_rows=8, width=500, longest=300)
    rows = state.rows(3, 0, 7, state.spare, 5, state.spare)
    out = state.outputs(6)
    next_ids = torch.zeros(6, device="cuda", dtype=torch.int32)

    def step():
        kernels.prepare_decode(rows, state.token_ids, state.computed_len, state.tables, 16, state.spare, **out)
        torch.add(out["ids"], 1, out=next_ids)
        kernels.advance_decode(rows, state.computed_len, state.token_ids, next_ids, state.spare)

    lens = state.computed_len.clone()
    first = state.token_ids[rows.long(), lens[rows.long()].long()].clamp_min(0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(20):
        graph.replay()
    real = [i for i, row in enumerate(rows.tolist()) if row != state.spare]
    assert (next_ids[real] == first[real] + 21).all(), (next_ids.tolist(), first.tolist())
    moved = state.computed_len - lens
    assert sorted(moved.tolist()) == [0] * 5 + [21] * 4, moved.tolist()
    assert int(moved[state.spare]) == 0


def test_wrong_arguments_are_named():
    state = State()
    rows = state.rows(1, 2)
    args = {
        "rows": rows, "token_ids": state.token_ids, "computed_len": state.computed_len, "tables": state.tables,
        "block_size": 16, "spare_row": state.spare, **state.outputs(2),
    }  # fmt: skip
    kernels.prepare_decode(**args)
    for change, name in [
        ({"rows": rows.long()}, "rows"),
        ({"token_ids": state.token_ids.cpu()}, "token_ids"),
        ({"computed_len": state.computed_len[:4]}, "computed_len"),
        ({"tables": []}, "tables"),
        ({"tables": state.tables * 3}, "tables"),
        ({"tables": [state.tables[0], state.tables[1][:3]]}, r"tables\[1\]"),
        ({"slots": args["slots"][:1]}, "slots"),
        ({"slots": [args["slots"][0], args["slots"][1].int()]}, r"slots\[1\]"),
        ({"block_tables": [args["block_tables"][0][:, :5], args["block_tables"][1]]}, r"block_tables\[0\]"),
        ({"ids": args["ids"][:1]}, "ids"),
        ({"positions": args["positions"].long()}, "positions"),
        ({"seq_lens": args["seq_lens"][:1]}, "seq_lens"),
        ({"block_size": 0}, "block_size"),
    ]:
        with pytest.raises(ValueError, match=rf"^{name}:"):
            kernels.prepare_decode(**(args | change))
    with pytest.raises(ValueError, match=r"^next_ids:"):
        kernels.advance_decode(rows, state.computed_len, state.token_ids, rows[:1], state.spare)
