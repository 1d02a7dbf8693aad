"""A qwen3-30b-a3b layer's tail as one kernel, beside separate kernels. Tokens are random, and so are their experts."""

import torch
from timing import seconds

from lamella import kernels_cuda as kernels

ATTENDED, HIDDEN, INNER, QKV, EXPERTS, TOP_K = 4096, 2048, 768, 5120, 128, 8


def rows(emit):
    layers = [
        [
            (torch.randn(*shape, device="cuda") * shape[-1] ** -0.5).bfloat16()
            for shape in (
                (HIDDEN, ATTENDED), (EXPERTS, HIDDEN), (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER),
                (QKV, HIDDEN),
            )
        ]
        for _ in range(4)
    ]  # fmt: skip
    gain = torch.ones(HIDDEN, device="cuda").bfloat16()
    workspace = kernels.experts_tail_workspace(INNER, EXPERTS, TOP_K)
    other = kernels.moe_workspace(kernels.moe_workspace_bytes(8, TOP_K, EXPERTS, HIDDEN, INNER))
    for m in (1, 2, 4, 8):
        attended, residual = (torch.randn(m, width, device="cuda").bfloat16() for width in (ATTENDED, HIDDEN))
        ids = torch.empty(m, TOP_K, device="cuda", dtype=torch.int32)
        weights = torch.empty(m, TOP_K, device="cuda")

        def one(i, attended=attended, residual=residual):
            o, router, w13, w2, qkv = layers[i]
            kernels.experts_tail(
                attended, o, residual, gain, router, w13, w2, TOP_K, workspace,
                next_norm=gain, w_qkv=qkv, eps=1e-5, prefetch=layers[(i + 1) % 4][0],
            )  # fmt: skip

        def many(i, attended=attended, residual=residual, ids=ids, weights=weights):
            o, router, w13, w2, qkv = layers[i]
            x = kernels.rms_norm(attended @ o.T, gain, 1e-5, residual=residual)
            normed = kernels.fused_moe(
                x, w13, w2, ids, weights, workspace=other, logits=x @ router.T, residual=residual, next_norm=gain,
            )  # fmt: skip
            return normed @ qkv.T

        for name, call in (("one kernel", one), ("separate kernels", many)):
            emit(
                f"tail of a qwen3-30b-a3b layer, {name}, m={m}",
                seconds([lambda i=i, call=call: call(i) for i in range(4)], 32),
                None,
                None,
                test="test_experts_tail.py",
            )
