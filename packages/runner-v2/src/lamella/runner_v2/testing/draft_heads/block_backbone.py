"""The backbone of block drafters (DFlash, 2602.06036): all drafts of a step in one pass over a block of masks.

    target's hidden states at 0 .. P        a = [h_l1; h_l2; …]     c = hidden_norm(fc(a))      P + 1 rows of context
    block at P + 1 .. P + num_slots         x = embed([last token, MASK, MASK, …])

    each layer: q from norm(x); k, v from the context's c (unnormed by the layer) and from norm(x); rotation at the
    rows' own positions; the block sees the context, and itself both ways or, if the layer is causal, backwards.
    c is no input of the residual stream.  y = norm(x);  logits = lm_head(y)

A slot predicts the token at its own position (the anchor, slot 0, then predicts nothing), or that at the next one
(`sample_from_anchor`; then the anchor predicts too).

Sliding layers. In the authors' format a key is seen at a distance below sliding_window, the layer is causal by
is_causal, and a sliding layer is causal where that is not told. In the format of speculators only sliding layers are
causal, unless sliding_window_non_causal, and the window is counted from the anchor for the whole block: the last
sliding_window rows of context are seen by all slots. `window_rule` says which; "query" is what kernels offer.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

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
    attend,
    gated_mlp,
    key_value,
    query,
    rms_norm,
)
from lamella.runner_v2.testing.draft_heads.target import DraftEnds, Ends

MASK_ID = 1
"""The mask's token in tiny checkpoints."""


def backbone_config(
    head: str,
    *,
    style: str,
    num_layers: int,
    hidden_size: int,
    vocab_size: int,
    draft_vocab_size: int | None,
    target_layer_ids: Sequence[int],
    block_size: int,
    sliding_layers: Sequence[int],
    sliding_window: int,
    causal: bool | None,
    sample_from_anchor: bool,
    attention_bias: bool,
    target_path: str | None,
) -> dict[str, Any]:
    """config.json of speculators (`head` is its type there), or that of the authors of DFlash.

    target_layer_ids: outputs of these layers of the target are fused, counted from 0; speculators counts inputs, so
    that it writes each id one higher.
    """
    fields = layer_config(
        "qwen3",
        num_layers=num_layers,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        attention_bias=attention_bias,
    )
    fields["rope_parameters"] = OTHER_BASE
    fields["layer_types"] = [
        "sliding_attention" if index in sliding_layers else "full_attention" for index in range(num_layers)
    ]
    if sliding_layers:
        fields |= {"sliding_window": sliding_window, "use_sliding_window": True, "max_window_layers": 0}
    if style == "authors":
        assert draft_vocab_size is None, "the authors' format has no reduced vocabulary"
        config = {
            **fields,
            "architectures": ["DFlashDraftModel"],
            "num_target_layers": 8,
            "block_size": block_size,
            "dflash_config": {"mask_token_id": MASK_ID, "target_layer_ids": list(target_layer_ids)},
        }
        return config if causal is None else {**config, "is_causal": causal}
    assert style == "speculators", style
    # the default is that of the format: DFlash2's sliding layers look both ways
    non_causal = head == "dflash2" if causal is None else not causal
    return {
        "architectures": [{"dflash2": "DFlash2DraftModel", "dspark": "DSparkSpeculator"}.get(head, "DFlashSpeculator")],
        "speculators_model_type": head,
        "speculators_version": "0.9.0",
        "speculators_config": speculators_config(head, block_size - (0 if sample_from_anchor else 1), target_path),
        "transformer_layer_config": fields,
        "draft_vocab_size": draft_vocab_size or vocab_size,
        "block_size": block_size,
        "aux_hidden_state_layer_ids": [index + 1 for index in target_layer_ids],
        "mask_token_id": MASK_ID,
        "sliding_window_non_causal": non_causal,
        "sample_from_anchor": sample_from_anchor,
        "tie_word_embeddings": False,
    }


def backbone_shapes(config: dict[str, Any], num_aux: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a backbone's tensors; lm_head only where the vocabulary is reduced."""
    fields = config.get("transformer_layer_config", config)
    hidden = fields["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, num_aux * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for index in range(fields["num_hidden_layers"]):
        shapes |= layer_shapes(f"layers.{index}.", fields)
    draft_vocab = config.get("draft_vocab_size", fields["vocab_size"])
    if draft_vocab != fields["vocab_size"]:
        shapes["lm_head.weight"] = (draft_vocab, hidden)
    return shapes


def write_backbone(
    folder: str | Path,
    seed: int,
    config: dict[str, Any],
    shapes: dict[str, tuple[int, ...]],
    dtype: str,
) -> Path:
    """Write a head's folder, with the maps of a reduced vocabulary if it has one."""
    tensors: dict[str, Any] = dict(checkpoint.random_tensors(seed, shapes))
    fields = config.get("transformer_layer_config", config)
    if "lm_head.weight" in shapes:
        tensors |= checkpoint.draft_vocabulary(seed, fields["vocab_size"], config["draft_vocab_size"])
    return checkpoint.write(folder, config, tensors, dtype=dtype)


class Around(Protocol):
    """What surrounds attention and MLP of a layer: nothing, or local convolutions (DFlash2)."""

    def before(self, weights: Weights, normed: list[Array]) -> tuple[list[Array], Any]:
        """The rows that the inner part reads, and what `after` needs."""

    def after(self, weights: Weights, outputs: list[Array], kept: Any) -> list[Array]:
        """The rows that are added to the residual."""


class Nothing:
    """The inner parts as they are."""

    def before(self, weights: Weights, normed: list[Array]) -> tuple[list[Array], Any]:
        return normed, None

    def after(self, weights: Weights, outputs: list[Array], kept: Any) -> list[Array]:
        return outputs


class Backbone:
    """A block drafter's checkpoint, read."""

    def __init__(self, folder: str | Path, target: Ends | None, window_rule: str | None = None) -> None:
        self.config, tensors = checkpoint.read(folder)
        self.fields: dict[str, Any] = self.config.get("transformer_layer_config", self.config)
        self.of_speculators = "speculators_model_type" in self.config
        self.options: dict[str, Any] = {**self.config, **self.config.get("dflash_config", {})}
        self.shape = LayerShape.of(self.fields)
        self.weights = Weights(tensors)
        self.ends = DraftEnds(tensors, self.fields["vocab_size"], target)
        self.block_size: int = self.options["block_size"]
        self.window_rule = window_rule or ("anchor" if self.of_speculators else "query")
        assert self.window_rule in ("anchor", "query"), self.window_rule
        self.from_anchor: bool = self.config.get("sample_from_anchor", False)

    def hidden_states(
        self,
        hidden_states: Array,  # [num_context, num_aux * hidden_size]
        last_id: int,
        positions: Sequence[int] | None,  # [num_context]
        num_slots: int,
        around: Around | None = None,
    ) -> list[Array]:  # num_slots of [hidden_size]
        """The normed outputs of a block's slots, the anchor's first."""
        positions = list(positions) if positions is not None else list(range(len(hidden_states)))
        assert len(positions) == len(hidden_states) > 0, "one position for each hidden state"
        places = [positions[-1] + 1 + slot for slot in range(num_slots)]
        eps, fused = self.shape.eps, [self.weights.linear("fc", np.asarray(a, np.float64)) for a in hidden_states]
        context = [rms_norm(c, self.weights["hidden_norm.weight"], eps) for c in fused]
        scale = self.options.get("input_embedding_scale", 1.0)
        ids = [last_id] + [self.options["mask_token_id"]] * (num_slots - 1)
        rows = [self.ends.embedding[token] * scale for token in ids]
        for index in range(self.fields["num_hidden_layers"]):
            rows = self._layer(index, context, positions, rows, places, around or Nothing())
        return [rms_norm(x, self.weights["norm.weight"], eps) for x in rows]

    def logits(self, y: Array) -> Array:
        """[hidden_size] -> [draft_vocab_size], scaled and capped where the configuration says so."""
        logits = self.ends.output @ y * self.options.get("output_multiplier", 1.0)
        cap = self.options.get("final_logit_softcapping")
        return np.asarray(logits if cap is None else cap * np.tanh(logits / cap))

    def _layer(
        self,
        index: int,
        context: list[Array],
        positions: list[int],
        rows: list[Array],
        places: list[int],
        around: Around,
    ) -> list[Array]:
        weights, eps = self.weights.below(f"layers.{index}."), self.shape.eps
        attention = weights.below("self_attn.")
        normed = [rms_norm(x, weights["input_layernorm.weight"], eps) for x in rows]
        inputs, kept = around.before(weights.below("attention_conv."), normed)
        keys = [key_value(attention, self.shape, c, position) for c, position in zip(context, positions)]
        keys += [key_value(attention, self.shape, x, position) for x, position in zip(inputs, places)]
        mixed = []
        for slot, (x, place) in enumerate(zip(inputs, places)):
            visible = [self._sees_context(index, places[0], place, position) for position in positions]
            visible += [self._sees_slot(index, slot, other) for other in range(len(rows))]
            seen = [key for key, is_seen in zip(keys, visible) if is_seen]
            mixed.append(attention.linear("o_proj", attend(query(attention, self.shape, x, place), seen)))
        rows = [x + y for x, y in zip(rows, around.after(weights.below("attention_conv."), mixed, kept))]
        normed = [rms_norm(x, weights["post_attention_layernorm.weight"], eps) for x in rows]
        inputs, kept = around.before(weights.below("mlp_conv."), normed)
        mixed = [gated_mlp(weights.below("mlp."), x) for x in inputs]
        return [x + y for x, y in zip(rows, around.after(weights.below("mlp_conv."), mixed, kept))]

    def _slides(self, index: int) -> bool:
        return bool(self.fields["layer_types"][index] == "sliding_attention")

    def _sees_context(self, index: int, anchor: int, place: int, position: int) -> bool:
        if not self._slides(index):
            return True
        if self.window_rule == "anchor":
            return bool(position >= anchor - self.fields["sliding_window"])
        return bool(place - position < self.fields["sliding_window"])

    def _sees_slot(self, index: int, slot: int, other: int) -> bool:
        if self.of_speculators:
            causal = self._slides(index) and not self.config["sliding_window_non_causal"]
        else:
            causal = self.options.get("is_causal", self.options.get("causal", self._slides(index)))
        near = (
            not self._slides(index) or self.window_rule == "anchor" or abs(slot - other) < self.fields["sliding_window"]
        )
        return near and (other <= slot or not causal)
