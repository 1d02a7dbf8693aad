"""Contract of `gated_activation`.

Site params: kind (silu, gelu_tanh, gelu), width (I, of this rank).

    run(gate_up [T, 2 * I]) -> [T, I]: act(gate) * up, gate being the first half of a row; a fresh tensor
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from lamella.runner_v2.config import Activation
from lamella.runner_v2.ops.spec import Op


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": _gelu_tanh,
    "gelu": F.gelu,
}


def gated_activation(gate_up: torch.Tensor, kind: Activation) -> torch.Tensor:
    """act(gate) * up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[kind](gate) * up


GATED_ACTIVATION = Op("gated_activation", gated_activation, "act(gate) * up of the two halves of each row")
