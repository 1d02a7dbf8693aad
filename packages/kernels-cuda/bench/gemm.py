"""Skinny products in bf16 and fp8, and those of a whole llama-8B layer as they follow each other."""

import torch
from timing import seconds, sets_for

from lamella import kernels_cuda as kernels

TARGET_US = {1: 56, 16: 56, 64: 60, 256: 92}
PEER_US = {1: 69, 16: None, 64: 77, 256: 109}  # cuBLAS on this card


def rows(emit):
    workspace = kernels.linear_workspace(256)
    k, n = 4096, 28672
    weights = [torch.randn(n, k, device="cuda").bfloat16() for _ in range(3)]
    for m, target in TARGET_US.items():
        x = torch.randn(m, k, device="cuda").bfloat16()
        out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        calls = [lambda w=w, x=x, o=out: kernels.linear(x, w, workspace, out=o) for w in weights]
        theirs = [lambda w=w, x=x, o=out: torch.matmul(x, w.T, out=o) for w in weights]
        peer = PEER_US[m]
        emit(
            f"skinny GEMM bf16 [m,4096]x[4096,28672], m={m}",
            seconds(calls),
            target * 1e-6,
            None if peer is None else peer * 1e-6,
            bytes=n * k * 2,
            flops=2 * m * n * k,
            test="test_gemm.py",
        )
        emit(
            f"cuBLAS, same, m={m}",
            seconds(theirs),
            None,
            None,
            bytes=n * k * 2,
            flops=2 * m * n * k,
            test="test_gemm.py",
        )
    for m in (1, 16, 64):
        x = torch.randn(m, k, device="cuda").to(torch.float8_e4m3fn)
        eights = [w.to(torch.float8_e4m3fn) for w in weights]
        xs, ws = torch.ones(m, device="cuda"), torch.ones(n, device="cuda")
        calls = [lambda w=w, x=x, xs=xs, ws=ws: kernels.linear_fp8(x, w, xs, ws, workspace) for w in eights]
        emit(
            f"skinny GEMM fp8, m={m}", seconds(calls), 30e-6 if m == 1 else None, None, bytes=n * k, test="test_gemm.py"
        )
    _layer(emit, workspace)
    _blocks(emit, workspace)


def _layer(emit, workspace):
    """qkv, o, gate_up, down of llama-3.1-8b with norms and residuals fused, weights of 8 layers in turn."""
    h, qkv, inner = 4096, 6144, 14336
    layers = [
        [
            torch.randn(*shape, device="cuda").bfloat16() * 0.02
            for shape in ((qkv, h), (h, h), (2 * inner, h), (h, inner))
        ]
        for _ in range(8)
    ]
    gain = torch.ones(h, device="cuda").bfloat16()
    for m in (1, 8, 32, 128):
        hidden, scaled, a = (torch.randn(m, h, device="cuda").bfloat16() for _ in range(3))
        squares = torch.ones(h // 128, m, device="cuda")

        def step(layer, hidden=hidden, scaled=scaled, a=a, squares=squares):
            kernels.linear(scaled, layer[0], workspace, squares_in=squares, eps=1e-5)
            more = {"residual": hidden, "out": hidden, "gain": gain, "scaled_out": scaled, "squares_out": squares}
            kernels.linear(a, layer[1], workspace, **more)
            inner_out = kernels.linear(scaled, layer[2], workspace, squares_in=squares, eps=1e-5, activation="silu")
            kernels.linear(inner_out, layer[3], workspace, **more)

        calls = [lambda layer=layer, step=step: step(layer) for layer in layers]
        total = sum(w.numel() for w in layers[0]) * 2
        emit(
            f"the 4 products of a llama-8b layer, norms fused, m={m}",
            seconds(calls, 16),
            None,
            None,
            bytes=total,
            test="test_gemm.py",
        )


def _blocks(emit, workspace):
    n, k = 4096, 14336
    for m in (256, 1024, 4096, 16384):
        sets = []
        for _ in range(sets_for((m + n) * k)):
            x, w = (torch.randn(rows, k, device="cuda").to(torch.float8_e4m3fn) for rows in (m, n))
            xs, ws = torch.ones(m, k // 128, device="cuda"), torch.ones(n // 128, k // 128, device="cuda")
            sets.append(lambda x=x, w=w, xs=xs, ws=ws: kernels.linear_fp8(x, w, xs, ws, workspace))
        flops = 2 * m * n * k
        emit(
            f"fp8 128x128-block GEMM {m}x{n}x{k}",
            seconds(sets, 8),
            flops / 1e15 if m >= 1024 else None,
            None,
            flops=flops,
            test="test_gemm.py",
        )
