"""Residual add + RMSNorm."""

import torch
from timing import seconds, sets_for

from lamella import kernels_cuda as kernels

TARGET_US = {1: 2.2, 32: 2.3, 256: 3.2, 8192: 66.0}
PEER_US = {1: 2.9, 32: 3.0, 256: 4.0, 8192: 67.7}  # vLLM 0.26's kernel on this card


def rows(emit):
    """emit(name, seconds, target_s, peer_s, bytes, flops, test): test is the node id prefix that must be green."""
    for m, target in TARGET_US.items():
        sets = []
        for _ in range(sets_for(m * 4096 * 6)):
            x, residual = (torch.randn(m, 4096, device="cuda").bfloat16() for _ in range(2))
            weight, out = torch.randn(4096, device="cuda").bfloat16(), torch.empty_like(x)
            sets.append(lambda x=x, w=weight, r=residual, o=out: kernels.rms_norm(x, w, 1e-6, residual=r, out=o))
        emit(
            f"residual add + RMSNorm 4096 wide, m={m}",
            seconds(sets),
            target * 1e-6,
            PEER_US[m] * 1e-6,
            bytes=m * 4096 * 8,
            test="test_norm.py",
        )
