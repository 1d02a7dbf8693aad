"""Puts a model together: config, providers, attention backend, layers, weights. Everything is chosen here, once."""

from __future__ import annotations

from typing import NamedTuple

import torch

from lamella.runner_v2.attention.metadata import AttentionLimits
from lamella.runner_v2.attention.registry import BackendChoice, choose_backend
from lamella.runner_v2.config import ModelConfig, RunnerConfig
from lamella.runner_v2.errors import ConfigError
from lamella.runner_v2.kv_cache import group_of_layer, groups_of, windows_of
from lamella.runner_v2.layers.decoder import Carried
from lamella.runner_v2.layers.materials import Materials
from lamella.runner_v2.layers.rotary import make_table
from lamella.runner_v2.memory import Arena
from lamella.runner_v2.models.decoder import DecoderModel
from lamella.runner_v2.ops.providers.registry import create_providers
from lamella.runner_v2.ops.table import OpTable
from lamella.runner_v2.parallel.collectives import Collectives
from lamella.runner_v2.stack import Hooks, LayerStack
from lamella.runner_v2.step import KvGroup
from lamella.runner_v2.weights.loader import load
from lamella.runner_v2.weights.rules import parts_of
from lamella.runner_v2.weights.slots import Checkpoint
from lamella.runner_v2.weights.store import WeightStore


class Assembly(NamedTuple):
    """A loaded model of one rank."""

    config: ModelConfig
    model: DecoderModel
    stack: LayerStack[Carried]
    table: OpTable
    backend: BackendChoice
    groups: tuple[KvGroup, ...]
    store: WeightStore


def assemble(config: RunnerConfig, checkpoint: Checkpoint, group: Collectives, hooks: Hooks, max_len: int) -> Assembly:
    """Build the layers and load their weights. max_len: longest row, drafts included.

    RunnerError with the reason if this rank cannot run the model.
    """
    model_config = checkpoint.config
    limits = _limits(config, model_config, group.size, max_len)
    table = OpTable(create_providers(config, limits.dtype))
    backend = choose_backend(table.providers, limits, config.kv_dtype, config.batch_invariant)
    materials = Materials(
        config=model_config,
        parts=parts_of(model_config),
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
    model = DecoderModel(materials, group_of_layer(model_config))
    store = WeightStore(Arena("weights", config.device))
    load(checkpoint, model.slots(), store, group.rank, group.size, config.progress, config.device)
    groups = groups_of(model_config, backend.limits)
    return Assembly(model_config, model, LayerStack(model.layers, hooks), table, backend, groups, store)


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


def _limits(config: RunnerConfig, model: ModelConfig, tp_size: int, max_len: int) -> AttentionLimits:
    if model.num_heads % tp_size:
        raise ConfigError(f"tensor parallel size {tp_size} does not divide the model's {model.num_heads} heads")
    dtype = activation_dtype(config, model)
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
        windows=windows_of(model),
        max_num_rows=config.max_num_rows,
        max_num_tokens=config.max_num_tokens,
        max_model_len=max_len,
    )
