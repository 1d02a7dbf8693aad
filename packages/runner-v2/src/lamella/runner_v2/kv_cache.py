"""Which layers share a KV group, and the memory of the groups' blocks.

    layers   0 sliding   1 sliding   2 full   3 sliding   ...
    groups   "full": (2, ...)        "sliding": (0, 1, 3, ...)        one group per window length

A group's pool is one tensor pair per layer, [num_blocks, num_kv_heads, block_size, head_dim]; one block id means the
same block in all layers of the group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lamella.runner_v2.attention.metadata import AttentionLimits
from lamella.runner_v2.config import ModelConfig
from lamella.runner_v2.errors import CapacityError, ConfigError
from lamella.runner_v2.inputs import LayerCache
from lamella.runner_v2.memory import Arena
from lamella.runner_v2.step import GroupKind, KvGroup, KvLayout

NULL_BLOCK = 0
"""Never handed out; stands in tables where there is nothing to read."""


def groups_of(config: ModelConfig, limits: AttentionLimits) -> tuple[KvGroup, ...]:
    """The groups of a model on this rank: full attention first, then one per window length, shortest first."""
    format_name = str(limits.kv_dtype).removeprefix("torch.")
    groups = []
    for window in windows_of(config):
        layers = tuple(i for i, layer in enumerate(config.layers) if layer.window == window)
        bytes_per_block = len(layers) * bytes_per_layer_block(limits)
        kind: GroupKind = "full" if window is None else "sliding"
        name = kind if window is None else f"{kind}_{window}"
        groups.append(KvGroup(name, kind, limits.block_size, bytes_per_block, layers, window, format_name))
    return tuple(groups)


def windows_of(config: ModelConfig) -> tuple[int | None, ...]:
    """Window of each group, in the groups' order."""
    return tuple(sorted({layer.window for layer in config.layers}, key=lambda window: window or 0))


def group_of_layer(config: ModelConfig) -> tuple[int, ...]:
    """Index of each layer's group."""
    windows = windows_of(config)
    return tuple(windows.index(layer.window) for layer in config.layers)


def bytes_per_layer_block(limits: AttentionLimits) -> int:
    """Keys and values of one block in one layer."""
    return 2 * limits.num_kv_heads * limits.block_size * limits.head_dim * limits.kv_dtype.itemsize


def allocate_caches(
    groups: Sequence[KvGroup], layout: KvLayout, limits: AttentionLimits, arena: Arena
) -> tuple[LayerCache, ...]:
    """Every layer's cache, filled with zeros.

    ConfigError if the layout does not fit the groups, CapacityError if memory does not suffice.
    """
    if len(layout.num_blocks) != len(groups):
        raise ConfigError(f"the layout has {len(layout.num_blocks)} groups, the model {len(groups)}")
    for group, num_blocks in zip(groups, layout.num_blocks, strict=True):
        if num_blocks < 2:
            raise CapacityError(f"group {group.name} needs at least 2 blocks (one is the null block), got {num_blocks}")
    caches: dict[int, LayerCache] = {}
    for group, num_blocks in zip(groups, layout.num_blocks, strict=True):
        shape = (num_blocks, limits.num_kv_heads, limits.block_size, limits.head_dim)
        for layer in group.layers:
            caches[layer] = LayerCache(arena.zeros(shape, limits.kv_dtype), arena.zeros(shape, limits.kv_dtype))
    return tuple(caches[layer] for layer in sorted(caches))


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-num_tokens // block_size)


def pool_bytes(caches: Sequence[LayerCache]) -> int:
    """Memory of all layers' caches."""
    return sum(tensor.numel() * tensor.element_size() for cache in caches for tensor in _tensors(cache))


def _tensors(cache: LayerCache) -> tuple[torch.Tensor, ...]:
    return tuple(cache)
