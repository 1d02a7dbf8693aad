"""Causal prefill and extend with llama-3.1-8b's heads over a paged cache; torch's attention on contiguous tensors."""

import torch
from timing import seconds, sets_for
from torch.nn.attention import SDPBackend, sdpa_kernel

from lamella import kernels_cuda as kernels

HEADS, KV_HEADS, WIDTH = 32, 8, 128
# (sequences, new tokens, all tokens): what FlashAttention 3 takes on this card, what we must take
CASES = {
    (16, 1024, 1024): (427e-6, 427e-6),
    (1, 8192, 8192): (917e-6, 917e-6),
    (1, 32768, 32768): (13_515e-6, 13_515e-6),
    (1, 512, 8704): (None, None),  # 512 new ones on 8,192 cached ones; the target is a rate
    (8, 4096, 4096): (None, None),
    (4, 512, 2560): (None, None),
}
EXTEND_FLOPS_PER_S = 500e12
OTHERS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def _flops(batch, new, total):
    """Of the pairs of query and key that see each other."""
    return 4.0 * batch * HEADS * WIDTH * new * (total - (new - 1) / 2)


def _paged(batch, new, total, block):
    tokens, per_sequence = batch * new, -(-total // block)
    row = torch.randn(tokens, (HEADS + 2 * KV_HEADS) * WIDTH, device="cuda").bfloat16()
    q = row[:, : HEADS * WIDTH].view(tokens, HEADS, WIDTH)
    k, v = (
        torch.randn(batch * per_sequence, KV_HEADS, block, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(2)
    )
    table = torch.randperm(batch * per_sequence, device="cuda").int().view(batch, per_sequence)
    cu = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * new
    lens = torch.full((batch,), total, device="cuda", dtype=torch.int32)
    return q, k, v, table, cu, lens, new, WIDTH**-0.5


def _library(batch, new, total, backend):
    """Seconds of torch's attention, or None where this backend does not serve. It knows no bottom-right alignment, so
    only whole prompts are compared."""
    sets = []
    for _ in range(2):
        q = torch.randn(batch, HEADS, new, WIDTH, device="cuda").bfloat16()
        k, v = (torch.randn(batch, KV_HEADS, total, WIDTH, device="cuda").bfloat16() for _ in range(2))
        sets.append((q, k, v))

    def call(q, k, v):
        with sdpa_kernel([backend]):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    try:
        return seconds([lambda s=s: call(*s) for s in sets], launches=4)
    except RuntimeError as error:
        print(f"prefill: torch's {backend} does not serve {batch}x{new}: {str(error).splitlines()[0][:120]}")
        return None


def rows(emit):
    for (batch, new, total), (peer, target) in CASES.items():
        flops = _flops(batch, new, total)
        if target is None and new < total:
            target = flops / EXTEND_FLOPS_PER_S
        name = f"causal prefill {batch}x{new}" if new == total else f"extend {batch}x{new} new on {total - new} cached"
        others = {}
        if new == total:
            others = {key: _library(batch, new, total, backend) for key, backend in OTHERS.items()}
        for block in (128, 16) if peer is not None or new < total else (128,):
            count = min(4, sets_for(batch * total * KV_HEADS * WIDTH * 4))
            sets = []
            for _ in range(count):
                args = _paged(batch, new, total, block)
                out = torch.empty(batch * new, HEADS, WIDTH, device="cuda", dtype=torch.bfloat16)
                sets.append((args, out))
            for kernel in (None, "portable") if block == 128 else (None,):
                calls = [lambda a=a, o=o, k=kernel: kernels.paged_prefill(*a, out=o, _kernel=k) for a, o in sets]
                taken = seconds(calls, launches=4, replays=9)
                print(
                    f"prefill: {name}, blocks of {block}, {kernel or 'best'}: {taken * 1e6:.0f} us, "
                    f"{flops / taken * 1e-12:.0f} TFLOP/s"
                )
                if kernel is None:
                    emit(
                        f"{name}, blocks of {block}",
                        taken,
                        target,
                        peer,
                        flops=flops,
                        test="test_prefill.py",
                    )
        for key, taken in others.items():
            if taken is not None:
                print(f"prefill: {name}, torch {key}: {taken * 1e6:.0f} us, {flops / taken * 1e-12:.0f} TFLOP/s")
