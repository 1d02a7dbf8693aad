"""Contracts of `moe_route` and `moe_experts`.

moe_route, params: num_experts, num_experts_per_token, norm_topk
    run(router_logits [T, num_experts]) -> ids [T, k] int32, weights [T, k] float32
    softmax over all experts in float32, the k best, renormalised to sum 1 where norm_topk

moe_experts, weights = formats of the parts; params: num_experts, num_experts_per_token, hidden, width (intermediate
size of this rank), activation
    pack([gate_0, up_0, down_0, gate_1, ...]) -> named tensors
    bind(packed) -> handle
    run(x [T, hidden], ids [T, k] int32, weights [T, k] float32, handle) -> [T, hidden]    in x's dtype
    sum over a token's experts, in the order of their numbers, of weight * down(act(gate x) * up x); a partial sum under
    tensor parallelism
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from lamella.runner_v2.config import Activation
from lamella.runner_v2.ops.activation import gated_activation
from lamella.runner_v2.ops.spec import Op


class DenseExperts(NamedTuple):
    """Handle of the reference."""

    gate_up: torch.Tensor  # [num_experts, 2 * width, hidden]
    down: torch.Tensor  # [num_experts, hidden, width]
    activation: Activation


def moe_route(
    router_logits: torch.Tensor, num_experts_per_token: int, norm_topk: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which experts serve each token, and with which weight."""
    probs = torch.softmax(router_logits.float(), dim=-1)
    weights, ids = torch.topk(probs, num_experts_per_token, dim=-1)
    if norm_topk:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids.to(torch.int32), weights


def moe_experts(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, handle: DenseExperts) -> torch.Tensor:
    """Expert after expert, each over its own tokens."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in torch.unique(ids).tolist():
        tokens, choice = torch.nonzero(ids == expert, as_tuple=True)
        rows = x[tokens].to(handle.gate_up.dtype)
        inner = gated_activation(F.linear(rows, handle.gate_up[expert]), handle.activation)
        result = F.linear(inner, handle.down[expert]).float()
        out.index_add_(0, tokens, result * weights[tokens, choice].unsqueeze(1))
    return out.to(x.dtype)


MOE_ROUTE = Op("moe_route", moe_route, "softmax, top-k and renormalisation of router logits")
MOE_EXPERTS = Op("moe_experts", moe_experts, "weighted sum of the chosen experts' gated MLPs")
