"""SiLU * up, plain and with fp8 quantisation."""

import torch
from timing import seconds, sets_for

from lamella import kernels_cuda as kernels

WIDTH = 14336
TARGET_US = {1: 2.3, 32: 2.5, 256: 6.0, 8192: 172.0}
PEER_US = {1: 4.6, 32: 4.8, 256: 7.0, 8192: 180.0}  # vLLM 0.26's kernel on this card


def rows(emit):
    for m, target in TARGET_US.items():
        sets, tile_sets, token_sets, group_sets = [], [], [], []
        for _ in range(sets_for(m * WIDTH * 6)):
            x = torch.randn(m, 2 * WIDTH, device="cuda").bfloat16()
            out, q = torch.empty_like(x[:, :WIDTH]), torch.empty(m, WIDTH, device="cuda").to(torch.float8_e4m3fn)
            scale, scales = torch.empty(m, device="cuda"), torch.empty(m, WIDTH // 128, device="cuda")
            sets.append(lambda x=x, o=out: kernels.silu_mul(x, out=o))
            tile_sets.append(lambda x=x, o=out: kernels.silu_mul(x, tile=64, out=o))
            token_sets.append(lambda x=x, q=q, s=scale: kernels.silu_mul_fp8_per_token(x, out=q, scale=s))
            group_sets.append(lambda x=x, q=q, s=scales: kernels.silu_mul_fp8_per_group(x, out=q, scale=s))
        for layout, calls in (("", sets), (" in tiles of 64", tile_sets)):
            emit(
                f"SiLU * up {WIDTH} wide{layout}, m={m}",
                seconds(calls),
                target * 1e-6,
                None if layout else PEER_US[m] * 1e-6,
                bytes=m * WIDTH * 6,
                test="test_activation.py",
            )
        for name, calls in (("token", token_sets), ("group of 128", group_sets)):
            emit(
                f"SiLU * up to fp8 per {name}, {WIDTH} wide, m={m}",
                seconds(calls),
                None,
                None,
                bytes=m * WIDTH * 5,
                test="test_activation.py",
            )
