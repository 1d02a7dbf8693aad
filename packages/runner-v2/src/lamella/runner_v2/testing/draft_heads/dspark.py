"""DSpark (2607.05147): DFlash's backbone, a Markov head that makes a draft depend on the one before, and confidences.

    h_k: normed output of slot k      x_k: the token before its draft (the anchor's, then drafts)      m = W1[x_k]
        vanilla   bias = W2 m
        gated     bias = W2 (sigmoid(gate_proj [h_k; m]) * m)
        rnn       (g, c, o) = joint_proj [s; m; h_k];  s' = sigmoid(g) s + (1 - sigmoid(g)) tanh(c);  bias = W2 tanh(o);
                  s = 0 before slot 0
    logits_k = lm_head(h_k) + bias       confidence_k = sigmoid(w [h_k; m] + b), of the draft's being accepted

W1 is read by the target's ids, W2 gives the draft's vocabulary. By default every slot predicts the next position
(`sample_from_anchor`); if not, slot 0 predicts nothing, yet a recurrent state passes through it.

Formats: that of speculators (type dspark), and that of the authors (DeepSpec's Qwen3DSparkModel: target_layer_ids,
mask_token_id, markov_rank and the rest at the top of config.json). The ends are as DFlash's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lamella.runner_v2.testing.draft_heads.block_backbone import (
    MASK_ID,
    Backbone,
    backbone_config,
    backbone_shapes,
    write_backbone,
)
from lamella.runner_v2.testing.draft_heads.checkpoint import Array
from lamella.runner_v2.testing.draft_heads.plain_layers import sigmoid
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
    sample_from_anchor: bool = True,
    markov_rank: int = 8,
    markov_head_type: str = "vanilla",
    confidence_head: bool = True,
    confidence_with_markov: bool = True,
    dtype: str = "float32",
    target_path: str | None = None,
) -> Path:
    """Write a random DSpark checkpoint; returns the folder.

    style: "speculators" or "authors" (there sample_from_anchor is always meant). markov_head_type: "vanilla", "gated"
    or "rnn". The rest as for DFlash.
    """
    config = backbone_config(
        "dspark",
        style="speculators",
        num_layers=num_layers,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        target_layer_ids=target_layer_ids,
        block_size=block_size,
        sliding_layers=(),
        sliding_window=0,
        causal=None,
        sample_from_anchor=sample_from_anchor,
        attention_bias=False,
        target_path=target_path,
    )
    shapes = backbone_shapes(config, len(target_layer_ids))
    heads = {
        "markov_rank": markov_rank,
        "markov_head_type": markov_head_type,
        "enable_confidence_head": confidence_head,
        "confidence_head_with_markov": confidence_with_markov,
    }
    if style == "authors":
        assert sample_from_anchor, "the authors' heads predict from the anchor on"
        assert draft_vocab_size is None, "the authors' format has no reduced vocabulary"
        config = {
            **config["transformer_layer_config"],
            "architectures": ["Qwen3DSparkModel"],
            "num_target_layers": 8,
            "block_size": block_size,
            "mask_token_id": MASK_ID,
            "target_layer_ids": list(target_layer_ids),
        }
    else:
        assert style == "speculators", style
    draft_vocab = draft_vocab_size or vocab_size
    shapes["markov_head.markov_w1.weight"] = (vocab_size, markov_rank)
    shapes["markov_head.markov_w2.weight"] = (draft_vocab, markov_rank)
    if markov_head_type == "gated":
        shapes["markov_head.gate_proj.weight"] = (markov_rank, hidden_size + markov_rank)
        shapes["markov_head.gate_proj.bias"] = (markov_rank,)
    elif markov_head_type == "rnn":
        shapes["markov_head.joint_proj.weight"] = (3 * markov_rank, 2 * markov_rank + hidden_size)
        shapes["markov_head.joint_proj.bias"] = (3 * markov_rank,)
    else:
        assert markov_head_type == "vanilla", markov_head_type
    if confidence_head:
        read = hidden_size + (markov_rank if confidence_with_markov else 0)
        shapes |= {"confidence_head.proj.weight": (1, read), "confidence_head.proj.bias": (1,)}
    return write_backbone(folder, seed, {**config, **heads}, shapes, dtype)


class Rows(NamedTuple):
    """What a head says of a block's drafts."""

    logits: Array  # [num_drafts, vocab_size]
    confidences: Array | None  # [num_drafts], probabilities
    ids: list[int]  # [num_drafts], as given, and greedy behind those


def reference_rows(
    folder: str | Path,
    hidden_states: Array,  # [num_context, num_aux * hidden_size]
    last_id: int,
    positions: Sequence[int] | None = None,  # [num_context]
    *,
    draft_ids: Sequence[int] = (),
    num_drafts: int | None = None,
    target: Ends | None = None,
    draft_topk: int | None = None,
) -> Rows:
    """One block behind `last_id`, from left to right.

    draft_ids: what the first drafts became, whatever their logits say; the rest are greedy, the lowest id winning ties.
    draft_topk: the bias counts for the best so many of a slot's logits, and all others are -inf; None: for all.
    hidden_states, positions, num_drafts, target: as in `dflash.reference_logits`.
    """
    backbone = Backbone(folder, target)
    # the authors' configuration does not speak of it
    from_anchor = backbone.config.get("sample_from_anchor", True)
    unused = 0 if from_anchor else 1
    num_slots = backbone.block_size if num_drafts is None else num_drafts + unused
    slots = backbone.hidden_states(hidden_states, last_id, positions, num_slots)
    head = backbone.weights.below("markov_head.")
    kind = backbone.config["markov_head_type"]
    rank = head["markov_w1.weight"].shape[1]
    state, before = np.zeros(rank), last_id
    rows: list[Array] = []
    confidences: list[float] = []
    ids: list[int] = []
    for slot, h in enumerate(slots):
        m = head["markov_w1.weight"][before]
        if kind == "vanilla":
            mixed = m
        elif kind == "gated":
            mixed = sigmoid(head.linear("gate_proj", np.concatenate([h, m]))) * m
        else:
            gate, candidate, shown = np.split(head.linear("joint_proj", np.concatenate([state, m, h])), 3)
            state = sigmoid(gate) * state + (1 - sigmoid(gate)) * np.tanh(candidate)
            mixed = np.tanh(shown)
        if slot < unused:
            continue
        logits = backbone.logits(h)
        biased = logits + head["markov_w2.weight"] @ mixed
        if draft_topk is not None:
            best = np.argsort(-logits, kind="stable")[:draft_topk]
            biased[np.setdiff1d(np.arange(len(logits)), best)] = -np.inf
        rows.append(backbone.ends.spread(biased))
        if "confidence_head.proj.weight" in backbone.weights:
            features = np.concatenate([h, m]) if backbone.config["confidence_head_with_markov"] else h
            confidences.append(float(sigmoid(backbone.weights.linear("confidence_head.proj", features))[0]))
        before = draft_ids[len(ids)] if len(ids) < len(draft_ids) else int(np.argmax(rows[-1]))
        ids.append(before)
    return Rows(np.stack(rows), np.array(confidences) if confidences else None, ids)


def reference_logits(
    folder: str | Path,
    hidden_states: Array,  # [num_context, num_aux * hidden_size]
    last_id: int,
    positions: Sequence[int] | None = None,  # [num_context]
    *,
    draft_ids: Sequence[int] = (),
    num_drafts: int | None = None,
    target: Ends | None = None,
) -> Array:  # [num_drafts, vocab_size]
    """The logits of `reference_rows`: row k follows on draft_ids[:k], or on greedy drafts where those end."""
    return reference_rows(
        folder, hidden_states, last_id, positions, draft_ids=draft_ids, num_drafts=num_drafts, target=target
    ).logits


def reference_drafts(
    folder: str | Path,
    hidden_states: Array,  # [num_context, num_aux * hidden_size]
    last_id: int,
    num_drafts: int | None = None,
    positions: Sequence[int] | None = None,  # [num_context]
    *,
    target: Ends | None = None,
) -> list[int]:
    """The greedy drafts."""
    return reference_rows(folder, hidden_states, last_id, positions, num_drafts=num_drafts, target=target).ids
