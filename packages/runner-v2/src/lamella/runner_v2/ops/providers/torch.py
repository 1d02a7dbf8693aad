"""The reference provider: every op, on any device, with dense weights.

Quantised weights are dequantised when they are packed. With batch_invariant each row of a step is computed by itself,
by calls whose shapes depend on the model alone, so that its bits cannot depend on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from lamella.runner_v2.attention.backend import AttentionBackend
from lamella.runner_v2.ops.activation import gated_activation
from lamella.runner_v2.ops.decoder import DenseLayer, decoder_layer, group_parts
from lamella.runner_v2.ops.embedding import DenseTable, embed
from lamella.runner_v2.ops.linear import DenseLinear, linear, split_bias
from lamella.runner_v2.ops.logits import DenseHead, logits
from lamella.runner_v2.ops.moe import DenseExperts, moe_experts, moe_route
from lamella.runner_v2.ops.norm import add_rms_norm, rms_norm
from lamella.runner_v2.ops.rotary import RopeTable, rope
from lamella.runner_v2.ops.spec import Picked, Site
from lamella.runner_v2.quant.gguf_blocks import dequantise
from lamella.runner_v2.weights.slots import RawPart

Packed = Mapping[str, torch.Tensor]


class TorchProvider:
    """Serves every op by its reference body."""

    name = "torch"

    def __init__(self, weight_dtype: torch.dtype = torch.float32, batch_invariant: bool = False) -> None:
        self.weight_dtype = weight_dtype
        """Of packed matrices; products are computed in it."""
        self.batch_invariant = batch_invariant
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
        return None if site.op in self._makers else f"no reference for an op named {site.op}"

    def pick(self, site: Site) -> Picked:
        return self._makers[site.op](site)

    def _picked(
        self,
        site: Site,
        run: Callable[..., Any],
        pack: Callable[[Sequence[RawPart]], Packed] | None = None,
        bind: Callable[..., Any] | None = None,
        row_args: int = 1,
    ) -> Picked:
        if self.batch_invariant:
            run = by_row(run, row_args)
        return Picked(site.op, self.name, run, pack, bind, self.batch_invariant)

    def _linear(self, site: Site) -> Picked:
        return self._picked(site, linear, self._pack_linear, _bind_linear)

    def _rms_norm(self, site: Site) -> Picked:
        return self._picked(site, partial(rms_norm, eps=site.params["eps"], plus_one=site.params["plus_one"]))

    def _add_rms_norm(self, site: Site) -> Picked:
        run = partial(add_rms_norm, eps=site.params["eps"], plus_one=site.params["plus_one"])
        return self._picked(site, run, row_args=2)

    def _rope(self, site: Site) -> Picked:
        # products and sums of single elements: a row's bits never depend on its neighbours
        run = partial(rope, interleaved=site.params["interleaved"])
        return Picked(site.op, self.name, run, batch_invariant=True)

    def _gated_activation(self, site: Site) -> Picked:
        return self._picked(site, partial(gated_activation, kind=site.params["kind"]))

    def _embed(self, site: Site) -> Picked:
        def bind(packed: Packed) -> DenseTable:
            return DenseTable(packed["weight"], site.params["scale"], site.dtype)

        return Picked(site.op, self.name, embed, self._pack_linear, bind, batch_invariant=True)

    def _logits(self, site: Site) -> Picked:
        def pack(parts: Sequence[RawPart]) -> Packed:
            norm, *head = parts
            return {"norm": norm.data.float(), **(self._pack_linear(head) if head else {})}

        def bind(packed: Packed) -> DenseHead:
            p = site.params
            return DenseHead(packed["norm"], packed["weight"], p["eps"], p["plus_one"], p["softcap"])

        return self._picked(site, logits, pack, bind)

    def _moe_route(self, site: Site) -> Picked:
        p = site.params
        run = partial(moe_route, num_experts_per_token=p["num_experts_per_token"], norm_topk=p["norm_topk"])
        return self._picked(site, run)

    def _moe_experts(self, site: Site) -> Picked:
        def bind(packed: Packed) -> DenseExperts:
            return DenseExperts(packed["gate_up"], packed["down"], site.params["activation"])

        return self._picked(site, moe_experts, self._pack_experts, bind, row_args=3)

    def _decoder_layer(self, site: Site) -> Picked:
        config, layer = site.params["config"], site.params["layer"]

        def pack(parts: Sequence[RawPart]) -> Packed:
            packed: dict[str, torch.Tensor] = {}
            for name, group in group_parts(parts).items():
                if name.endswith("_norm"):
                    packed[name] = group[0].data.float()
                else:
                    one = self._pack_experts(group) if name == "experts" else self._pack_linear(group)
                    packed.update({f"{name}.{key}": tensor for key, tensor in one.items()})
            return packed

        def bind(packed: Packed, rope_table: RopeTable, attention: AttentionBackend) -> DenseLayer:
            experts = None
            if layer.moe is not None:
                experts = DenseExperts(packed["experts.gate_up"], packed["experts.down"], config.activation)
            names = [key.removesuffix(".weight") for key in packed if key.endswith(".weight")]
            linears = {name: DenseLinear(packed[f"{name}.weight"], packed.get(f"{name}.bias")) for name in names}
            norms = {key: tensor for key, tensor in packed.items() if key.endswith("_norm")}
            return DenseLayer(config, layer, norms, linears, experts, rope_table, attention)

        return Picked(site.op, self.name, decoder_layer, pack, bind)

    def _pack_linear(self, parts: Sequence[RawPart]) -> Packed:
        weights, biases = split_bias(parts)
        packed = {"weight": torch.cat([self._dense(part) for part in weights])}
        if any(bias is not None for bias in biases):
            packed["bias"] = torch.cat(
                [
                    torch.zeros(part.shape[0], device=part.data.device) if bias is None else bias.data.float()
                    for part, bias in zip(weights, biases, strict=True)
                ]
            )
        return packed

    def _pack_experts(self, parts: Sequence[RawPart]) -> Packed:
        dense = [self._dense(part) for part in parts]
        gate_up = [torch.cat([gate, up]) for gate, up in zip(dense[0::3], dense[1::3], strict=True)]
        return {"gate_up": torch.stack(gate_up), "down": torch.stack(dense[2::3])}

    def _dense(self, part: RawPart) -> torch.Tensor:
        return dequantise(part.data, part.format).to(self.weight_dtype)


def by_row(run: Callable[..., Any], row_args: int) -> Callable[..., Any]:
    """run, called for one row at a time: the first row_args arguments are cut into rows of their own memory."""

    def run_rows(*args: Any) -> Any:
        num_rows = args[0].shape[0]
        if num_rows == 0:
            return run(*args)
        results = [
            # a copy, so that every row starts at the same alignment
            run(*(arg[row : row + 1].clone() for arg in args[:row_args]), *args[row_args:])
            for row in range(num_rows)
        ]
        if isinstance(results[0], torch.Tensor):
            return torch.cat(results)
        return tuple(torch.cat(column) for column in zip(*results, strict=True))

    return run_rows


def _bind_linear(packed: Packed) -> DenseLinear:
    return DenseLinear(packed["weight"], packed.get("bias"))
