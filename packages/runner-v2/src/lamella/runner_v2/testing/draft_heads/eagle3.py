"""EAGLE-3 (2503.01840): one decoder layer over fused hidden states of the target, fed back on itself.

    row of the target's pass, hidden state at position p          token at p + 1
        a = [h_l1; h_l2; h_l3]  (inputs of those layers)              │
        g = fc(a)  (after input_norm over a, or fc_norm per chunk)    e = embed(token)
              └──────────────┬────────────────────────────────────────┘
        layer 0: q, k, v read [input_layernorm(e); hidden_norm(g)]; residual: g, or by norm_before_residual the norm
        layers 1..: plain
        x = the last layer's output;  logits = lm_head(norm(x)), of the token at p + 2
        fed back in place of g, position + 1, without fc: x, or norm(x) by norm_output

Formats: that of speculators (type eagle3; layers.0.*) and that of the authors (SafeAILab/EAGLE; midlayer.*, also as
pytorch_model.bin). With a reduced vocabulary, draft id i is target id i + d2t[i].
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lamella.runner_v2.testing.draft_heads import checkpoint
from lamella.runner_v2.testing.draft_heads.checkpoint import Array
from lamella.runner_v2.testing.draft_heads.layer_format import (
    OTHER_BASE,
    layer_config,
    layer_shapes,
    speculators_config,
)
from lamella.runner_v2.testing.draft_heads.plain_layers import (
    LayerShape,
    Weights,
    decoder_layer,
    finish_layer,
    rms_norm,
    self_attention,
)
from lamella.runner_v2.testing.draft_heads.target import DraftEnds, Ends


def write_checkpoint(
    folder: str | Path,
    seed: int = 0,
    *,
    style: str = "speculators",
    layer: str = "llama",
    num_layers: int = 1,
    hidden_size: int = 64,
    target_hidden_size: int | None = None,
    vocab_size: int = 320,
    draft_vocab_size: int | None = 96,
    aux_layer_ids: Sequence[int] | None = (1, 2, 3),
    norm_before_residual: bool = False,
    norm_before_fc: bool = False,
    fc_norm: bool = False,
    norm_output: bool = False,
    attention_bias: bool = False,
    own_embedding: bool = True,
    own_output: bool = True,
    binary: bool = False,
    dtype: str = "float32",
    target_path: str | None = None,
) -> Path:
    """Write a random EAGLE-3 checkpoint; returns the folder.

    style: "speculators" or "authors" (one layer, midlayer.*). layer: "llama", or "qwen3" with norms of query and key
    heads. draft_vocab_size None: the whole vocabulary, no d2t. aux_layer_ids None: not told, which means three layers
    by the rule (2, N // 2, N - 3) of a target with N layers. own_embedding, own_output False: the target's embedding,
    or the rows of its output matrix that are in the draft's vocabulary, are meant. binary: pytorch_model.bin, not
    safetensors. target_path: of the target, where the format has a place for it.
    """
    assert style in ("speculators", "authors"), style
    assert style == "speculators" or num_layers == 1, "the authors' format has one layer"
    num_aux = len(aux_layer_ids) if aux_layer_ids is not None else 3
    target_width = target_hidden_size or hidden_size
    draft_vocab = draft_vocab_size or vocab_size
    first = "midlayer." if style == "authors" else "layers.0."
    fields = layer_config(
        layer,
        num_layers=num_layers,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        attention_bias=attention_bias,
    )
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden_size, num_aux * target_width)}
    shapes |= layer_shapes(first, fields, input_size=2 * hidden_size)
    shapes[f"{first}hidden_norm.weight"] = (hidden_size,)
    for index in range(1, num_layers):
        shapes |= layer_shapes(f"layers.{index}.", fields)
    shapes["norm.weight"] = (hidden_size,)
    if own_output:
        shapes["lm_head.weight"] = (draft_vocab, hidden_size)
    if norm_before_fc:
        shapes["input_norm.weight"] = (num_aux * target_width,)
    if fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (target_width,) for i in range(num_aux)}
    if own_embedding:
        shapes["embed_tokens.weight"] = (vocab_size, hidden_size)
    tensors: dict[str, Any] = dict(checkpoint.random_tensors(seed, shapes))
    if draft_vocab_size is not None:
        tensors |= checkpoint.draft_vocabulary(seed, vocab_size, draft_vocab_size)
    flags = {
        "norm_before_residual": norm_before_residual,
        "norm_before_fc": norm_before_fc,
        "fc_norm": fc_norm,
        "norm_output": norm_output,
    }
    if style == "speculators":
        config: dict[str, Any] = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.9.0",
            "speculators_config": speculators_config("eagle3", 3, target_path),
            "transformer_layer_config": {**fields, "rope_parameters": OTHER_BASE},
            "draft_vocab_size": draft_vocab,
            "target_hidden_size": target_hidden_size,
            "eagle_aux_hidden_state_layer_ids": None if aux_layer_ids is None else list(aux_layer_ids),
            "tie_word_embeddings": False,
            **flags,
        }
    else:
        config = {**fields, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": draft_vocab}
        config |= {name: value for name, value in flags.items() if value and name != "norm_before_fc"}
        if layer == "llama":
            del config["head_dim"]  # the authors leave it to hidden_size / num_attention_heads
        if target_hidden_size is not None:
            config["target_hidden_size"] = target_hidden_size
        if aux_layer_ids is not None or norm_before_fc:
            config["eagle_config"] = {"use_aux_hidden_state": True, "norm_before_fc": norm_before_fc}
        if aux_layer_ids is not None:
            config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = list(aux_layer_ids)
    file = "pytorch_model.bin" if binary else "model.safetensors"
    return checkpoint.write(folder, config, tensors, dtype=dtype, file=file)


def reference_logits(
    folder: str | Path,
    hidden_states: Array,  # [num_rows, num_aux * target_hidden_size]
    token_ids: Sequence[int],  # [num_rows]
    positions: Sequence[int] | None = None,  # [num_rows]
    *,
    draft_ids: Sequence[int] = (),
    target: Ends | None = None,
) -> Array:  # [num_rows + len(draft_ids), vocab_size]
    """Logits of one sequence in the target's vocabulary, -inf where an id is not in the draft's.

    hidden_states: the target's, the auxiliary layers side by side, from the sequence's first position on. token_ids[i]
    is the token that FOLLOWS the one of hidden_states[i]; positions[i] (0, 1, … if None) is that of the hidden state.
    draft_ids: tokens fed back one after the other behind the last row, each with the hidden state that the row before
    put out; row num_rows + s holds the logits after draft_ids[s]. target: the target's ends, needed where the
    checkpoint has no embedding or no output matrix of its own.
    """
    head = _Head(folder, target)
    hidden_states = np.asarray(hidden_states, dtype=np.float64)
    assert len(hidden_states) == len(token_ids) > 0, "one token behind each hidden state"
    positions = list(positions) if positions is not None else list(range(len(token_ids)))
    inputs = [(head.ends.embedding[token], head.combine(a)) for token, a in zip(token_ids, hidden_states)]
    rows = [head.last_row(inputs[: row + 1], positions[: row + 1]) for row in range(len(token_ids))]
    for token in draft_ids:
        _, handed_on = rows[-1]
        inputs.append((head.ends.embedding[token], handed_on))
        positions.append(positions[-1] + 1)
        rows.append(head.last_row(inputs, positions))
    return np.stack([logits for logits, _ in rows])


def reference_drafts(
    folder: str | Path,
    hidden_states: Array,  # [num_rows, num_aux * target_hidden_size]
    token_ids: Sequence[int],  # [num_rows]
    num_drafts: int,
    positions: Sequence[int] | None = None,  # [num_rows]
    *,
    target: Ends | None = None,
) -> list[int]:
    """The greedy drafts behind the last row, ids of the target; the lowest id wins a tie."""
    drafts: list[int] = []
    while len(drafts) < num_drafts:
        logits = reference_logits(folder, hidden_states, token_ids, positions, draft_ids=drafts, target=target)
        drafts.append(int(np.argmax(logits[-1])))
    return drafts


class _Head:
    """A checkpoint, read by its tensors' names."""

    def __init__(self, folder: str | Path, target: Ends | None) -> None:
        self.config, tensors = checkpoint.read(folder)
        self.layer_config: dict[str, Any] = self.config.get("transformer_layer_config", self.config)
        self.shape = LayerShape.of(self.layer_config)
        self.weights = Weights(tensors)
        self.first = self.weights.below("midlayer." if "midlayer.hidden_norm.weight" in tensors else "layers.0.")
        self.ends = DraftEnds(tensors, self.layer_config["vocab_size"], target)

    def combine(self, a: Array) -> Array:
        """[num_aux * target_hidden_size] -> [hidden_size]"""
        eps = self.shape.eps
        if "input_norm.weight" in self.weights:
            a = rms_norm(a, self.weights["input_norm.weight"], eps)
        if "fc_norm.0.weight" in self.weights:
            factors: list[Array] = []
            while f"fc_norm.{len(factors)}.weight" in self.weights:
                factors.append(self.weights[f"fc_norm.{len(factors)}.weight"])
            chunks = np.split(a, len(factors))
            a = np.concatenate([rms_norm(chunk, factor, eps) for chunk, factor in zip(chunks, factors)])
        return self.weights.linear("fc", a)

    def last_row(self, inputs: Sequence[tuple[Array, Array]], positions: Sequence[int]) -> tuple[Array, Array]:
        """Logits [vocab_size] of the last of the rows (embedding, hidden), and the hidden state that it hands on."""
        eps, first = self.shape.eps, self.first
        normed = [rms_norm(g, first["hidden_norm.weight"], eps) for _, g in inputs]
        embedded = [rms_norm(e, first["input_layernorm.weight"], eps) for e, _ in inputs]
        both = [np.concatenate(pair) for pair in zip(embedded, normed)]
        attended = self_attention(first.below("self_attn."), self.shape, both, positions)
        residual = normed if self.config.get("norm_before_residual", False) else [g for _, g in inputs]
        rows = [finish_layer(first, self.shape, x, y) for x, y in zip(residual, attended)]
        for index in range(1, self.layer_config["num_hidden_layers"]):
            rows = decoder_layer(self.weights.below(f"layers.{index}."), self.shape, rows, positions)
        out = rms_norm(rows[-1], self.weights["norm.weight"], eps)
        handed_on = out if self.config.get("norm_output", False) else rows[-1]
        return self.ends.spread(self.ends.output @ out), handed_on
