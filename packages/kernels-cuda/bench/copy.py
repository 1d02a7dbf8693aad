"""Scattered blocks between pinned host memory and the device, 1 GiB in all."""

import torch
from timing import seconds

from lamella import kernels_cuda as kernels

TOTAL = 1 << 30


def rows(emit):
    host = torch.empty(TOTAL + (TOTAL >> 1), dtype=torch.uint8).random_(0, 256).pin_memory()
    device = torch.empty(TOTAL + (TOTAL >> 1), dtype=torch.uint8, device="cuda")
    for block in (16 << 10, 64 << 10):
        num = TOTAL // block
        a, b = host.view(-1, block), device.view(-1, block)
        order = [torch.randperm(len(a), device="cuda")[:num] for _ in range(2)]
        pairs = torch.stack(order, 1).contiguous()
        for name, src, dst in (("pinned host -> device", a, b), ("device -> pinned host", b, a)):
            for blocks in (16, 32, 64):
                is_target = block == 16 << 10 and name.startswith("pinned")
                emit(
                    f"scattered {block >> 10} KiB blocks, {name}, 1 GiB, {blocks} thread blocks",
                    seconds(
                        [lambda s=src, d=dst, p=pairs, m=blocks: kernels.copy_block_pairs(s, d, p, max_blocks=m)],
                        launches=1,
                        replays=5,
                    ),
                    TOTAL / 48e9 if is_target else None,
                    TOTAL / 1.7e9 if is_target else None,  # one copy call per block
                    bytes=TOTAL,
                    test="test_copy.py",
                )
    half = device.view(2, -1)
    blocks = half[0].view(-1, 16 << 10), half[1].view(-1, 16 << 10)
    pairs = torch.stack([torch.randperm(len(blocks[0]), device="cuda") for _ in range(2)], 1).contiguous()
    emit(
        "scattered 16 KiB blocks, device -> device, 0.75 GiB",
        seconds([lambda: kernels.copy_block_pairs(*blocks, pairs)], launches=1, replays=5),
        None,
        None,
        bytes=TOTAL + (TOTAL >> 1),
        test="test_copy.py",
    )
