"""The provider of CUDA kernels: activations and weights are bfloat16 or float16, sums float32.

Quantised weights are dequantised when they are packed. Nothing here waits for the device or allocates pinned memory,
and workspaces are made when handles are bound, so that a step can be captured in a graph. The kernels come as an
argument: whoever serves their namespace (a stand-in on a CPU, in tests) will do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from lamella.runner_v2.ops.providers.cuda_chained import chained_picked, refuse_chained
from lamella.runner_v2.ops.providers.cuda_linear import (
    MULTIPLE,
    Matrix,
    Packed,
    Workspaces,
    bind_matrix,
    pack_experts,
    pack_matrix,
    product,
)
from lamella.runner_v2.ops.rotary import RopeTable
from lamella.runner_v2.ops.spec import Picked, Site
from lamella.runner_v2.quant.scheme import FORMATS
from lamella.runner_v2.weights.slots import RawPart

DTYPES = (torch.bfloat16, torch.float16)
ACTIVATIONS = ("silu", "gelu_tanh", "gelu")
_MAX_EXPERTS = 1024
_MAX_TOP_K = 32


class _Table(NamedTuple):
    weight: torch.Tensor  # [vocab, hidden]
    scale: float | None


class _Head(NamedTuple):
    norm: torch.Tensor  # [hidden]
    matrix: Matrix


class _Experts(NamedTuple):
    gate_up: torch.Tensor  # [num_experts, 2 * width, hidden]
    down: torch.Tensor  # [num_experts, hidden, width]
    workspace: torch.Tensor


class CudaProvider:
    """Serves the ops of a model in 16 bits on one device."""

    name = "cuda"

    def __init__(self, kernels: Any, max_num_tokens: int, device_type: str = "cuda") -> None:
        """kernels: the namespace of lamella.kernels_cuda. max_num_tokens: most tokens of a step."""
        self._kernels = kernels
        self._device_type = device_type
        self._workspaces = Workspaces(kernels, max_num_tokens)
        self._makers: dict[str, Callable[[Site], Picked]] = {
            "linear": self._linear,
            "rms_norm": self._rms_norm,
            "add_rms_norm": self._add_rms_norm,
            "rope": self._rope,
            "gated_activation": self._gated_activation,
            "embed": self._embed,
            "logits": self._logits,
            "moe_route": self._moe_route,
            "moe_experts": self._moe_experts,
            "chained_layer": self._chained_layer,
        }

    def supports(self, site: Site) -> str | None:
        if site.op not in self._makers:
            return f"no kernel for an op named {site.op}"
        if torch.device(site.device).type != self._device_type:
            return f"device {site.device}"
        if site.dtype not in DTYPES:
            return f"activations are {site.dtype}, not bfloat16 or float16"
        for weight in site.weights:
            if weight.name not in FORMATS:
                return f"weight format {weight.name}"
        refuse = _REFUSE.get(site.op)
        return None if refuse is None else refuse(site)

    def pick(self, site: Site) -> Picked:
        return self._makers[site.op](site)

    def _picked(self, site: Site, run: Callable[..., Any], pack: Any = None, bind: Any = None) -> Picked:
        return Picked(site.op, self.name, run, pack, bind)

    def _linear(self, site: Site) -> Picked:
        pack = partial(pack_matrix, dtype=site.dtype)
        bind = partial(bind_matrix, workspaces=self._workspaces)
        return self._picked(site, partial(product, self._kernels), pack, bind)

    def _rms_norm(self, site: Site) -> Picked:
        kernels, weight_of = self._kernels, _Rounded(site.dtype)
        eps, plus_one = site.params["eps"], site.params["plus_one"]

        def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            # heads inside a qkv row lie at two distances, which no view as rows has: they are copied
            rows = x.reshape(-1, x.shape[-1])
            out: torch.Tensor = kernels.rms_norm(rows, weight_of(weight), eps, plus_one=plus_one)
            return out.view(x.shape)

        return self._picked(site, run)

    def _add_rms_norm(self, site: Site) -> Picked:
        kernels, weight_of = self._kernels, _Rounded(site.dtype)
        eps, plus_one = site.params["eps"], site.params["plus_one"]

        def run(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return kernels.rms_norm(x, weight_of(weight), eps, residual=residual, plus_one=plus_one), residual

        return self._picked(site, run)

    def _rope(self, site: Site) -> Picked:
        kernels, interleaved = self._kernels, site.params["interleaved"]

        def run(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, table: RopeTable) -> None:
            kernels.rope(q, k, positions, table.cos, table.sin, interleaved=interleaved)

        return self._picked(site, run)

    def _gated_activation(self, site: Site) -> Picked:
        kernels, kind = self._kernels, site.params["kind"]

        def run(gate_up: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = kernels.gated_activation(gate_up, kind)
            return out

        return self._picked(site, run)

    def _embed(self, site: Site) -> Picked:
        def bind(packed: Packed) -> _Table:
            return _Table(packed["weight"], site.params["scale"])

        return self._picked(site, _run_embed, partial(pack_matrix, dtype=site.dtype), bind)

    def _logits(self, site: Site) -> Picked:
        kernels, p = self._kernels, site.params
        eps, plus_one, softcap = p["eps"], p["plus_one"], p["softcap"]
        # whoever samples takes bfloat16 as it comes; of float16 there is no such kernel
        is_wide = softcap is not None or site.dtype != torch.bfloat16

        def pack(parts: Sequence[RawPart]) -> Packed:
            norm, *head = parts
            return {"norm": norm.data.to(site.dtype), **(pack_matrix(head, site.dtype) if head else {})}

        def bind(packed: Packed) -> _Head:
            return _Head(packed["norm"], bind_matrix(packed, self._workspaces))

        def run(hidden: torch.Tensor, handle: _Head) -> torch.Tensor:
            normed = kernels.rms_norm(hidden, handle.norm, eps, plus_one=plus_one)
            out = product(kernels, normed, handle.matrix)
            if is_wide:
                out = out.float()
            return out if softcap is None else out.div_(softcap).tanh_().mul_(softcap)

        return self._picked(site, run, pack, bind)

    def _moe_route(self, site: Site) -> Picked:
        kernels, top_k, norm_topk = self._kernels, site.params["num_experts_per_token"], site.params["norm_topk"]

        def run(router_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            ids, weights = kernels.moe_route(router_logits, top_k, renormalize=norm_topk)
            return ids, weights

        return self._picked(site, run)

    def _moe_experts(self, site: Site) -> Picked:
        kernels, p = self._kernels, site.params

        def bind(packed: Packed) -> _Experts:
            gate_up = packed["gate_up"]
            workspace = self._workspaces.moe(
                gate_up.device, p["num_experts_per_token"], p["num_experts"], p["hidden"], p["width"]
            )
            return _Experts(gate_up, packed["down"], workspace)

        def run(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, handle: _Experts) -> torch.Tensor:
            out: torch.Tensor = kernels.fused_moe(
                x, handle.gate_up, handle.down, ids, weights, workspace=handle.workspace
            )
            return out

        return self._picked(site, run, partial(pack_experts, dtype=site.dtype), bind)

    def _chained_layer(self, site: Site) -> Picked:
        return chained_picked(site, self._kernels, self._workspaces, self.name)


class _Rounded:
    """The weight of one norm, which layers keep in float32, in the type that the kernels take.

    Rounded when it is first seen and again, into the same memory, after new weights were loaded into it.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._source: torch.Tensor | None = None
        self._version = -1
        self._weight = torch.empty(0)

    def __call__(self, source: torch.Tensor) -> torch.Tensor:
        version = 0 if source.is_inference() else source._version
        if source is not self._source:
            self._source, self._version, self._weight = source, version, source.to(self._dtype)
        elif version != self._version:
            self._version = version
            self._weight.copy_(source)
        return self._weight


def _run_embed(ids: torch.Tensor, handle: _Table) -> torch.Tensor:
    rows = F.embedding(ids, handle.weight)
    return rows if handle.scale is None else rows * handle.scale


def _refuse_norm(site: Site) -> str | None:
    width = site.params["width"]
    return f"width {width} is no multiple of {MULTIPLE}" if width % MULTIPLE else None


def _refuse_activation(site: Site) -> str | None:
    if site.params["kind"] not in ACTIVATIONS:
        return f"activation {site.params['kind']}"
    return _refuse_norm(site)


def _refuse_logits(site: Site) -> str | None:
    hidden = site.params["hidden"]
    return f"hidden size {hidden} is no multiple of {MULTIPLE}" if hidden % MULTIPLE else None


def _refuse_route(site: Site) -> str | None:
    num_experts, top_k = site.params["num_experts"], site.params["num_experts_per_token"]
    if num_experts > _MAX_EXPERTS:
        return f"{num_experts} experts, {_MAX_EXPERTS} at most"
    if top_k > _MAX_TOP_K:
        return f"{top_k} experts per token, {_MAX_TOP_K} at most"
    return None


def _refuse_experts(site: Site) -> str | None:
    p = site.params
    if p["activation"] != "silu":
        return f"experts with activation {p['activation']}, not silu"
    for name in ("hidden", "width"):
        if p[name] % MULTIPLE:
            return f"{name} {p[name]} is no multiple of {MULTIPLE}"
    if p["num_experts"] > _MAX_EXPERTS:
        return f"{p['num_experts']} experts, {_MAX_EXPERTS} at most"
    return None


_REFUSE: dict[str, Callable[[Site], str | None]] = {
    "rms_norm": _refuse_norm,
    "add_rms_norm": _refuse_norm,
    "gated_activation": _refuse_activation,
    "logits": _refuse_logits,
    "moe_route": _refuse_route,
    "moe_experts": _refuse_experts,
    "chained_layer": refuse_chained,
}
