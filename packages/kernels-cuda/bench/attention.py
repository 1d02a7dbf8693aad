"""Paged decode, 32 query and 8 kv heads of 128, bf16, blocks of 16; and with an fp8 cache."""

import torch
from timing import seconds, sets_for

from lamella import kernels_cuda as kernels

# batch, context: target, peer (FlashAttention 3 on this card), microseconds
FIGURES = {
    (1, 1024): (7.0, 12.2),
    (1, 32768): (36.0, 43.7),
    (1, 131072): (130.0, 138.0),
    (32, 1024): (34.0, 42.9),
    (32, 8192): (245.0, 253.0),
    (256, 1024): (250.0, 279.0),
    (256, 4096): (985.0, 1004.0),
}
HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16


def rows(emit):
    """emit(name, seconds, target_s, peer_s, bytes, flops, test): test is the node id prefix that must be green."""
    for (batch, context), (target, peer) in FIGURES.items():
        emit(
            f"paged decode 32q/8kv x 128, b{batch} ctx {context}",
            seconds(_calls(batch, context, torch.bfloat16)),
            target * 1e-6,
            peer * 1e-6,
            bytes=2 * batch * context * KV_HEADS * DIM * 2,
            test="test_attention.py",
        )
    for batch, context in ((1, 32768), (32, 8192), (256, 1024)):
        emit(
            f"paged decode 32q/8kv x 128, fp8 cache, b{batch} ctx {context}",
            seconds(_calls(batch, context, torch.float8_e4m3fn)),
            None,
            None,
            bytes=2 * batch * context * KV_HEADS * DIM,
            test="test_attention.py",
        )


def _calls(batch, context, dtype):
    blocks = batch * context // BLOCK
    lens = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    schedule = kernels.decode_schedule(lens, HEADS, KV_HEADS)
    workspace = torch.empty(kernels.paged_decode_workspace_size(HEADS, KV_HEADS, DIM), dtype=torch.uint8, device="cuda")
    calls = []
    for _ in range(sets_for(2 * blocks * KV_HEADS * BLOCK * DIM * dtype.itemsize)):
        k, v = (
            torch.randn(blocks, KV_HEADS, BLOCK, DIM, dtype=torch.bfloat16, device="cuda").to(dtype) for _ in range(2)
        )
        table = torch.randperm(blocks, device="cuda").int().view(batch, -1)
        q = torch.randn(batch, 1, HEADS, DIM, device="cuda").bfloat16()
        out = torch.empty_like(q)
        calls.append(
            lambda q=q, k=k, v=v, t=table, o=out: kernels.paged_decode(
                q, k, v, t, lens, DIM**-0.5, schedule=schedule, workspace=workspace, out=o
            )
        )
    return calls
