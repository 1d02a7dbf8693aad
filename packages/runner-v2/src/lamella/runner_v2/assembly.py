"""Puts a model together: config, providers, attention backend, layers, weights. Everything is chosen here, once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from lamella.runner_v2.attention.metadata import AttentionLimits
from lamella.runner_v2.attention.registry import BackendChoice, choose_backend
from lamella.runner_v2.config import ModelConfig, RunnerConfig
from lamella.runner_v2.errors import ConfigError
from lamella.runner_v2.kv_cache import LayerRows, group_of_layer, groups_of, rows_of, windows_of
from lamella.runner_v2.layers.decoder import Carried
from lamella.runner_v2.layers.materials import Materials
from lamella.runner_v2.layers.rotary import make_table
from lamella.runner_v2.memory import Arena
from lamella.runner_v2.models.decoder import DecoderModel
from lamella.runner_v2.models.draft import DraftNetwork, DraftSource
from lamella.runner_v2.ops.providers.registry import create_providers
from lamella.runner_v2.ops.table import OpTable
from lamella.runner_v2.parallel.collectives import Collectives
from lamella.runner_v2.stack import Hooks, LayerStack
from lamella.runner_v2.step import KvGroup
from lamella.runner_v2.weights.loader import load
from lamella.runner_v2.weights.rules import parts_of
from lamella.runner_v2.weights.slots import Checkpoint, Part
from lamella.runner_v2.weights.store import WeightStore


class DraftAssembly(NamedTuple):
    """A loaded network that drafts. Its layers keep KV behind the model's own, in the same blocks."""

    method: str
    config: ModelConfig
    network: DraftNetwork
    stack: LayerStack[Carried]
    table: OpTable
    backend: BackendChoice
    rows: tuple[LayerRows, ...]
    """Of its layers."""


class Assembly(NamedTuple):
    """A loaded model of one rank."""

    config: ModelConfig
    model: DecoderModel
    stack: LayerStack[Carried]
    table: OpTable
    backend: BackendChoice
    groups: tuple[KvGroup, ...]
    store: WeightStore
    draft: DraftAssembly | None = None

    @property
    def draft_rows(self) -> tuple[LayerRows, ...]:
        """What the layers behind the model's own keep."""
        return () if self.draft is None else self.draft.rows


def assemble(
    config: RunnerConfig,
    checkpoint: Checkpoint,
    group: Collectives,
    hooks: Hooks,
    max_len: int,
    draft: DraftSource | None = None,
) -> Assembly:
    """Build the layers and load their weights. max_len: longest row, drafts included. draft: a network that drafts.

    RunnerError with the reason if this rank cannot run the model.
    """
    model_config = checkpoint.config
    dtype = activation_dtype(config, model_config)
    drafting = None if draft is None else draft.checkpoint.config
    windows = windows_of(*(one for one in (model_config, drafting) if one is not None))
    limits = _limits(config, model_config, group.size, max_len, dtype, windows)
    table = OpTable(create_providers(config, dtype))
    backend = choose_backend(table.providers, limits, config.kv_dtype, config.batch_invariant)
    materials = _materials(config, checkpoint, parts_of(model_config), table, group, backend, max_len)
    model = DecoderModel(materials, group_of_layer(model_config, windows))
    store = WeightStore(Arena("weights", config.device))
    load(checkpoint, model.slots(), store, group.rank, group.size, config.progress, config.device)
    loaded = None
    if draft is not None:
        loaded = _assemble_draft(config, draft, group, hooks, max_len, dtype, windows, store, model_config.num_layers)
    groups = groups_of(model_config, backend.limits, () if loaded is None else loaded.rows)
    stack = LayerStack(model.layers, hooks)
    return Assembly(model_config, model, stack, table, backend, groups, store, loaded)


def _assemble_draft(
    config: RunnerConfig,
    draft: DraftSource,
    group: Collectives,
    hooks: Hooks,
    max_len: int,
    dtype: torch.dtype,
    windows: tuple[int | None, ...],
    store: WeightStore,
    first_layer: int,
) -> DraftAssembly:
    """first_layer: what its first one is to those who wait for layers."""
    model_config = draft.checkpoint.config
    limits = _limits(config, model_config, group.size, max_len, dtype, windows)
    # of each row the token that the step chose comes on top of those that it computed
    limits = limits._replace(max_num_tokens=limits.max_num_tokens + limits.max_num_rows)
    table = OpTable(create_providers(config, dtype))
    backend = choose_backend(table.providers, limits, config.kv_dtype, config.batch_invariant)
    materials = _materials(config, draft.checkpoint, draft.parts, table, group, backend, max_len)
    network = draft.build(materials, group_of_layer(model_config, windows))
    slots = [replace(slot, name=f"draft.{slot.name}") for slot in network.slots()]
    load(draft.checkpoint, slots, store, group.rank, group.size, config.progress, config.device)
    before = tuple(partial(_behind, wait, first_layer) for wait in hooks.before)
    stack = LayerStack(network.layers, Hooks(before=before))
    rows = rows_of(model_config, backend.limits)
    return DraftAssembly(draft.method, model_config, network, stack, table, backend, rows)


def _behind(wait: Callable[[int], None], first_layer: int, layer_idx: int) -> None:
    wait(first_layer + layer_idx)


def _materials(
    config: RunnerConfig,
    checkpoint: Checkpoint,
    parts: Mapping[str, Part],
    table: OpTable,
    group: Collectives,
    backend: BackendChoice,
    max_len: int,
) -> Materials:
    model_config = checkpoint.config
    return Materials(
        config=model_config,
        parts=parts,
        format_of=checkpoint.format_of,
        table=table,
        group=group,
        attention=backend.backend,
        limits=backend.limits,
        ropes=tuple(
            make_table(rope, model_config.head_dim, max_len, config.max_model_len, config.device)
            for rope in model_config.ropes
        ),
        device=config.device,
        dtype=backend.limits.dtype,
    )


def activation_bytes(config: RunnerConfig, model: ModelConfig) -> int:
    """Upper estimate of what a step of max_num_tokens needs beside weights and cache."""
    heads = model.num_heads + 2 * model.num_kv_heads
    widest = max(model.intermediate_size, *(layer.moe.intermediate_size for layer in model.layers if layer.moe), 0)
    itemsize = activation_dtype(config, model).itemsize
    per_token = itemsize * (4 * model.hidden_size + 2 * heads * model.head_dim + 3 * widest)
    per_logits_row = 4 * 2 * model.vocab_size
    return config.max_num_tokens * per_token + config.max_num_rows * (1 + config.max_num_drafts) * per_logits_row


def activation_dtype(config: RunnerConfig, model: ModelConfig) -> torch.dtype:
    """float32 on a CPU; with a device's kernels what was asked for, else the model's own 16-bit type, else bfloat16."""
    if torch.device(config.device).type == "cpu" and "cuda" not in (config.providers or ()):
        return torch.float32
    name = model.dtype if config.dtype == "auto" else config.dtype
    if config.dtype == "auto" and name not in ("bfloat16", "float16"):
        name = "bfloat16"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _limits(
    config: RunnerConfig,
    model: ModelConfig,
    tp_size: int,
    max_len: int,
    dtype: torch.dtype,
    windows: tuple[int | None, ...],
) -> AttentionLimits:
    if model.num_heads % tp_size:
        raise ConfigError(f"tensor parallel size {tp_size} does not divide the model's {model.num_heads} heads")
    return AttentionLimits(
        device=config.device,
        dtype=dtype,
        kv_dtype=dtype,
        num_heads=model.num_heads // tp_size,
        num_kv_heads=max(1, model.num_kv_heads // tp_size),
        head_dim=model.head_dim,
        scale=model.attention_scale,
        softcap=model.attention_softcap,
        block_size=config.block_size,
        windows=windows,
        max_num_rows=config.max_num_rows,
        max_num_tokens=config.max_num_tokens,
        max_model_len=max_len,
    )
