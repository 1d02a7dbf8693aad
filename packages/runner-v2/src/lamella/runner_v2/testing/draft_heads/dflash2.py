"""DFlash2: DFlash with local convolutions around attention and MLP, and a selector that walks over candidates.

Convolution. From the normed rows x of a block, coefficients a[row, 2, tap, group] = kernel_projection(x). What
attention (or the MLP) reads is conv(x; base[0], a[:, 0]); what is added to the residual is conv(its output; base[1],
a[:, 1]), by coefficients of x, too. A convolution looks back inside its block only:

    conv(in)[i, c] = sum over taps t <= i of (base[t, c] + a[i, t, group of c]) * in[i - t, c]

Selector. A slot's candidates are the top_k of its logits. Going left to right, candidate c behind token p has the score

    logit[c] + <predecessor_codebook[p] * hidden_projection(h_slot), successor_codebook[c]>

and q is the softmax of the scores over the candidates, 0 elsewhere. p is the anchor's token first, then each draft.

Formats: that of speculators (type dflash2), and that of the authors (DFlash2DraftModel, all fields in dflash_config,
input_embedding_scale, output_multiplier and final_logit_softcapping besides). The ends are the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lamella.runner_v2.testing.draft_heads.block_backbone import (
    Backbone,
    backbone_config,
    backbone_shapes,
    write_backbone,
)
from lamella.runner_v2.testing.draft_heads.checkpoint import Array
from lamella.runner_v2.testing.draft_heads.plain_layers import Weights
from lamella.runner_v2.testing.draft_heads.target import Ends


def write_checkpoint(
    folder: str | Path,
    seed: int = 0,
    *,
    style: str = "speculators",
    num_layers: int = 2,
    hidden_size: int = 64,
    vocab_size: int = 320,
    target_layer_ids: Sequence[int] = (0, 1),
    block_size: int = 4,
    sliding_layers: Sequence[int] = (),
    sliding_window: int = 3,
    causal: bool | None = None,
    sample_from_anchor: bool = False,
    conv_kernel_size: int = 2,
    conv_group_size: int = 16,
    selector_rank: int = 8,
    selector_top_k: int = 5,
    input_embedding_scale: float | None = None,
    output_multiplier: float | None = None,
    final_logit_softcapping: float | None = None,
    dtype: str = "float32",
    target_path: str | None = None,
) -> Path:
    """Write a random DFlash2 checkpoint; returns the folder. The scales and the cap are the authors' format's only; the
    rest as for DFlash."""
    config = backbone_config(
        "dflash2",
        style=style,
        num_layers=num_layers,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        draft_vocab_size=None,
        target_layer_ids=target_layer_ids,
        block_size=block_size,
        sliding_layers=sliding_layers,
        sliding_window=sliding_window,
        causal=causal,
        sample_from_anchor=sample_from_anchor,
        attention_bias=False,
        target_path=target_path,
    )
    options: dict[str, Any] = {
        "conv_kernel_size": conv_kernel_size,
        "conv_group_size": conv_group_size,
        "selector_rank": selector_rank,
        "selector_top_k": selector_top_k,
    }
    scales = {
        "input_embedding_scale": input_embedding_scale,
        "output_multiplier": output_multiplier,
        "final_logit_softcapping": final_logit_softcapping,
    }
    told = {name: value for name, value in scales.items() if value is not None}
    if style == "authors":
        config["architectures"] = ["DFlash2DraftModel"]
        config["dflash_config"] |= {**options, **told, "block_size": config.pop("block_size")}
    else:
        assert not told, f"the format of speculators has no {', '.join(told)}"
        config |= options
    shapes = backbone_shapes(config, len(target_layer_ids))
    coefficients = 2 * conv_kernel_size * (hidden_size // conv_group_size)
    for index in range(num_layers):
        for name in ("attention_conv", "mlp_conv"):
            shapes[f"layers.{index}.{name}.base_kernel"] = (2, conv_kernel_size, hidden_size)
            shapes[f"layers.{index}.{name}.kernel_projection.weight"] = (coefficients, hidden_size)
    for name in ("predecessor", "successor"):
        shapes[f"candidate_selector.{name}_codebook"] = (vocab_size, selector_rank)
    shapes["candidate_selector.hidden_projection.weight"] = (selector_rank, hidden_size)
    return write_backbone(folder, seed, config, shapes, dtype)


class Convolutions:
    """What DFlash2 has around the inner parts of its layers."""

    def __init__(self, taps: int, group_size: int) -> None:
        self.taps = taps
        self.group_size = group_size

    def before(self, weights: Weights, normed: list[Array]) -> tuple[list[Array], Any]:
        groups = len(normed[0]) // self.group_size
        kernels = [weights.linear("kernel_projection", x).reshape(2, self.taps, groups) for x in normed]
        return self._convolve(weights["base_kernel"][0], [k[0] for k in kernels], normed), [k[1] for k in kernels]

    def after(self, weights: Weights, outputs: list[Array], kept: Any) -> list[Array]:
        return self._convolve(weights["base_kernel"][1], kept, outputs)

    def _convolve(self, base: Array, kernels: list[Array], rows: list[Array]) -> list[Array]:
        """base [taps, hidden_size]; kernels and rows of one block, each [taps, groups] and [hidden_size]."""
        outputs = []
        for i, kernel in enumerate(kernels):
            out = np.zeros_like(rows[i])
            for tap in range(min(self.taps, i + 1)):
                out += (base[tap] + np.repeat(kernel[tap], self.group_size)) * rows[i - tap]
            outputs.append(out)
        return outputs


def _slots(
    folder: str | Path,
    hidden_states: Array,
    last_id: int,
    positions: Sequence[int] | None,
    num_drafts: int | None,
    target: Ends | None,
    window_rule: str | None,
) -> tuple[Backbone, list[Array]]:
    """The head, and the normed outputs of the slots that predict."""
    backbone = Backbone(folder, target, window_rule)
    unused = 0 if backbone.from_anchor else 1
    num_slots = backbone.block_size if num_drafts is None else num_drafts + unused
    around = Convolutions(backbone.options["conv_kernel_size"], backbone.options["conv_group_size"])
    return backbone, backbone.hidden_states(hidden_states, last_id, positions, num_slots, around)[unused:]


def reference_unary_logits(
    folder: str | Path,
    hidden_states: Array,  # [num_context, num_aux * hidden_size]
    last_id: int,
    positions: Sequence[int] | None = None,  # [num_context]
    *,
    num_drafts: int | None = None,
    target: Ends | None = None,
    window_rule: str | None = None,
) -> Array:  # [num_drafts, vocab_size]
    """Logits of each slot by itself, before the selector; arguments as in `dflash.reference_logits`."""
    backbone, slots = _slots(folder, hidden_states, last_id, positions, num_drafts, target, window_rule)
    return np.stack([backbone.ends.spread(backbone.logits(y)) for y in slots])


def reference_logits(
    folder: str | Path,
    hidden_states: Array,  # [num_context, num_aux * hidden_size]
    last_id: int,
    positions: Sequence[int] | None = None,  # [num_context]
    *,
    draft_ids: Sequence[int] = (),
    num_drafts: int | None = None,
    target: Ends | None = None,
    window_rule: str | None = None,
) -> Array:  # [num_drafts, vocab_size]
    """The walk's scores, -inf for all that is no candidate: q at temperature T is softmax(row / T). Row k is scored
    behind draft_ids[k - 1] (behind last_id for the first), or behind the best candidate where draft_ids end."""
    backbone, slots = _slots(folder, hidden_states, last_id, positions, num_drafts, target, window_rule)
    selector = backbone.weights.below("candidate_selector.")
    rows: list[Array] = []
    for k, y in enumerate(slots):
        before = last_id if k == 0 else draft_ids[k - 1] if k <= len(draft_ids) else int(np.argmax(rows[-1]))
        unary = backbone.logits(y)
        mixed = selector["predecessor_codebook"][before] * selector.linear("hidden_projection", y)
        row = np.full(len(unary), -np.inf)
        for candidate in np.argsort(-unary, kind="stable")[: backbone.options["selector_top_k"]]:
            row[candidate] = unary[candidate] + mixed @ selector["successor_codebook"][candidate]
        rows.append(row)
    return np.stack(rows)


def reference_drafts(
    folder: str | Path,
    hidden_states: Array,  # [num_context, num_aux * hidden_size]
    last_id: int,
    num_drafts: int | None = None,
    positions: Sequence[int] | None = None,  # [num_context]
    *,
    target: Ends | None = None,
) -> list[int]:
    """The greedy walk's drafts; the lowest id wins a tie."""
    logits = reference_logits(folder, hidden_states, last_id, positions, num_drafts=num_drafts, target=target)
    return [int(np.argmax(row)) for row in logits]
