"""A model put together by hand around chosen providers, and steps for it: no runner, no scheduler.

model = Assembled(path, providers, torch.bfloat16)
logits = model.step(step_of(ids, [(0, 0, 30), (1, 12, 1)]))
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from lamella.runner_v2.attention.metadata import AttentionLimits
from lamella.runner_v2.attention.registry import choose_backend
from lamella.runner_v2.inputs import InputBatch, ModelInput
from lamella.runner_v2.kv_cache import allocate_caches, group_of_layer, groups_of, windows_of
from lamella.runner_v2.layers.decoder import Carried
from lamella.runner_v2.layers.materials import Materials
from lamella.runner_v2.layers.rotary import make_table
from lamella.runner_v2.memory import Arena
from lamella.runner_v2.models.decoder import DecoderModel
from lamella.runner_v2.ops.spec import Provider
from lamella.runner_v2.ops.table import OpTable
from lamella.runner_v2.parallel.groups import SoloGroup
from lamella.runner_v2.step import KvLayout
from lamella.runner_v2.testing.attention_cases import make_batch, on_device
from lamella.runner_v2.testing.poison import poison
from lamella.runner_v2.weights.loader import load
from lamella.runner_v2.weights.open import open_checkpoint
from lamella.runner_v2.weights.rules import parts_of
from lamella.runner_v2.weights.store import WeightStore

MAX_LEN = 256
MAX_TOKENS = 160
KERNEL_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
"""Fields of a tiny config.json whose widths the kernels of devices serve."""
_MAX_ROWS = 8
_BLOCK_SIZE = 16
_BLOCKS_OF_ROW = MAX_LEN // _BLOCK_SIZE


class Assembled:
    """A model with its caches, in which every row owns a run of blocks."""

    def __init__(
        self,
        path: Path,
        providers: Sequence[Provider],
        dtype: torch.dtype,
        kv_dtype: str = "auto",
        device: str = "cpu",
    ) -> None:
        checkpoint = open_checkpoint(path)
        self.config = config = checkpoint.config
        self.device = device
        self.table = OpTable(providers)
        limits = AttentionLimits(
            device=device,
            dtype=dtype,
            kv_dtype=dtype,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.attention_scale,
            softcap=config.attention_softcap,
            block_size=_BLOCK_SIZE,
            windows=windows_of(config),
            max_num_rows=_MAX_ROWS,
            max_num_tokens=MAX_TOKENS,
            max_model_len=MAX_LEN,
        )
        choice = choose_backend(self.table.providers, limits, kv_dtype, False)
        self.backend, self.num_groups = choice.backend, len(limits.windows)
        materials = Materials(
            config=config,
            parts=parts_of(config),
            format_of=checkpoint.format_of,
            table=self.table,
            group=SoloGroup(),
            attention=choice.backend,
            limits=choice.limits,
            ropes=tuple(make_table(rope, config.head_dim, MAX_LEN, MAX_LEN, device) for rope in config.ropes),
            device=device,
            dtype=dtype,
        )
        self.model = DecoderModel(materials, group_of_layer(config))
        load(checkpoint, self.model.slots(), WeightStore(Arena("weights", device)))
        checkpoint.close()
        groups = groups_of(config, choice.limits)
        layout = KvLayout(num_blocks=(_MAX_ROWS * _BLOCKS_OF_ROW + 1,) * len(groups))
        self.caches = allocate_caches(groups, layout, choice.limits, Arena("kv", device))
        for cache in self.caches:
            for pool in cache:
                poison(pool.view(torch.uint8).fill_(255) if pool.dtype == torch.float8_e4m3fn else pool)

    def step(self, batch: InputBatch, drop_ahead: bool = False) -> torch.Tensor:
        """Logits behind every token. drop_ahead: as at the border between two stages of a pipeline."""
        return self.forward(self.prepared(batch), drop_ahead)

    def prepared(self, batch: InputBatch) -> InputBatch:
        """The step on the model's device, the same tables and slots in every group."""
        batch = on_device(batch, self.device)
        return batch._replace(
            block_tables=batch.block_tables * self.num_groups, slot_mapping=batch.slot_mapping * self.num_groups
        )

    def forward(self, batch: InputBatch, drop_ahead: bool = False) -> torch.Tensor:
        """Plans, layers and logits of a prepared step; nothing else, so that it can be recorded."""
        plans = tuple(self.backend.plan(batch, group) for group in range(self.num_groups))
        inputs = ModelInput(batch.token_ids, batch.positions, plans, self.caches)
        carried = self.model.embed(inputs)
        for layer in self.model.layers:
            carried = layer(Carried(carried.hidden) if drop_ahead else carried, inputs)
        # every token has logits, so the indices say no more than how many there are
        return self.model.finish(carried, batch.positions)


def step_of(ids: torch.Tensor, rows: Sequence[tuple[int, int, int]], num_single: int = 0) -> InputBatch:
    """rows: (row of ids, tokens before, tokens of the step)."""
    tables = [[1 + row * _BLOCKS_OF_ROW + i for i in range(_BLOCKS_OF_ROW)] for row, _, _ in rows]
    batch = make_batch([(start + count, count) for _, start, count in rows], tables, _BLOCK_SIZE)
    token_ids = torch.cat([ids[row, start : start + count] for row, start, count in rows]).int()
    return batch._replace(token_ids=token_ids, num_single=num_single)


def padded(batch: InputBatch, num_rows: int) -> InputBatch:
    """The same step with rows behind it that stand for nothing, as a recorded one has."""

    def longer(tensor: torch.Tensor, value: int) -> torch.Tensor:
        return torch.cat([tensor, tensor.new_full((num_rows, *tensor.shape[1:]), value)])

    return batch._replace(
        num_tokens=batch.num_tokens + num_rows,
        num_rows=batch.num_rows + num_rows,
        token_ids=longer(batch.token_ids, 0),
        positions=longer(batch.positions, 0),
        query_start=torch.cat([batch.query_start, batch.query_start[-1] + torch.arange(1, num_rows + 1)]).int(),
        seq_lens=longer(batch.seq_lens, 0),
        block_tables=(longer(batch.block_tables[0], 0),),
        slot_mapping=(longer(batch.slot_mapping[0], -1),),
    )


def mixed_steps(vocab_size: int) -> list[InputBatch]:
    """Long and short chunks, rows that decode, both together."""
    ids = torch.randint(0, vocab_size, (4, MAX_LEN), generator=torch.Generator().manual_seed(2))
    return [
        step_of(ids, [(0, 0, 90)]),
        step_of(ids, [(1, 0, 9), (2, 0, 40)]),
        step_of(ids, [(0, 90, 1), (1, 9, 1), (2, 40, 1)], num_single=3),
        step_of(ids, [(1, 10, 1), (0, 91, 1), (2, 41, 30), (3, 0, 17)], num_single=2),
        step_of(ids, [(2, 71, 1), (3, 17, 1)]),
        step_of(ids, [(1, 11, 1), (0, 92, 70)], num_single=1),
    ]
