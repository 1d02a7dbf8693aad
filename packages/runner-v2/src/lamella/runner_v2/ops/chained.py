"""Contract of `chained_layer`: a decoder layer that also prepares the next layer's norm. Asked for before
decoder_layer, at tp_size 1 and without sandwich norms only.

    layer i    | o + residual ~ norm | ... | down + residual ~ norm of layer i + 1 |
    layer i + 1                            ahead ─┘ qkv ...

What closes a layer reads and writes the whole residual stream, which is what the next layer's norm has to read again:
who writes it can leave the norm behind.

Site: as of decoder_layer, params too; the next norm is no matrix and so has no format there.

    pack(parts) -> named tensors               parts: those of decoder_layer, in their order, and behind them the next
                                               layer's attn_norm; the last layer has none
    bind(packed, rope, attention) -> handle    as of decoder_layer
    run(hidden [T, H], ahead, plan, cache: LayerCache, handle) -> (hidden, ahead)
        may work in place of hidden; the caller drops its own

ahead is what the layer before prepared, of a form that only its provider knows, or None: then the layer norms hidden
itself. hidden is the whole residual stream at every border, so whoever stands there may read it and drop ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from lamella.runner_v2.inputs import LayerCache
from lamella.runner_v2.ops.decoder import DenseLayer, decoder_layer
from lamella.runner_v2.ops.spec import Op
from lamella.runner_v2.weights.slots import RawPart


class LayerParts(NamedTuple):
    """The parts of a chained layer."""

    own: Sequence[RawPart]
    next_norm: RawPart | None


def split_parts(parts: Sequence[RawPart]) -> LayerParts:
    """The layer's own parts, and the next layer's norm, which is the last part if its key names another layer."""
    own, last = parts[0].key.split(".")[1], parts[-1]
    if last.key.split(".")[1] == own:
        return LayerParts(parts, None)
    return LayerParts(parts[:-1], last)


def chained_layer(
    hidden: torch.Tensor,  # [T, H]
    ahead: Any,
    plan: Any,
    cache: LayerCache,
    handle: DenseLayer,
) -> tuple[torch.Tensor, Any]:
    """The layer alone: nothing is prepared, and what was prepared is not needed."""
    return decoder_layer(hidden, plan, cache, handle), None


CHAINED_LAYER = Op("chained_layer", chained_layer, "a whole decoder layer that prepares the next one's norm")
