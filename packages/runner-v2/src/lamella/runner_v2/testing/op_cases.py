"""Sites and inputs of every op, for tests that hold a provider against the reference.

for case in op_cases():
    run_op(provider.pick(case.site), case)  against  run_op(reference.pick(case.site), case)
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from lamella.runner_v2.attention.backend import AttentionBackend
from lamella.runner_v2.config import Activation, LayerConfig, ModelConfig, MoeConfig, RopeConfig
from lamella.runner_v2.inputs import LayerCache
from lamella.runner_v2.layers.rotary import make_table
from lamella.runner_v2.ops.activation import GATED_ACTIVATION
from lamella.runner_v2.ops.decoder import DECODER_LAYER
from lamella.runner_v2.ops.embedding import EMBED
from lamella.runner_v2.ops.linear import LINEAR
from lamella.runner_v2.ops.logits import LOGITS
from lamella.runner_v2.ops.moe import MOE_EXPERTS, MOE_ROUTE
from lamella.runner_v2.ops.norm import ADD_RMS_NORM, RMS_NORM
from lamella.runner_v2.ops.rotary import ROPE, RopeTable
from lamella.runner_v2.ops.spec import Picked, Site
from lamella.runner_v2.quant.gguf_blocks import random_blocks
from lamella.runner_v2.quant.scheme import FORMATS
from lamella.runner_v2.testing.attention_cases import AttentionCase, make_batch
from lamella.runner_v2.testing.poison import poison
from lamella.runner_v2.weights.rules import parts_of
from lamella.runner_v2.weights.slots import RawPart

CHECKED_OPS = (
    LINEAR,
    RMS_NORM,
    ADD_RMS_NORM,
    ROPE,
    GATED_ACTIVATION,
    EMBED,
    LOGITS,
    MOE_ROUTE,
    MOE_EXPERTS,
    DECODER_LAYER,
)

DENSE_TOLERANCE = 2e-5
HALF_TOLERANCE = 2e-2
"""Products with 16-bit weights may round the activations to the weights' type."""
QUANTISED_TOLERANCE = 2e-2
"""Products with quantised weights may quantise the activations to 8 bits."""
LAYER_TOLERANCE = 5e-2
"""A whole layer adds such errors up, and its cache may be float16."""


class OpCase(NamedTuple):
    """A site, raw weights and arguments. Results are compared by RMS of the error over RMS of the reference."""

    name: str
    site: Site
    args: Callable[[], tuple[Any, ...]]
    """Fresh arguments of run, without the handle."""
    parts: tuple[RawPart, ...] = ()
    num_in_place: int = 0
    """So many of the first arguments are changed in place and belong to the result."""
    tolerance: float = DENSE_TOLERANCE
    attention: AttentionCase | None = None
    """decoder_layer: the step whose plan and cache it gets."""


def op_cases() -> list[OpCase]:
    """Every op with the widths, formats and token counts that differ in kind."""
    return [
        *_linear_cases(),
        *_norm_cases(),
        *_rope_cases(),
        *_activation_cases(),
        *_embed_cases(),
        *_logits_cases(),
        _wide_logits_case(),
        *_moe_cases(),
        *_layer_cases(),
    ]


def run_op(picked: Picked, case: OpCase, attention: AttentionBackend | None = None) -> list[torch.Tensor]:
    """Pack, bind and run -> every tensor of the result, those changed in place included.

    decoder_layer gets a plan of `attention`, which is bound here, and a cache that is NaN wherever nothing was written.
    """
    args = case.args()
    extra: tuple[Any, ...] = ()
    if case.attention is not None:
        assert attention is not None, "decoder_layer needs an attention backend"
        params = case.site.params
        config, layer = params["config"], params["layer"]
        limits = case.attention.limits(params["kv_dtype"])
        attention.bind(limits)
        num_tables = len(case.attention.rows)
        tables = [[2 * i + 1, 2 * i + 2] for i in range(num_tables)]
        shape = (2 * num_tables + 1, limits.num_kv_heads, limits.block_size, limits.head_dim)
        cache = LayerCache(*(poison(torch.zeros(shape, dtype=limits.kv_dtype)) for _ in range(2)))
        batch = make_batch(case.attention.rows, tables, limits.block_size, case.attention.window)
        args = (*args, attention.plan(batch, 0), cache)
        extra = (make_table(config.ropes[layer.rope_idx], config.head_dim, 64, 64), attention)
    if picked.pack is not None:
        assert picked.bind is not None
        args = (*args, picked.bind(picked.pack(case.parts), *extra))
    result = picked.run(*args)
    changed = list(args[: case.num_in_place])
    if result is None:
        return changed
    return [*changed, *(result if isinstance(result, tuple) else [result])]


_ACTIVATIONS = {"add_rms_norm": 2, "rope": 2, "embed": 0}
"""So many of the first arguments are activations; of other ops one."""


def rounded(case: OpCase, dtype: torch.dtype) -> OpCase:
    """The case with activations that a 16-bit type can hold, still in float32."""
    num = _ACTIVATIONS.get(case.site.op, 1)

    def args() -> tuple[Any, ...]:
        given = case.args()
        for tensor in given[:num]:
            tensor.copy_(tensor.to(dtype))
        return given

    return case._replace(args=args)


def placed(case: OpCase, dtype: torch.dtype, device: str) -> OpCase:
    """The case with activations of this type and everything on this device; strides and other types stay."""
    num = _ACTIVATIONS.get(case.site.op, 1)
    parts = tuple(part._replace(data=part.data.to(device)) for part in case.parts)

    def args() -> tuple[Any, ...]:
        return tuple(_placed(arg, dtype if i < num else None, device) for i, arg in enumerate(case.args()))

    return case._replace(site=replace(case.site, dtype=dtype, device=device), args=args, parts=parts)


def _placed(arg: Any, dtype: torch.dtype | None, device: str) -> Any:
    if isinstance(arg, RopeTable):
        return RopeTable(*(tensor.to(device) for tensor in arg))
    dtype = arg.dtype if dtype is None else dtype
    if arg.is_contiguous():
        return arg.to(device, dtype)
    memory = torch.zeros(arg.untyped_storage().nbytes() // arg.element_size(), dtype=dtype, device=device)
    return memory.as_strided(arg.shape, arg.stride(), arg.storage_offset()).copy_(arg)


def relative_error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """RMS of the difference over RMS of the reference; NaN asserts."""
    if reference.numel() == 0:
        return 0.0
    ours, reference = ours.double().cpu(), reference.double().cpu()
    difference = (ours - reference).pow(2).mean().sqrt()
    assert not difference.isnan(), "NaN: memory was read that nobody had written"
    return float(difference / reference.pow(2).mean().sqrt())


def raw_part(key: str, shape: tuple[int, ...], format: str = "float32", std: float | None = None) -> RawPart:
    """A random tensor of the checkpoint, the same for the same key. Matrices have the deviation 1 / sqrt(columns)."""
    weight_format = FORMATS[format]
    seed = zlib.crc32(key.encode())
    std = shape[-1] ** -0.5 if std is None else std
    if weight_format.quantised:
        num_blocks = shape[0] * shape[1] // weight_format.block_len
        blocks = random_blocks(weight_format, num_blocks, std, np.random.default_rng(seed))
        data = torch.from_numpy(blocks).reshape(shape[0], -1)
    else:
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * std
        data = noise.to(getattr(torch, format))
    return RawPart(key, weight_format, shape, data)


def _site(op: str, params: Mapping[str, Any], parts: Sequence[RawPart] = ()) -> Site:
    formats = tuple(p.format for p in parts if len(p.shape) > 1)
    return Site(op, "cpu", torch.float32, formats, 1, params)


def _randn(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def _tolerance(*formats: str) -> float:
    if any(FORMATS[format].quantised for format in formats):
        return QUANTISED_TOLERANCE
    return DENSE_TOLERANCE if set(formats) == {"float32"} else HALF_TOLERANCE


def _linear_cases() -> Iterator[OpCase]:
    variants: list[tuple[int, int, tuple[tuple[int, str], ...], bool]] = [
        # tokens, in, (out, format) of each part, bias
        *((num_tokens, 512, ((96, format),), False) for format in FORMATS for num_tokens in (1, 7, 33)),
        (5, 256, ((64, "q4_1"), (32, "q4_0"), (32, "q8_0")), False),
        (3, 256, ((64, "q4_k"), (32, "q4_k"), (32, "q6_k")), True),
        (1, 64, ((24, "float32"), (8, "float32"), (8, "float32")), True),
        (200, 96, ((33, "float32"),), False),
        (70, 288, ((47, "q8_0"),), True),
        (0, 64, ((16, "float32"),), False),
    ]
    for num_tokens, width, outs, bias in variants:
        names = ("q", "k", "v")[: len(outs)] if len(outs) > 1 else ("o",)
        parts = [raw_part(f"layers.0.{n}", (out, width), fmt) for n, (out, fmt) in zip(names, outs, strict=True)]
        biases = [raw_part(f"layers.0.{n}_bias", (out,), std=0.5) for n, (out, _) in zip(names, outs, strict=True)]
        params = {"in": width, "outs": tuple(out for out, _ in outs), "bias": bias}
        formats = [fmt for _, fmt in outs]
        yield OpCase(
            f"linear {num_tokens}x{width} {'+'.join(formats)}{' bias' if bias else ''}",
            _site("linear", params, parts),
            lambda n=num_tokens, w=width: (_randn(n, w),),  # type: ignore[misc]
            (*parts, *(biases if bias else ())),
            tolerance=_tolerance(*formats),
        )


def _norm_cases() -> Iterator[OpCase]:
    for plus_one in (False, True):
        params = {"width": 576, "eps": 1e-5, "plus_one": plus_one}
        kind = " plus one" if plus_one else ""

        def weight(width: int) -> torch.Tensor:
            return _randn(width, seed=1)

        for num_tokens in (1, 5, 64):
            yield OpCase(
                f"rms_norm {num_tokens}{kind}",
                _site("rms_norm", params),
                lambda n=num_tokens: (_randn(n, 576, scale=3.0), weight(576)),  # type: ignore[misc]
            )
            yield OpCase(
                f"add_rms_norm {num_tokens}{kind}",
                _site("add_rms_norm", params),
                lambda n=num_tokens: (_randn(n, 576), _randn(n, 576, seed=2), weight(576)),  # type: ignore[misc]
            )
        yield OpCase(
            f"rms_norm heads{kind}",
            _site("rms_norm", {**params, "width": 32}),
            lambda: (_randn(7, 9, 32)[:, 2:6], weight(32)),
        )


def _rope_cases() -> Iterator[OpCase]:
    for name, rope in {
        "half": RopeConfig(),
        "interleaved": RopeConfig(interleaved=True),
        "partial": RopeConfig(rotary_dim=24),
        "yarn": RopeConfig(kind="yarn", factor=4.0, original_max_position=64),
    }.items():
        table = make_table(rope, 64, 200, 200)
        params = {"head_dim": 64, "rotary_dim": 2 * table.cos.shape[1], "interleaved": rope.interleaved}

        def args(table: Any = table) -> tuple[Any, ...]:
            qkv = _randn(9, 7, 64)
            positions = torch.tensor([0, 1, 2, 199, 7, 7, 64, 100, 3], dtype=torch.int32)
            return qkv[:, :5], qkv[:, 5:6], positions, table

        yield OpCase(f"rope {name}", _site("rope", params), args, num_in_place=2)


def _activation_cases() -> Iterator[OpCase]:
    kinds: tuple[Activation, ...] = ("silu", "gelu_tanh", "gelu")
    for kind in kinds:
        for num_tokens, width in ((1, 1536), (5, 96), (40, 33)):
            yield OpCase(
                f"gated_activation {kind} {num_tokens}x{width}",
                _site("gated_activation", {"kind": kind, "width": width}),
                lambda n=num_tokens, w=width: (_randn(n, 2 * w, scale=4.0),),  # type: ignore[misc]
            )


def _embed_cases() -> Iterator[OpCase]:
    for format in FORMATS:
        for scale, tied in ((None, False), (8.0, True)):
            part = raw_part("embed", (50, 256), format)
            params = {"vocab": 50, "hidden": 256, "scale": scale, "tied": tied}
            yield OpCase(
                f"embed {format}{' scaled' if scale else ''}",
                _site("embed", params, [part]),
                lambda: (torch.tensor([0, 49, 7, 7, 31], dtype=torch.int32),),
                (part,),
            )


def _logits_cases() -> Iterator[OpCase]:
    norm = raw_part("final_norm", (256,), std=1.0)
    for format in FORMATS:
        for num_rows, softcap, plus_one in ((1, None, False), (9, 30.0, True)):
            head = raw_part("lm_head", (130, 256), format)
            params = {
                "hidden": 256,
                "vocab": 130,
                "eps": 1e-6,
                "plus_one": plus_one,
                "softcap": softcap,
                "tied": False,
            }
            yield OpCase(
                f"logits {format} {num_rows}{' softcap' if softcap else ''}",
                _site("logits", params, [head]),
                lambda n=num_rows: (_randn(n, 256, scale=2.0),),  # type: ignore[misc]
                (norm, head),
                tolerance=_tolerance(format),
            )


def _wide_logits_case() -> OpCase:
    """A vocabulary of whole vectors, as models have."""
    norm, head = raw_part("final_norm", (256,), std=1.0), raw_part("lm_head", (192, 256), "bfloat16")
    params = {"hidden": 256, "vocab": 192, "eps": 1e-6, "plus_one": False, "softcap": None, "tied": False}
    return OpCase(
        "logits of whole vectors",
        _site("logits", params, [head]),
        lambda: (_randn(4, 256, scale=2.0),),
        (norm, head),
        tolerance=_tolerance("bfloat16"),
    )


def _moe_cases() -> Iterator[OpCase]:
    for norm_topk in (False, True):
        routing = {"num_experts": 16, "num_experts_per_token": 4, "norm_topk": norm_topk}
        name = f"moe_route{' norm' if norm_topk else ''}"
        yield OpCase(name, _site("moe_route", routing), lambda: (_randn(7, 16, scale=2.0),))
    for formats in (("float32",) * 3, ("bfloat16",) * 3, ("q4_1", "q4_1", "q8_0"), ("q4_k", "q4_k", "q6_k")):
        for num_tokens in (1, 6, 40):
            parts = tuple(
                raw_part(f"layers.0.experts.{e}.{name}", shape, format)
                for e in range(8)
                for name, shape, format in zip(
                    ("gate", "up", "down"), ((256, 256), (256, 256), (256, 256)), formats, strict=True
                )
            )
            params: dict[str, Any] = {
                "num_experts": 8,
                "num_experts_per_token": 2,
                "hidden": 256,
                "width": 256,
                "activation": "silu",
            }

            def args(n: int = num_tokens) -> tuple[Any, ...]:
                scores, ids = _randn(n, 8, seed=3).softmax(-1).topk(2)
                return _randn(n, 256), ids.int(), scores

            yield OpCase(
                f"moe_experts {num_tokens} {'+'.join(dict.fromkeys(formats))}",
                _site("moe_experts", params, parts),
                args,
                parts,
                tolerance=2 * _tolerance(*formats),
            )


def _layer_cases() -> Iterator[OpCase]:
    plain = ModelConfig(
        family="llama",
        vocab_size=256,
        hidden_size=256,
        num_heads=6,
        num_kv_heads=2,
        head_dim=32,
        intermediate_size=512,
        layers=(LayerConfig(),),
        ropes=(RopeConfig(),),
        max_position=64,
        norm_eps=1e-5,
        attention_scale=32**-0.5,
    )
    sliding = replace(
        plain,
        family="gemma3_text",
        activation="gelu_tanh",
        qk_norm=True,
        norm_plus_one=True,
        sandwich_norms=True,
        layers=(LayerConfig(window=5),),
    )
    experts = replace(plain, family="qwen3_moe", qk_norm=True, layers=(LayerConfig(moe=MoeConfig(4, 2, 256)),))
    decode, chunk = ((1, 1), (1, 1)), ((7, 7), (20, 20), (1, 1))
    variants: list[tuple[str, ModelConfig, str, tuple[tuple[int, int], ...]]] = [
        ("dense", plain, "float32", chunk),
        ("half", plain, "bfloat16", chunk),
        ("q4_1", plain, "q4_1", chunk),
        ("q4_1 one token a row", plain, "q4_1", decode),
        ("q8_0 biased", replace(plain, family="qwen2", qkv_bias=True), "q8_0", chunk),
        ("sandwich", sliding, "q4_0", chunk),
        ("experts", experts, "q8_0", chunk),
    ]
    for name, config, format, rows in variants:
        layer = config.layers[0]
        parts = tuple(
            raw_part(
                part.key,
                part.shape,
                format if len(part.shape) > 1 and not part.key.endswith("router") else "float32",
                0.2 if len(part.shape) == 1 else None,
            )
            for part in parts_of(config).values()
            if part.key.startswith("layers.0.")
        )
        if not config.norm_plus_one:
            parts = tuple(p._replace(data=p.data + 1) if p.key.endswith("_norm") else p for p in parts)
        params = {"config": config, "layer": layer, "attention": "", "kv_dtype": torch.float32}
        num_tokens = sum(query_len for _, query_len in rows)
        yield OpCase(
            f"decoder_layer {name}",
            _site("decoder_layer", params, parts),
            lambda n=num_tokens: (_randn(n, 256),),  # type: ignore[misc]
            parts,
            tolerance=LAYER_TOLERANCE if format != "float32" else 2e-3,
            attention=AttentionCase(
                name, rows, config.num_heads, config.num_kv_heads, config.head_dim, window=layer.window
            ),
        )
