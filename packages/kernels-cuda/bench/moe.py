"""Routed experts, bfloat16: route, sort, two grouped products, sum; and fp8 blocks for comparison."""

import torch
from timing import seconds, sets_for

from lamella import kernels_cuda as kernels

# experts, hidden, inner -> tokens -> (target, vLLM 0.26 without graphs on this card), in microseconds
MODELS = {
    (128, 2048, 768): {
        1: (28, 292), 8: (125, 279), 32: (260, 452), 128: (300, 471), 256: (340, 693), 1024: None, 4096: (600, 943),
        8192: None, 16384: None,
    },
    (256, 2304, 1024): {1: (38, 401), 32: (580, 853), 256: (900, 1065), 4096: (1100, 1706), 8192: None},
}  # fmt: skip
TOP_K = 8


def rows(emit):
    """emit(name, seconds, target_s, peer_s, bytes, flops, test): test is the node id prefix that must be green."""
    for (num_experts, hidden, inner), tokens in MODELS.items():
        w13 = torch.empty(num_experts, 2 * inner, hidden, device="cuda", dtype=torch.bfloat16).normal_(0, hidden**-0.5)
        w2 = torch.empty(num_experts, hidden, inner, device="cuda", dtype=torch.bfloat16).normal_(0, inner**-0.5)
        for m, known in tokens.items():
            target, peer = known or (None, None)
            calls, moved = chain(m, w13, w2, {}, with_route=True)
            emit(
                f"MoE {num_experts}e top-{TOP_K} {hidden}x{inner} bf16 with routing, m={m}",
                seconds(calls, replays=9),
                None if target is None else target * 1e-6,
                None if peer is None else peer * 1e-6,
                bytes=moved,
                flops=6 * m * TOP_K * hidden * inner,
                test="test_moe.py",
            )
        for m in (1, 8):
            calls, moved = chain(m, w13, w2, {}, with_route=True, close=True)
            emit(
                f"MoE {num_experts}e with routing, residual and next norm, m={m}",
                seconds(calls, replays=9),
                None,
                None,
                bytes=moved,
                test="test_moe.py",
            )
        m = 32
        alone, _ = chain(m, w13, w2, {}, with_route=False)
        emit(f"MoE {num_experts}e experts alone, m={m}", seconds(alone), None, None, test="test_moe.py")
        blocks = {
            "w13_scale": torch.rand(num_experts, 2 * inner // 128, hidden // 128, device="cuda") * 1e-3,
            "w2_scale": torch.rand(num_experts, hidden // 128, inner // 128, device="cuda") * 1e-3,
        }
        q13, q2 = (w13 * 400).to(torch.float8_e4m3fn), (w2 * 400).to(torch.float8_e4m3fn)
        for m in (1, 32, 256, 4096):
            calls, moved = chain(m, q13, q2, blocks, with_route=True)
            emit(f"MoE {num_experts}e fp8 blocks, m={m}", seconds(calls, replays=9), None, None, bytes=moved,
                 flops=6 * m * TOP_K * hidden * inner, test="test_moe.py")  # fmt: skip
        del w13, w2, q13, q2
    for num_experts in (128, 256, 896):
        logits = torch.randn(32, num_experts, device="cuda")
        ids, weights = kernels.moe_route(logits, TOP_K)
        emit(
            f"route {num_experts}e top-{TOP_K}, m=32",
            seconds([lambda x=logits, i=ids, w=weights: kernels.moe_route(x, TOP_K, ids=i, weights=w)]),
            None,
            None,
            test="test_moe.py",
        )


def chain(m, w13, w2, blocks, with_route, close=False):
    """(calls that rotate over tokens and so over experts, bytes that one must move). close: with residual and norm."""
    num_experts, hidden, inner = w13.shape[0], w13.shape[2], w2.shape[2]
    fp8 = bool(blocks)
    workspace = kernels.moe_workspace(
        kernels.moe_workspace_bytes(m, TOP_K, num_experts, hidden, inner, fp8=fp8), "cuda"
    )
    expert_bytes = 3 * hidden * inner * w13.element_size()
    hit = 0
    calls = []
    # the next set must not find its experts in L2
    for _ in range(min(16, sets_for(min(m * TOP_K, num_experts) * expert_bytes))):
        x, logits = torch.randn(m, hidden, device="cuda").bfloat16(), torch.randn(m, num_experts, device="cuda")
        ids, weights = kernels.moe_route(logits, TOP_K)
        hit += int(ids.unique().numel())
        out, stream, gain = torch.empty_like(x), torch.zeros_like(x), torch.ones_like(x[0])

        def call(x=x, logits=logits, ids=ids, weights=weights, out=out, stream=stream, gain=gain):
            options = {"logits": logits} if with_route else {}
            if close:
                options |= {"residual": stream, "next_norm": gain, "normed": out}
            else:
                options |= {"out": out}
            kernels.fused_moe(x, w13, w2, ids, weights, workspace=workspace, **options, **blocks)

        calls.append(call)
    return calls, hit // len(calls) * expert_bytes + 2 * m * hidden * 2
