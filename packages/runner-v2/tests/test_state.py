"""Rows: owners, lengths, drafts; tables; groups and their memory."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from lamella.runner_v2.attention.metadata import AttentionLimits
from lamella.runner_v2.block_tables import BlockTables
from lamella.runner_v2.config import LayerConfig
from lamella.runner_v2.errors import CapacityError, ConfigError
from lamella.runner_v2.kv_cache import allocate_caches, group_of_layer, groups_of
from lamella.runner_v2.memory import Arena
from lamella.runner_v2.sampling.params import RowParams
from lamella.runner_v2.state import SequenceState
from lamella.runner_v2.step import KvGroup, KvLayout, NewRow
from lamella.runner_v2.testing.tiny_models import model_config, tiny_config


def new_row(row: int, generation: int, ids: list[int], computed: int = 0) -> NewRow:
    return NewRow(row, generation, ids, len(ids), computed, RowParams(), ([],))


class TestSequenceState:
    def test_owner_and_generation(self) -> None:
        state = SequenceState(2, 16, 2, "cpu", keep_host_ids=True)
        state.add(new_row(1, 7, [4, 5, 6], 2))
        assert state.all_token_ids[1, :5].tolist() == [4, 5, 6, -1, -1]
        assert not state.remove(1, 6)
        assert state.generations[1] == 7
        with pytest.raises(AssertionError, match="row 1 is taken"):
            state.add(new_row(1, 8, [1]))
        assert state.remove(1, 7)
        assert not state.remove(1, 7)
        state.add(new_row(1, 8, [1]))
        assert state.all_token_ids[1, :4].tolist() == [1, -1, -1, -1]
        assert state.host_ids is not None
        assert state.host_ids[1] == [1]
        assert (int(state.computed_len[1]), int(state.planned_len[1]), int(state.known_len[1])) == (0, 0, 1)

    def test_ids_must_fit(self) -> None:
        state = SequenceState(1, 4, 0, "cpu", keep_host_ids=False)
        with pytest.raises(AssertionError):
            state.add(new_row(0, 1, [1, 2, 3], computed=3))
        with pytest.raises(AssertionError):
            state.add(new_row(0, 1, [1] * 5))

    def test_drafts_are_kept_or_overwritten(self) -> None:
        """[last, d1, d2]: one accepted; the next id takes the place of the rejected one."""
        state = SequenceState(2, 16, 2, "cpu", keep_host_ids=False)
        state.add(new_row(0, 1, [9, 8, 7], 2))
        rows = torch.tensor([0])
        state.put_drafts(rows, torch.tensor([[50, 51]], dtype=torch.int32))
        assert state.all_token_ids[0, :6].tolist() == [9, 8, 7, 50, 51, -1]
        state.plan_ahead(np.array([0]), np.array([3], np.int32))
        state.advance(rows, torch.tensor([2], dtype=torch.int32), torch.tensor([0]), torch.tensor([60]).int())
        state.commit(np.array([0]), np.array([1], np.int32))
        assert state.all_token_ids[0, :6].tolist() == [9, 8, 7, 50, 60, -1]
        assert int(state.computed_len[0]) == int(state.planned_len[0]) == 4
        state.put_drafts(rows, torch.tensor([[70]], dtype=torch.int32))
        assert state.all_token_ids[0, 4:8].tolist() == [60, 70, -1, -1]
        with pytest.raises(AssertionError, match="3 drafts, 2 at most"):
            state.put_drafts(rows, torch.zeros(1, 3, dtype=torch.int32))


class TestBlockTables:
    def test_written_and_taken_back(self) -> None:
        tables = BlockTables(2, 3, 40, 4, "cpu")
        rows = torch.tensor([2, 0])
        tables.reset(2, ([5, 6], [0, 9]))
        tables.write(2, 0, 2, [7])
        assert tables.gather(0, rows, 12).tolist() == [[5, 6, 7], [0, 0, 0]]
        assert tables.gather(1, rows, 5).tolist() == [[0, 9], [0, 0]]
        assert tables.capacity[:, 2].tolist() == [12, 8]
        tables.write(2, 0, 1, [8])  # the scheduler took 6 and 7 back
        assert tables.capacity[0, 2] == 8
        assert tables.gather(0, rows, 8).tolist() == [[5, 8], [0, 0]]
        tables.reset(2, ([1], []))
        assert tables.gather(0, rows, 12)[0].tolist() == [1, 0, 0]
        with pytest.raises(AssertionError, match="of 10"):
            tables.write(2, 0, 9, [1, 2])

    def test_slots(self) -> None:
        tables = BlockTables(1, 2, 16, 4, "cpu")
        tables.reset(1, ([3, 2],))
        entries = torch.tensor([4, 5, 6])  # blocks 0, 1, 2 of row 1; the last one is missing
        assert tables.slots(0, entries, torch.tensor([1, 3, 0])).tolist() == [13, 11, -1]


class TestGroups:
    LIMITS = AttentionLimits("cpu", torch.float32, torch.float16, 4, 2, 32, 0.1, None, 16, (None, 16), 4, 64, 512)

    def test_one_group_per_window(self) -> None:
        config = model_config(tiny_config("gemma3_text"))
        full, sliding = groups_of(config, self.LIMITS)
        assert full == KvGroup("full", "full", 16, 2 * 4096, (2, 5), None, "float16")
        assert sliding == KvGroup("sliding_16", "sliding", 16, 4 * 4096, (0, 1, 3, 4), 16, "float16")
        assert group_of_layer(config) == (1, 1, 0, 1, 1, 0)

    def test_only_sliding_layers(self) -> None:
        config = model_config(tiny_config("mistral"))
        (group,) = groups_of(config, self.LIMITS)
        assert (group.kind, group.layers, group.window) == ("sliding", (0, 1, 2), 16)

    def test_windows_of_several_lengths(self) -> None:
        config = model_config(tiny_config("mistral"))
        config = replace(config, layers=(LayerConfig(window=64), LayerConfig(window=8), LayerConfig()))
        assert [g.window for g in groups_of(config, self.LIMITS)] == [None, 8, 64]
        assert group_of_layer(config) == (2, 1, 0)

    def test_allocation(self) -> None:
        config = model_config(tiny_config("gemma3_text"))
        groups = groups_of(config, self.LIMITS)
        arena = Arena("kv", limit_bytes=1 << 20)
        caches = allocate_caches(groups, KvLayout((3, 5)), self.LIMITS, arena)
        assert [cache.k.shape for cache in caches] == [(n, 2, 16, 32) for n in (5, 5, 3, 5, 5, 3)]
        assert arena.allocated_bytes == 3 * groups[0].bytes_per_block + 5 * groups[1].bytes_per_block
        assert not caches[0].k.any()
        with pytest.raises(ConfigError, match="1 groups, the model 2"):
            allocate_caches(groups, KvLayout((3,)), self.LIMITS, arena)
        with pytest.raises(CapacityError, match="do not fit"):
            allocate_caches(groups, KvLayout((3, 500)), self.LIMITS, arena)
