"""Keeps what chosen layers of the target leave of each token of a step, for a network that drafts.

start ── embeddings: layer -1 ── layer 0 ── layer 1 ── ...  ── take: [T, number of layers · hidden]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lamella.runner_v2.errors import ConfigError
from lamella.runner_v2.layers.decoder import Carried

EMBEDDINGS = -1


class HiddenStates:
    """A hook of the layer stack; keeps nothing outside of start() and take()."""

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._wanted = frozenset(layers)
        self._kept: dict[int, torch.Tensor] = {}
        self._open = False

    def check(self, num_layers: int) -> None:
        """ConfigError unless the model has these layers."""
        wrong = [layer for layer in self.layers if not EMBEDDINGS <= layer < num_layers]
        if wrong:
            raise ConfigError(
                f"the drafter reads the output of layer {wrong[0]}, and the model has layers 0 to {num_layers - 1}: it "
                "was made for another model"
            )

    def start(self, carried: Carried) -> None:
        """A step begins with these embeddings."""
        self._open = bool(self.layers)
        self.keep(EMBEDDINGS, carried)

    def keep(self, layer_idx: int, carried: Carried) -> None:
        """Copy a layer's output, if it is asked for: the next layer may work in place."""
        if self._open and layer_idx in self._wanted:
            self._kept[layer_idx] = carried.hidden.clone()

    def take(self) -> torch.Tensor | None:  # [T, len(layers) * hidden]
        """What was kept, side by side in the order of the layers; None: nothing is asked for."""
        self._open = False
        if not self.layers:
            return None
        found = torch.cat([self._kept[layer] for layer in self.layers], dim=1)
        self._kept.clear()
        return found
