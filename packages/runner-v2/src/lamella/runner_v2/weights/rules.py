"""Which tensors a model has, how they are cut, and what a file format calls them. All of it is data.

ModelConfig --parts_of--> {canonical key: Part(shape, shard)}
canonical key --Naming.source--> name in the file (and which slice of it, where experts are stacked)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from lamella.runner_v2.config import LayerConfig, ModelConfig
from lamella.runner_v2.weights.slots import Part, Shard

_KEY = re.compile(r"layers\.(\d+)\.(?:experts\.(\d+)\.)?(\w+)")


class Source(NamedTuple):
    """Where a canonical key lies in the files."""

    name: str
    """The file's tensor."""
    expert: int | None = None
    """Index along the first dimension of a tensor that stacks all experts; None: the whole tensor."""


@dataclass(frozen=True)
class Naming:
    """Names of one file format and family.

    names maps canonical keys, with {i} for the layer and {e} for the expert, to names in the file. Where a file stacks
    the experts, the name lacks {e} and the expert's index selects the slice.
    """

    names: Mapping[str, str]
    ignorable: tuple[str, ...] = ()
    """Regular expressions of names that carry nothing the model needs."""

    def source(self, key: str) -> Source | None:
        """Where the key lies; None: this format has no name for it."""
        match = _KEY.fullmatch(key)
        if match is None:
            name = self.names.get(key)
            return None if name is None else Source(name)
        layer, expert, field = match.groups()
        pattern = f"layers.{{i}}.experts.{{e}}.{field}" if expert is not None else f"layers.{{i}}.{field}"
        template = self.names.get(pattern)
        if template is None:
            return None
        stacked = expert is not None and "{e}" not in template
        return Source(template.format(i=layer, e=expert), int(expert) if stacked and expert is not None else None)

    def ignores(self, name: str) -> bool:
        """Is a tensor of this name known to be unneeded?"""
        return any(re.fullmatch(pattern, name) for pattern in self.ignorable)


def parts_of(config: ModelConfig) -> dict[str, Part]:
    """Every weight of the model by canonical key, with its shape in the whole model and the way it is cut.

    Attention is cut by heads, the MLP and each expert by intermediate width, the vocabulary by rows. Biases of o and
    down join partial sums, so only the first rank has them.
    """
    hidden, vocab = config.hidden_size, config.vocab_size
    parts = [Part("embed", (vocab, hidden), Shard("vocab")), Part("final_norm", (hidden,))]
    if not config.tie_embeddings:
        parts.append(Part("lm_head", (vocab, hidden), Shard("vocab")))
    for idx, layer in enumerate(config.layers):
        parts.extend(_layer_parts(config, layer, f"layers.{idx}"))
    return {part.key: part for part in parts}


def _layer_parts(config: ModelConfig, layer: LayerConfig, prefix: str) -> Iterator[Part]:
    hidden, head_dim = config.hidden_size, config.head_dim
    q_rows, kv_rows = config.num_heads * head_dim, config.num_kv_heads * head_dim
    by_head = Shard("rows", head_dim)
    yield Part(f"{prefix}.attn_norm", (hidden,))
    for name, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
        yield Part(f"{prefix}.{name}", (rows, hidden), by_head)
        if config.qkv_bias:
            yield Part(f"{prefix}.{name}_bias", (rows,), by_head)
    yield Part(f"{prefix}.o", (hidden, q_rows), Shard("columns", head_dim))
    if config.o_bias:
        yield Part(f"{prefix}.o_bias", (hidden,), Shard("first"))
    if config.qk_norm:
        yield Part(f"{prefix}.q_norm", (head_dim,))
        yield Part(f"{prefix}.k_norm", (head_dim,))
    yield Part(f"{prefix}.mlp_norm", (hidden,))
    if config.sandwich_norms:
        yield Part(f"{prefix}.attn_post_norm", (hidden,))
        yield Part(f"{prefix}.mlp_post_norm", (hidden,))
    if layer.moe is None:
        yield from _mlp_parts(prefix, hidden, config.intermediate_size, config.mlp_bias)
        return
    yield Part(f"{prefix}.router", (layer.moe.num_experts, hidden))
    for expert in range(layer.moe.num_experts):
        yield from _mlp_parts(f"{prefix}.experts.{expert}", hidden, layer.moe.intermediate_size, bias=False)


def _mlp_parts(prefix: str, hidden: int, intermediate: int, bias: bool) -> Iterator[Part]:
    for name in ("gate", "up"):
        yield Part(f"{prefix}.{name}", (intermediate, hidden), Shard("rows"))
        if bias:
            yield Part(f"{prefix}.{name}_bias", (intermediate,), Shard("rows"))
    yield Part(f"{prefix}.down", (hidden, intermediate), Shard("columns"))
    if bias:
        yield Part(f"{prefix}.down_bias", (hidden,), Shard("first"))
