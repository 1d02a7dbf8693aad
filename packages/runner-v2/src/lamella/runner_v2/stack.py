"""The loop over the layers of a model, and what may happen at their borders.

    carried ─ before(0) ─ layer 0 ─ after(0) ─ before(1) ─ layer 1 ─ after(1) ─ ... ─ carried

carried is the model's NamedTuple of tensors: all that goes from layer to layer, and all that a pipeline stage sends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from lamella.runner_v2.inputs import ModelInput

C = TypeVar("C")


class StackLayer(Protocol[C]):
    """A layer as the stack sees it."""

    def __call__(self, carried: C, inputs: ModelInput) -> C: ...


class Hooks(NamedTuple):
    """Called at every border with the layer's index: before it (wait for its KV, fetch its weights) and after it (save
    its KV, copy its hidden state: the next layer may work in place). Empty by default."""

    before: tuple[Callable[[int], None], ...] = ()
    after: tuple[Callable[[int, Any], None], ...] = ()


NO_HOOKS = Hooks()


class LayerStack(Generic[C]):
    """The layers of a rank, in order."""

    def __init__(self, layers: Sequence[StackLayer[C]], hooks: Hooks = NO_HOOKS) -> None:
        self._layers = tuple(layers)
        self._hooks = hooks

    def run(self, carried: C, inputs: ModelInput) -> C:
        """All layers, each with its hooks."""
        before, after = self._hooks
        for layer_idx, layer in enumerate(self._layers):
            for wait in before:
                wait(layer_idx)
            carried = layer(carried, inputs)
            for keep in after:
                keep(layer_idx, carried)
        return carried
