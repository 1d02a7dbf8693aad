"""MTP with one module: a decoder layer inside the target's checkpoint, fed back on itself.

    hidden state h at position p, token at p + 1
        x = projection([norm_e(embed(token)); norm_h(h)])        2 hidden_size -> hidden_size
        x = layer(x)                                             of the target's kind, with its own KV
        y = norm(x);  logits = head(y), of the token at p + 2;  y is fed back in place of h, at position p + 1

Two ways of naming:

    mtp.*              Qwen3-Next, Qwen3.5: fc, pre_fc_norm_embedding, pre_fc_norm_hidden, layers.0.*, norm; the ends
                       are the target's
    model.layers.N.*   DeepSeek-V3 (2412.19437), GLM-4.5: eh_proj, enorm, hnorm, the layer's own names,
                       shared_head.norm, and copies of the ends: embed_tokens, shared_head.head; N = num_hidden_layers

h is the target's hidden state after its last norm. Engines that serve DeepSeek's modules take zeros for the embedding
at position 0; transformers does not: `zero_first`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lamella.runner_v2.testing.draft_heads import checkpoint
from lamella.runner_v2.testing.draft_heads.checkpoint import Array
from lamella.runner_v2.testing.draft_heads.mtp_layers import GATED, KINDS, KindLayer, kind_config, kind_shapes
from lamella.runner_v2.testing.draft_heads.plain_layers import Weights


class Names(NamedTuple):
    """Where a module's tensors are: prefix of the layer, and full names of the rest."""

    layer: str
    projection: str
    embedding_norm: str
    hidden_norm: str
    last_norm: str


def names_of(style: str, num_hidden_layers: int) -> Names:
    """style: "mtp" or "layers"."""
    if style == "mtp":
        return Names("mtp.layers.0.", "mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
    assert style == "layers", style
    here = f"model.layers.{num_hidden_layers}."
    return Names(here, f"{here}eh_proj", f"{here}enorm", f"{here}hnorm", f"{here}shared_head.norm")


def write_checkpoint(
    folder: str | Path,
    seed: int = 0,
    *,
    kind: str = "qwen3",
    style: str | None = None,
    num_layers: int = 2,
    hidden_size: int = 64,
    vocab_size: int = 320,
    tied: bool = False,
    dtype: str = "float32",
) -> Path:
    """Write a whole random target with an MTP module in it; returns the folder.

    kind: one of `mtp_layers.KINDS`, of which all layers are. style: how the module is named, "mtp" or "layers"; by
    default as models of that kind have it. tied: the target's output matrix is its embedding.
    """
    assert kind in KINDS, kind
    style = style or ("layers" if kind in ("glm4_moe", "deepseek_v3") else "mtp")
    config = kind_config(kind, num_layers=num_layers, hidden_size=hidden_size, vocab_size=vocab_size)
    count = "mtp_num_hidden_layers" if kind == "qwen3_5_text" else "num_nextn_predict_layers"
    config |= {"tie_word_embeddings": tied, count: 1}
    names = names_of(style, num_layers)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab_size, hidden_size),
        "model.norm.weight": (hidden_size,),
        f"{names.projection}.weight": (hidden_size, 2 * hidden_size),
    }
    if not tied:
        shapes["lm_head.weight"] = (vocab_size, hidden_size)
    shapes |= {f"{name}.weight": (hidden_size,) for name in names[2:]}
    for index in range(num_layers):
        shapes |= kind_shapes(f"model.layers.{index}.", config)
    shapes |= kind_shapes(names.layer, config)
    tensors = checkpoint.random_tensors(seed, shapes, plus_one=("norm",) if kind in GATED else ())
    if style == "layers":
        tensors[f"{names.layer}embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
        tensors[f"{names.layer}shared_head.head.weight"] = tensors[
            "model.embed_tokens.weight" if tied else "lm_head.weight"
        ]
    return checkpoint.write(folder, config, tensors, dtype=dtype)


class Rows(NamedTuple):
    """What a module puts out."""

    logits: Array  # [num_rows, vocab_size]
    hidden_states: Array  # [num_rows, hidden_size], after the module's last norm: what the next pass is fed


def reference_rows(
    folder: str | Path,
    hidden_states: Array,  # [num_rows, hidden_size]
    token_ids: Sequence[int],  # [num_rows]
    positions: Sequence[int] | None = None,  # [num_rows]
    *,
    draft_ids: Sequence[int] = (),
    zero_first: bool | None = None,
) -> Rows:  # of num_rows + len(draft_ids) rows
    """One sequence through the module, from its first position on.

    token_ids[i] is the token that FOLLOWS the one of hidden_states[i]; positions[i] (0, 1, … if None) is that of the
    hidden state. draft_ids: tokens fed back one after the other behind the last row, each with the hidden state that
    the row before put out, at the next position. zero_first: the embedding at position 0 is zero; None: in the style
    "layers".
    """
    config, tensors = checkpoint.read(folder)
    style = "mtp" if "mtp.fc.weight" in tensors else "layers"
    names, weights = names_of(style, config["num_hidden_layers"]), Weights(tensors)
    layer = KindLayer(config)
    zero_first = style == "layers" if zero_first is None else zero_first
    embedding = tensors["model.embed_tokens.weight"]
    matrix = tensors.get("lm_head.weight", embedding)
    places = list(positions) if positions is not None else list(range(len(token_ids)))
    assert len(hidden_states) == len(token_ids) == len(places) > 0, "one token and one position for each hidden state"

    def enter(h: Array, token: int, position: int) -> Array:
        e = embedding[token] * (0.0 if zero_first and position == 0 else 1.0)
        both = [layer.norm(weights, names.embedding_norm, e), layer.norm(weights, names.hidden_norm, h)]
        return weights.linear(names.projection, np.concatenate(both))

    def leave(count: int) -> Array:
        return layer.norm(weights, names.last_norm, layer.run(weights.below(names.layer), inputs[:count], places)[-1])

    inputs = [enter(np.asarray(h, np.float64), t, p) for h, t, p in zip(hidden_states, token_ids, places)]
    outputs = [leave(row + 1) for row in range(len(inputs))]
    for token in draft_ids:
        places.append(places[-1] + 1)
        inputs.append(enter(outputs[-1], token, places[-1]))
        outputs.append(leave(len(inputs)))
    return Rows(np.stack([matrix @ y for y in outputs]), np.stack(outputs))


def reference_logits(
    folder: str | Path,
    hidden_states: Array,  # [num_rows, hidden_size]
    token_ids: Sequence[int],  # [num_rows]
    positions: Sequence[int] | None = None,  # [num_rows]
    *,
    draft_ids: Sequence[int] = (),
    zero_first: bool | None = None,
) -> Array:  # [num_rows + len(draft_ids), vocab_size]
    """The logits of `reference_rows`."""
    return reference_rows(
        folder, hidden_states, token_ids, positions, draft_ids=draft_ids, zero_first=zero_first
    ).logits


def reference_drafts(
    folder: str | Path,
    hidden_states: Array,  # [num_rows, hidden_size]
    token_ids: Sequence[int],  # [num_rows]
    num_drafts: int,
    positions: Sequence[int] | None = None,  # [num_rows]
) -> list[int]:
    """The greedy drafts behind the last row; the lowest id wins a tie."""
    drafts: list[int] = []
    while len(drafts) < num_drafts:
        logits = reference_logits(folder, hidden_states, token_ids, positions, draft_ids=drafts)
        drafts.append(int(np.argmax(logits[-1])))
    return drafts
