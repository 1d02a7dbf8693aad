"""The native provider for CPUs: quantised weights stay quantised, a decoder layer is one call.

Importing this module fails with ImportError where the native module was not built. Activations are float32; matrices
that are quantised multiply activations rounded to 8 bits in groups of 32. Every op gives a row the same bits alone and
in any batch, and a prompt the same bits however it is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lamella.runner_v2 import _C
from lamella.runner_v2.attention.backend import AttentionBackend
from lamella.runner_v2.config import LayerConfig, ModelConfig
from lamella.runner_v2.ops.decoder import group_parts
from lamella.runner_v2.ops.host_pack import (
    native_part,
    native_parts,
    pack_matrices,
    pack_matrix,
    pack_norm,
)
from lamella.runner_v2.ops.rotary import RopeTable
from lamella.runner_v2.ops.spec import Picked, Site
from lamella.runner_v2.quant.scheme import FORMATS
from lamella.runner_v2.weights.slots import RawPart

Packed = Mapping[str, torch.Tensor]

_MATRICES = ("qkv", "o", "gate_up", "down", "router", "experts")


class HostProvider:
    """Serves every op on a CPU with native code."""

    name = "host"

    def __init__(self, num_threads: int | None = None) -> None:
        """num_threads: of the process's native pool, the caller's included; None leaves it as it is."""
        if num_threads is not None:
            _C.set_num_threads(num_threads)
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
            "decoder_layer": self._decoder_layer,
        }

    def supports(self, site: Site) -> str | None:
        if site.op not in self._makers:
            return f"no native op named {site.op}"
        if torch.device(site.device).type != "cpu":
            return f"device {site.device}"
        if site.dtype != torch.float32:
            return f"activations are {site.dtype}, not float32"
        for weight in site.weights:
            if weight.name not in FORMATS:
                return f"weight format {weight.name}"
        if site.op == "moe_experts":
            return _refuse_experts(site)
        if site.op == "decoder_layer":
            return _refuse_layer(site)
        return None

    def pick(self, site: Site) -> Picked:
        return self._makers[site.op](site)

    def _picked(self, site: Site, run: Callable[..., Any], pack: Any = None, bind: Any = None) -> Picked:
        return Picked(site.op, self.name, run, pack, bind, batch_invariant=True)

    def _linear(self, site: Site) -> Picked:
        def bind(packed: Packed) -> _C.Linear:
            return _C.Linear(native_parts(packed))

        return self._picked(site, _run_linear, pack_matrices, bind)

    def _rms_norm(self, site: Site) -> Picked:
        eps, plus_one = site.params["eps"], site.params["plus_one"]

        def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            out = torch.empty(x.shape, dtype=torch.float32)
            _C.rms_norm(x, weight + 1.0 if plus_one else weight, eps, out)
            return out

        return self._picked(site, run)

    def _add_rms_norm(self, site: Site) -> Picked:
        eps, plus_one = site.params["eps"], site.params["plus_one"]

        def run(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            _C.add_rms_norm(x, residual, weight + 1.0 if plus_one else weight, eps)
            return x, residual

        return self._picked(site, run)

    def _rope(self, site: Site) -> Picked:
        interleaved = site.params["interleaved"]

        def run(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, table: RopeTable) -> None:
            _C.rope(q, k, positions, table.cos, table.sin, interleaved)

        return self._picked(site, run)

    def _gated_activation(self, site: Site) -> Picked:
        kind = site.params["kind"]

        def run(gate_up: torch.Tensor) -> torch.Tensor:
            out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2)
            _C.gated_activation(gate_up, kind, out)
            return out

        return self._picked(site, run)

    def _embed(self, site: Site) -> Picked:
        scale = site.params["scale"]

        def pack(parts: Sequence[RawPart]) -> Packed:
            return pack_matrix(parts[0])

        def bind(packed: Packed) -> _C.Table:
            return _C.Table(native_part(packed), 1.0 if scale is None else scale)

        return self._picked(site, _run_embed, pack, bind)

    def _logits(self, site: Site) -> Picked:
        p = site.params

        def pack(parts: Sequence[RawPart]) -> Packed:
            norm, *head = parts
            return {"norm": pack_norm(norm, p["plus_one"]), **(pack_matrix(head[0]) if head else {})}

        def bind(packed: Packed) -> _C.Head:
            return _C.Head(native_part(packed), packed["norm"], p["eps"], p["softcap"] or 0.0)

        return self._picked(site, _run_logits, pack, bind)

    def _moe_route(self, site: Site) -> Picked:
        k, norm_topk = site.params["num_experts_per_token"], site.params["norm_topk"]

        def run(router_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            ids = torch.empty(router_logits.shape[0], k, dtype=torch.int32)
            weights = torch.empty(router_logits.shape[0], k)
            _C.moe_route(router_logits.clone(), norm_topk, ids, weights)
            return ids, weights

        return self._picked(site, run)

    def _moe_experts(self, site: Site) -> Picked:
        activation = site.params["activation"]

        def bind(packed: Packed) -> _C.Experts:
            return _C.Experts(native_parts(packed), activation)

        return self._picked(site, _run_experts, pack_matrices, bind)

    def _decoder_layer(self, site: Site) -> Picked:
        config: ModelConfig = site.params["config"]
        layer: LayerConfig = site.params["layer"]

        def pack(parts: Sequence[RawPart]) -> Packed:
            packed: dict[str, torch.Tensor] = {}
            for name, group in group_parts(parts).items():
                if name.endswith("_norm"):
                    packed[name] = pack_norm(group[0], config.norm_plus_one)
                else:
                    packed.update(pack_matrices(group, f"{name}."))
            return packed

        def bind(packed: Packed, rope: RopeTable, attention: AttentionBackend) -> _C.Layer:
            moe = layer.moe
            return _C.Layer(
                hidden=config.hidden_size,
                eps=config.norm_eps,
                heads=(
                    config.num_heads,
                    config.num_kv_heads,
                    config.head_dim,
                    config.attention_scale,
                    config.attention_softcap or 0.0,
                ),
                activation=config.activation,
                norms={name: tensor for name, tensor in packed.items() if name.endswith("_norm")},
                cos=rope.cos,
                sin=rope.sin,
                interleaved=config.ropes[layer.rope_idx].interleaved,
                experts_per_token=0 if moe is None else moe.num_experts_per_token,
                norm_topk=moe is not None and moe.norm_topk,
                **{name: native_parts(packed, f"{name}.") for name in _MATRICES},
            )

        return self._picked(site, _C.decoder_layer, pack, bind)


def _run_linear(x: torch.Tensor, handle: _C.Linear) -> torch.Tensor:
    out = torch.empty(x.shape[0], handle.rows)
    _C.linear(x, handle, out)
    return out


def _run_embed(ids: torch.Tensor, handle: _C.Table) -> torch.Tensor:
    out = torch.empty(ids.shape[0], handle.cols)
    _C.embed(ids, handle, out)
    return out


def _run_logits(hidden: torch.Tensor, handle: _C.Head) -> torch.Tensor:
    out = torch.empty(hidden.shape[0], handle.rows)
    _C.logits(hidden, handle, out)
    return out


def _run_experts(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, handle: _C.Experts) -> torch.Tensor:
    out = torch.empty(x.shape)
    _C.moe_experts(x, ids, weights, handle, out)
    return out


def _refuse_experts(site: Site) -> str | None:
    kinds = [{f.name for f in site.weights[i::3]} for i in range(3)]
    if any(len(kind) > 1 for kind in kinds):
        return "experts have different weight formats"
    return None


def _refuse_layer(site: Site) -> str | None:
    config: ModelConfig = site.params["config"]
    if site.tp_size != 1:
        return f"tp_size {site.tp_size}: the whole layer is one op on one rank only"
    if site.params["attention"] != "host":
        return f"attention backend {site.params['attention']}"
    if site.params["kv_dtype"] not in (torch.float16, torch.float32):
        return f"cache of {site.params['kv_dtype']}"
    if config.head_dim > _C.MAX_HEAD_DIM:
        return f"head_dim {config.head_dim} above {_C.MAX_HEAD_DIM}"
    return None
