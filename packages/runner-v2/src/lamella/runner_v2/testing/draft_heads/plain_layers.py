"""Parts of transformers for one token at a time, in float64: the definition, and nothing that makes it fast.

Shapes: an activation is a vector [width]; a linear layer's weight is [out, in]; queries, keys and values of one token
are [num_heads, head_dim]. Names of tensors are those of Llama's checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lamella.runner_v2.testing.draft_heads.checkpoint import Array

Visible = Callable[[int, int], bool]
"""(row of the query, row of the key) -> may the one see the other"""


def causal(query: int, key: int) -> bool:
    """A row sees itself and all rows before it."""
    return key <= query


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x / root of (mean of squares + eps), times weight, over the last axis."""
    scale = 1.0 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return np.asarray(x * scale * weight)


def silu(x: Array) -> Array:
    return np.asarray(x / (1.0 + np.exp(-x)))


def sigmoid(x: Array) -> Array:
    return np.asarray(1.0 / (1.0 + np.exp(-x)))


def softmax(x: Array) -> Array:
    weights = np.exp(x - np.max(x))
    return np.asarray(weights / np.sum(weights))


def rotate(heads: Array, position: int, theta: float, rotary_dim: int | None = None) -> Array:
    """RoPE (2104.09864) on the first `rotary_dim` numbers of each head (all of them if None), in Llama's pairing:
    number i with number i + rotary_dim / 2, by the angle position * theta^(-2i / rotary_dim)."""
    width = heads.shape[-1] if rotary_dim is None else rotary_dim
    turned: Array = heads.copy()
    for i in range(width // 2):
        angle = position * theta ** (-2.0 * i / width)
        first, second = heads[:, i], heads[:, i + width // 2]
        turned[:, i] = first * np.cos(angle) - second * np.sin(angle)
        turned[:, i + width // 2] = second * np.cos(angle) + first * np.sin(angle)
    return turned


class LayerShape(NamedTuple):
    """What a layer's weights do not tell."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    theta: float
    rotary_dim: int | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> LayerShape:
        """From the fields of a layer's config.json, old spelling (rope_theta) or new (rope_parameters)."""
        rope = config.get("rope_parameters") or {}
        kind = rope.get("rope_type", "default")
        assert kind == "default", f"the reference rotates by plain RoPE only, not {kind!r}"
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
        return cls(
            num_heads=config["num_attention_heads"],
            num_kv_heads=config.get("num_key_value_heads", config["num_attention_heads"]),
            head_dim=head_dim,
            eps=config["rms_norm_eps"],
            theta=rope.get("rope_theta", config.get("rope_theta", 10000.0)),
            rotary_dim=int(head_dim * part),
        )


class Weights:
    """The tensors below a prefix."""

    def __init__(self, tensors: Mapping[str, Array], prefix: str = "") -> None:
        self.tensors = tensors
        self.prefix = prefix

    def below(self, prefix: str) -> Weights:
        return Weights(self.tensors, self.prefix + prefix)

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.tensors

    def __getitem__(self, name: str) -> Array:
        return self.tensors[self.prefix + name]

    def linear(self, name: str, x: Array) -> Array:
        """weight @ x, plus the bias if there is one."""
        y = self[f"{name}.weight"] @ x
        return np.asarray(y + self[f"{name}.bias"] if f"{name}.bias" in self else y)


def gated_mlp(weights: Weights, x: Array) -> Array:
    """down(silu(gate x) * up x)"""
    return weights.linear("down_proj", silu(weights.linear("gate_proj", x)) * weights.linear("up_proj", x))


def query(weights: Weights, shape: LayerShape, x: Array, position: int) -> Array:
    """Rotated query heads [num_heads, head_dim] of one token; normed per head where the layer has q_norm."""
    heads = weights.linear("q_proj", x).reshape(shape.num_heads, shape.head_dim)
    if "q_norm.weight" in weights:
        heads = rms_norm(heads, weights["q_norm.weight"], shape.eps)
    return rotate(heads, position, shape.theta, shape.rotary_dim)


def key_value(weights: Weights, shape: LayerShape, x: Array, position: int) -> tuple[Array, Array]:
    """Rotated key heads and value heads, each [num_kv_heads, head_dim], of one token."""
    keys = weights.linear("k_proj", x).reshape(shape.num_kv_heads, shape.head_dim)
    if "k_norm.weight" in weights:
        keys = rms_norm(keys, weights["k_norm.weight"], shape.eps)
    values = weights.linear("v_proj", x).reshape(shape.num_kv_heads, shape.head_dim)
    return rotate(keys, position, shape.theta, shape.rotary_dim), values


def attend(queries: Array, seen: Sequence[tuple[Array, Array]]) -> Array:
    """Softmax attention of one token's heads over the (key, value) heads that it may see -> [num_heads * head_dim].

    Query head h reads key head h // (num_heads / num_kv_heads); scores are divided by the root of head_dim.
    """
    num_heads, head_dim = queries.shape
    group = num_heads // seen[0][0].shape[0]
    mixed = []
    for head in range(num_heads):
        scores = np.array([queries[head] @ keys[head // group] for keys, _ in seen]) / np.sqrt(head_dim)
        shares = softmax(scores)
        mixed.append(sum(share * values[head // group] for share, (_, values) in zip(shares, seen)))
    return np.concatenate(mixed)


def self_attention(
    weights: Weights, shape: LayerShape, inputs: Sequence[Array], positions: Sequence[int], visible: Visible = causal
) -> list[Array]:
    """Attention of rows among themselves, with the output projection; inputs are already normed."""
    seen = [key_value(weights, shape, x, position) for x, position in zip(inputs, positions)]
    outputs = []
    for row, (x, position) in enumerate(zip(inputs, positions)):
        held = [seen[other] for other in range(len(inputs)) if visible(row, other)]
        outputs.append(weights.linear("o_proj", attend(query(weights, shape, x, position), held)))
    return outputs


def decoder_layer(
    weights: Weights, shape: LayerShape, rows: Sequence[Array], positions: Sequence[int], visible: Visible = causal
) -> list[Array]:
    """Llama's decoder layer (Qwen3's where there are q_norm and k_norm) on all rows of a sequence."""
    normed = [rms_norm(x, weights["input_layernorm.weight"], shape.eps) for x in rows]
    mixed = self_attention(weights.below("self_attn."), shape, normed, positions, visible)
    return [finish_layer(weights, shape, x, y) for x, y in zip(rows, mixed)]


def finish_layer(weights: Weights, shape: LayerShape, residual: Array, attended: Array) -> Array:
    """The second half of a decoder layer: add attention's output, norm, MLP, add."""
    x = residual + attended
    normed = rms_norm(x, weights["post_attention_layernorm.weight"], shape.eps)
    return np.asarray(x + gated_mlp(weights.below("mlp."), normed))
