"""RoPE + KV write: llama-3.1-8b's heads, and torch doing the same with its own operators."""

import torch
from timing import seconds, sets_for

from lamella import kernels_cuda as kernels

TARGET_US = {1: 2.0, 256: 3.0, 8192: 20.0}  # of 8 kv heads x 128
HEADS, KV_HEADS, WIDTH, BLOCK = 32, 8, 128, 16


def _torch(q, k, v, positions, cos, sin, k_cache, v_cache, slots):
    c, s = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    half = WIDTH // 2
    for x in (q, k):
        a, b = x[..., :half].float(), x[..., half:].float()
        x.copy_(torch.cat((a * c - b * s, b * c + a * s), -1))
    for cache, x in ((k_cache, k), (v_cache, v)):
        cache[slots // BLOCK, :, slots % BLOCK] = x


def rows(emit):
    cos, sin = torch.rand(16384, WIDTH // 2, device="cuda"), torch.rand(16384, WIDTH // 2, device="cuda")
    for m, target in TARGET_US.items():
        for heads in (HEADS, 0):
            moved = m * WIDTH * 2 * (2 * heads + 4 * KV_HEADS)
            blocks = -(-m // BLOCK) + 8
            ours, theirs = [], []
            for _ in range(sets_for(moved // 2)):
                row = torch.randn(m, (HEADS + 2 * KV_HEADS) * WIDTH, device="cuda").bfloat16()
                q, k, v = (
                    x.view(m, -1, WIDTH) for x in row.split([HEADS * WIDTH, KV_HEADS * WIDTH, KV_HEADS * WIDTH], 1)
                )
                q = q[:, : max(heads, 1)]
                caches = [torch.zeros(blocks, KV_HEADS, BLOCK, WIDTH, device="cuda").bfloat16() for _ in range(2)]
                positions = torch.randint(0, 16384, (m,), device="cuda", dtype=torch.int32)
                slots = torch.randperm(blocks * BLOCK, device="cuda")[:m]
                args = (q, k, v, positions, cos, sin, *caches, slots)
                ours.append(lambda a=args: kernels.rope_write(*a))
                theirs.append(lambda a=args: _torch(*a))
            emit(
                f"RoPE + KV write, {KV_HEADS} kv heads x 128, {heads if heads else 'one'} q heads, m={m}",
                seconds(ours),
                target * 1e-6,
                seconds(theirs),
                bytes=moved,
                test="test_cache.py",
            )
