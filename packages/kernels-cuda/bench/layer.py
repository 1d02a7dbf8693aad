"""A llama-8b layer's tail as one kernel, beside cuBLAS's products with norms and activation between them."""

import torch
from timing import seconds

from lamella import kernels_cuda as kernels

HIDDEN, QKV, INNER = 4096, 6144, 14336


def rows(emit):
    layers = [
        [
            (torch.randn(*shape, device="cuda") * 0.02).bfloat16()
            for shape in ((HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER), (QKV, HIDDEN))
        ]
        for _ in range(8)
    ]
    gain = torch.ones(HIDDEN, device="cuda").bfloat16()
    workspace = kernels.layer_tail_workspace(INNER)
    total = sum(w.numel() for w in layers[0]) * 2
    for m in (1, 4, 8):
        attended, residual = (torch.randn(m, HIDDEN, device="cuda").bfloat16() for _ in range(2))

        def one(i, attended=attended, residual=residual):
            o, gate_up, down, qkv = layers[i]
            kernels.layer_tail(
                attended, o, residual, gain, gate_up, down, workspace,
                next_norm=gain, w_qkv=qkv, eps=1e-5, prefetch=layers[(i + 1) % 8][0],
            )  # fmt: skip

        def nine(i, attended=attended, residual=residual):
            o, gate_up, down, qkv = layers[i]
            x = kernels.rms_norm(attended @ o.T, gain, 1e-5, residual=residual)
            inner = kernels.gated_activation(x @ gate_up.T, "silu")
            return kernels.rms_norm(inner @ down.T, gain, 1e-5, residual=residual) @ qkv.T

        for name, call in (("one kernel", one), ("7 kernels, cuBLAS", nine)):
            emit(
                f"tail of a llama-8b layer, {name}, m={m}",
                seconds([lambda i=i, call=call: call(i) for i in range(8)], 32),
                None,
                None,
                bytes=total,
                test="test_layer.py",
            )
