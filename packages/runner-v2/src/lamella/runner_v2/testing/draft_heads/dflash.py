"""DFlash (2602.06036): the logits of a block's slots, each from the same pass and without regard to the others' ids.

Formats: that of speculators (type dflash, also with a reduced vocabulary) and that of the authors (z-lab). The
embedding is the target's; so is the output matrix, unless the vocabulary is reduced. What is computed is in
`block_backbone`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lamella.runner_v2.testing.draft_heads.block_backbone import (
    Backbone,
    backbone_config,
    backbone_shapes,
    write_backbone,
)
from lamella.runner_v2.testing.draft_heads.checkpoint import Array
from lamella.runner_v2.testing.draft_heads.target import Ends


def write_checkpoint(
    folder: str | Path,
    seed: int = 0,
    *,
    style: str = "speculators",
    num_layers: int = 2,
    hidden_size: int = 64,
    vocab_size: int = 320,
    draft_vocab_size: int | None = None,
    target_layer_ids: Sequence[int] = (0, 1),
    block_size: int = 4,
    sliding_layers: Sequence[int] = (),
    sliding_window: int = 3,
    causal: bool | None = None,
    sample_from_anchor: bool = False,
    attention_bias: bool = False,
    dtype: str = "float32",
    target_path: str | None = None,
) -> Path:
    """Write a random DFlash checkpoint; returns the folder.

    style: "speculators" or "authors". target_layer_ids: the target's layers, from 0, whose outputs are fused. causal:
    the direction inside a block, of all layers (authors) or of sliding ones (speculators); None: the format's default.
    draft_vocab_size None: the whole vocabulary, whose output matrix is the target's. sample_from_anchor: slots predict
    the next position (speculators). target_path: of the target, where the format has a place for it.
    """
    config = backbone_config(
        "dflash",
        style=style,
        num_layers=num_layers,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        target_layer_ids=target_layer_ids,
        block_size=block_size,
        sliding_layers=sliding_layers,
        sliding_window=sliding_window,
        causal=causal,
        sample_from_anchor=sample_from_anchor,
        attention_bias=attention_bias,
        target_path=target_path,
    )
    return write_backbone(folder, seed, config, backbone_shapes(config, len(target_layer_ids)), dtype)


def reference_logits(
    folder: str | Path,
    hidden_states: Array,  # [num_context, num_aux * hidden_size]
    last_id: int,
    positions: Sequence[int] | None = None,  # [num_context]
    *,
    num_drafts: int | None = None,
    target: Ends | None = None,
    window_rule: str | None = None,
) -> Array:  # [num_drafts, vocab_size]
    """Logits of the drafts behind `last_id`, the token that FOLLOWS the last hidden state, in the target's vocabulary.

    hidden_states: the target's, the fused layers side by side, of all positions before last_id's; positions (0, 1, … if
    None) are theirs, and the block's follow on the last one. num_drafts: fewer than the block holds make a shorter
    block, which changes what the first ones see; None: as many as it holds. window_rule: see `block_backbone`.
    """
    backbone = Backbone(folder, target, window_rule)
    unused = 0 if backbone.from_anchor else 1  # the anchor's slot
    num_slots = backbone.block_size if num_drafts is None else num_drafts + unused
    rows = backbone.hidden_states(hidden_states, last_id, positions, num_slots)
    return np.stack([backbone.ends.spread(backbone.logits(y)) for y in rows[unused:]])


def reference_drafts(
    folder: str | Path,
    hidden_states: Array,  # [num_context, num_aux * hidden_size]
    last_id: int,
    num_drafts: int | None = None,
    positions: Sequence[int] | None = None,  # [num_context]
    *,
    target: Ends | None = None,
) -> list[int]:
    """The greedy drafts; the lowest id wins a tie."""
    logits = reference_logits(folder, hidden_states, last_id, positions, num_drafts=num_drafts, target=target)
    return [int(np.argmax(row)) for row in logits]
