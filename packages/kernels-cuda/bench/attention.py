"""Paged decode, 32 query and 8 kv heads of 128, bf16, blocks of 16; and with an fp8 cache."""

import torch
from timing import seconds, sets_for

from lamella import kernels_cuda as kernels

# batch, context: target, peer (FlashAttention 3 on this card), microseconds
FIGURES = {
    (1, 1024): (7.0, 12.2),
    (1, 32768): (36.0, 43.7),
    (1, 131072): (130.0, 138.0),
    (8, 1088): (None, None),
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
            target and target * 1e-6,
            peer and peer * 1e-6,
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
    for batch, context in ((1, 1024), (8, 1088), (32, 1024)):
        for follows in (False, True):
            emit(
                f"KV write and paged decode 32q/8kv x 128, b{batch} ctx {context}" + ", loads ahead" * follows,
                seconds(_calls(batch, context, torch.bfloat16, follows)),
                None,
                None,
                bytes=2 * batch * context * KV_HEADS * DIM * 2,
                test="test_attention.py",
            )
    for batch in (1, 32, 256):
        lens = torch.randint(500, 2000, (batch,), dtype=torch.int32, device="cuda")
        schedule = kernels.decode_schedule(lens, HEADS, KV_HEADS)
        emit(
            f"schedule of paged decode, b{batch}",
            seconds([lambda n=lens, s=schedule: kernels.decode_schedule(n, HEADS, KV_HEADS, out=s)]),
            3e-6,
            None,
            test="test_attention.py",
        )


def _calls(batch, context, dtype, follows=None):
    """follows: not None: each behind the write of the newest keys."""
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
        new = torch.randn(batch, KV_HEADS, DIM, device="cuda").bfloat16()
        slots = table[:, -1].long() * BLOCK + (context - 1) % BLOCK

        def call(q=q, k=k, v=v, t=table, o=out, new=new, slots=slots):
            if follows is not None:
                kernels.kv_write(new, new, k, v, slots)
            kernels.paged_decode(
                q, k, v, t, lens, DIM**-0.5, schedule=schedule, workspace=workspace, out=o, follows_write=bool(follows)
            )

        calls.append(call)
    return calls
