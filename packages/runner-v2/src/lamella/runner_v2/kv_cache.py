"""Which layers share a KV group, and the memory of the groups' blocks.

    layers   0 sliding   1 sliding   2 full   3 sliding   ...
    groups   "full": (2, ...)        "sliding": (0, 1, 3, ...)        one group per window length

A group's pool is one tensor pair per layer, [num_blocks, num_kv_heads, block_size, head_dim]; one block id means the
same block in all layers of the group.

Layers of a network that drafts come behind the model's own and join its groups, whatever their widths are:

    layers   0 .. n - 1 of the model   n, n + 1, ... of the drafting network
    so a block holds the KV of both: it is paged, found by its prefix, preempted and copied between tiers as one
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from lamella.runner_v2.attention.metadata import AttentionLimits
from lamella.runner_v2.config import ModelConfig
from lamella.runner_v2.errors import CapacityError, ConfigError
from lamella.runner_v2.inputs import LayerCache
from lamella.runner_v2.memory import Arena
from lamella.runner_v2.step import GroupKind, KvGroup, KvLayout

NULL_BLOCK = 0
"""Never handed out; stands in tables where there is nothing to read."""


class LayerRows(NamedTuple):
    """What one layer keeps of a token on this rank."""

    window: int | None
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def block_bytes(self, block_size: int) -> int:
        """Keys and values of one block."""
        return 2 * self.num_kv_heads * block_size * self.head_dim * self.dtype.itemsize


def rows_of(config: ModelConfig, limits: AttentionLimits) -> tuple[LayerRows, ...]:
    """Those of a model's layers on this rank."""
    return tuple(
        LayerRows(layer.window, limits.num_kv_heads, limits.head_dim, limits.kv_dtype) for layer in config.layers
    )


def groups_of(config: ModelConfig, limits: AttentionLimits, drafting: Sequence[LayerRows] = ()) -> tuple[KvGroup, ...]:
    """The groups of a model on this rank: full attention first, then one per window length, shortest first. drafting:
    the layers behind the model's own."""
    layers = (*rows_of(config, limits), *drafting)
    size = limits.block_size
    groups = []
    for window in _windows(layer.window for layer in layers):
        members = tuple(i for i, layer in enumerate(layers) if layer.window == window)
        num_bytes = sum(layers[i].block_bytes(size) for i in members)
        kind: GroupKind = "full" if window is None else "sliding"
        name = kind if window is None else f"{kind}_{window}"
        formats = sorted({str(layers[i].dtype).removeprefix("torch.") for i in members})
        groups.append(KvGroup(name, kind, size, num_bytes, members, window, "+".join(formats)))
    return tuple(groups)


def windows_of(*configs: ModelConfig) -> tuple[int | None, ...]:
    """Window of each group, in the groups' order, of models that share them."""
    return _windows(layer.window for config in configs for layer in config.layers)


def group_of_layer(config: ModelConfig, windows: Sequence[int | None] | None = None) -> tuple[int, ...]:
    """Index of each layer's group. windows: of the groups; None: those of the model alone."""
    known = windows_of(config) if windows is None else tuple(windows)
    return tuple(known.index(layer.window) for layer in config.layers)


def allocate_caches(
    groups: Sequence[KvGroup],
    layout: KvLayout,
    limits: AttentionLimits,
    arena: Arena,
    drafting: Sequence[LayerRows] = (),
) -> tuple[LayerCache, ...]:
    """Every layer's cache, filled with zeros. limits: of the model; drafting: the layers behind its own.

    ConfigError if the layout does not fit the groups, CapacityError if memory does not suffice.
    """
    if len(layout.num_blocks) != len(groups):
        raise ConfigError(f"the layout has {len(layout.num_blocks)} groups, the model {len(groups)}")
    for group, num_blocks in zip(groups, layout.num_blocks, strict=True):
        if num_blocks < 2:
            raise CapacityError(f"group {group.name} needs at least 2 blocks (one is the null block), got {num_blocks}")
    first_drafting = sum(len(group.layers) for group in groups) - len(drafting)
    caches: dict[int, LayerCache] = {}
    for group, num_blocks in zip(groups, layout.num_blocks, strict=True):
        for layer in group.layers:
            rows = LayerRows(group.window, limits.num_kv_heads, limits.head_dim, limits.kv_dtype)
            if layer >= first_drafting:
                rows = drafting[layer - first_drafting]
            shape = (num_blocks, rows.num_kv_heads, limits.block_size, rows.head_dim)
            caches[layer] = LayerCache(arena.zeros(shape, rows.dtype), arena.zeros(shape, rows.dtype))
    return tuple(caches[layer] for layer in sorted(caches))


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-num_tokens // block_size)


def pool_bytes(caches: Sequence[LayerCache]) -> int:
    """Memory of all layers' caches."""
    return sum(tensor.numel() * tensor.element_size() for cache in caches for tensor in _tensors(cache))


def _tensors(cache: LayerCache) -> tuple[torch.Tensor, ...]:
    return tuple(cache)


def _windows(windows: Iterable[int | None]) -> tuple[int | None, ...]:
    return tuple(sorted(set(windows), key=lambda window: window or 0))
