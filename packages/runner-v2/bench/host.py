"""Times the host kernels: microseconds, GB/s of weights or cache, and GOP/s (a multiply and an add are two).

    python packages/runner-v2/bench/host.py [--threads N] [--isa NAME] [--seconds S] [--formats q4_1,q8_0]

Each figure is the best of many runs: on a shared machine the best is what the kernel can do, the mean what the
neighbours left of it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from lamella.runner_v2 import _C
from lamella.runner_v2.attention.host import HostAttention
from lamella.runner_v2.config import LayerConfig, ModelConfig, RopeConfig
from lamella.runner_v2.inputs import LayerCache
from lamella.runner_v2.layers.rotary import make_table
from lamella.runner_v2.ops.host_pack import native_parts, pack_matrices
from lamella.runner_v2.ops.providers.host import HostProvider
from lamella.runner_v2.ops.spec import Site
from lamella.runner_v2.quant.gguf_blocks import random_blocks
from lamella.runner_v2.quant.scheme import FORMATS
from lamella.runner_v2.testing.attention_cases import AttentionCase, make_batch
from lamella.runner_v2.weights.rules import parts_of
from lamella.runner_v2.weights.slots import RawPart

SMOLLM2 = ModelConfig(
    family="llama",
    vocab_size=49152,
    hidden_size=576,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    layers=(LayerConfig(),),
    ropes=(RopeConfig(theta=100000.0),),
    max_position=8192,
    norm_eps=1e-5,
    attention_scale=0.125,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=_C.num_threads())
    parser.add_argument("--isa", choices=_C.isas(), default=_C.isa())
    parser.add_argument("--seconds", type=float, default=0.3, help="of each figure")
    parser.add_argument("--formats", default="q4_1,q8_0,q4_k,q6_k,bfloat16")
    args = parser.parse_args()
    _C.set_isa(args.isa)
    provider = HostProvider(args.threads)
    print(f"{args.isa}, {args.threads} threads")
    print(f"{'op':46} {'us':>10} {'GB/s':>8} {'GOP/s':>8}")
    formats = args.formats.split(",")
    for format in formats:
        for rows, cols in ((3072, 576), (576, 1536), (4096, 4096)):
            bench_linear(format, rows, cols, args.seconds)
    bench_attention(args.seconds)
    for format in formats:
        if SMOLLM2.hidden_size % FORMATS[format].block_len == 0:
            bench_layer(provider, format, args.seconds)


def report(name: str, seconds: float, num_bytes: int, num_ops: float) -> None:
    print(
        f"{name:46} {seconds * 1e6:10.1f} {num_bytes / seconds / 1e9:8.1f} {num_ops / seconds / 1e9:8.1f}", flush=True
    )


def best(call: Callable[[], object], seconds: float) -> float:
    shortest, end = float("inf"), time.perf_counter() + seconds
    while True:
        started = time.perf_counter()
        call()
        now = time.perf_counter()
        shortest = min(shortest, now - started)
        if now > end:
            return shortest


def make_part(format: str, rows: int, cols: int, key: str = "layers.0.o") -> RawPart:
    f = FORMATS[format]
    if f.quantised:
        blocks = random_blocks(f, rows * cols // f.block_len, cols**-0.5, np.random.default_rng(0))
        data = torch.from_numpy(blocks).view(rows, -1)
    else:
        data = (torch.randn(rows, cols) * cols**-0.5).to(getattr(torch, format))
    return RawPart(key, f, (rows, cols), data)


def bench_linear(format: str, rows: int, cols: int, seconds: float) -> None:
    if cols % FORMATS[format].block_len:
        return
    packed = pack_matrices([make_part(format, rows, cols)])
    handle = _C.Linear(native_parts(packed))
    num_bytes = sum(tensor.nbytes for tensor in packed.values())
    for tokens in (1, 8, 128):
        x, out = torch.randn(tokens, cols), torch.empty(tokens, rows)
        took = best(lambda x=x, out=out: _C.linear(x, handle, out), seconds)  # type: ignore[misc]
        report(f"linear {format} {rows}x{cols}, {tokens} tokens", took, num_bytes, 2.0 * rows * cols * tokens)


def bench_attention(seconds: float) -> None:
    for rows in (((513, 1),), ((513, 1),) * 8, ((4096, 1),), ((512, 512),)):
        case = AttentionCase("", rows, 9, 3, 64)
        backend = HostAttention()
        backend.bind(case.limits(torch.float16))
        blocks = [-(-seq_len // 16) for seq_len, _ in rows]
        starts = [1 + sum(blocks[:i]) for i in range(len(rows))]
        tables = [list(range(start, start + count)) for start, count in zip(starts, blocks, strict=True)]
        batch = make_batch(rows, tables, 16)
        cache = LayerCache(*(torch.randn(1 + sum(blocks), 3, 16, 64).half() for _ in range(2)))
        q, out = torch.randn(batch.num_tokens, 9, 64), torch.empty(batch.num_tokens, 9, 64)
        plan = backend.plan(batch, 0)
        took = best(lambda q=q, c=cache, p=plan, o=out, b=backend: b.run(q, None, None, c, p, o), seconds)  # type: ignore[misc]
        keys = sum((2 * seq_len - query_len + 1) * query_len / 2 for seq_len, query_len in rows)
        num_bytes = sum(seq_len for seq_len, _ in rows) * 3 * 64 * 2 * 2
        name = ", ".join(f"{n}" for n in {f"{query_len} tokens at {seq_len}" for seq_len, query_len in rows})
        report(f"attention {len(rows)} x {name}", took, num_bytes, 4.0 * keys * 9 * 64)


def bench_layer(provider: HostProvider, format: str, seconds: float) -> None:
    parts = []
    for part in parts_of(SMOLLM2).values():
        if part.key.startswith("layers.0."):
            if len(part.shape) > 1:
                parts.append(make_part(format, part.shape[0], part.shape[1], part.key))
            else:
                parts.append(RawPart(part.key, FORMATS["float32"], part.shape, torch.ones(part.shape)))
    attention = HostAttention()
    attention.bind(AttentionCase("", ((1, 1),), 9, 3, 64).limits(torch.float16))
    params = {"config": SMOLLM2, "layer": SMOLLM2.layers[0], "attention": "host", "kv_dtype": torch.float16}
    picked = provider.pick(Site("decoder_layer", "cpu", torch.float32, (), 1, params))
    assert picked.pack is not None
    assert picked.bind is not None
    started = time.perf_counter()
    packed = picked.pack(parts)
    took = time.perf_counter() - started
    num_bytes = sum(tensor.nbytes for tensor in packed.values())
    report(f"pack a layer {format}", took, num_bytes, 0.0)
    handle = picked.bind(packed, make_table(SMOLLM2.ropes[0], 64, 1024, 1024), attention)
    weights = sum(p.shape[0] * p.shape[1] for p in parts if len(p.shape) > 1)
    for rows in (((513, 1),), ((513, 1),) * 8, ((512, 512),)):
        tables = [list(range(1 + 33 * i, 34 + 33 * i)) for i in range(len(rows))]
        batch = make_batch(rows, tables, 16)
        cache = LayerCache(*(torch.zeros(1 + 33 * len(rows), 3, 16, 64).half() for _ in range(2)))
        plan = attention.plan(batch, 0)
        hidden = torch.randn(batch.num_tokens, 576)
        took = best(lambda h=hidden, p=plan, c=cache: picked.run(h, p, c, handle), seconds)  # type: ignore[misc]
        name = f"decoder_layer {format}, {batch.num_tokens} tokens of {len(rows)} rows"
        report(name, took, num_bytes, 2.0 * weights * batch.num_tokens)


if __name__ == "__main__":
    main()
