import pytest
import torch

from lamella import kernels_cuda as kernels

pytestmark = pytest.mark.gpu


def buffer(kind, *shape):
    x = torch.randint(0, 256, shape, dtype=torch.uint8)
    return x.cuda() if kind == "device" else x.pin_memory()


def addresses(tensor, blocks):
    return torch.tensor([tensor[b].data_ptr() if b >= 0 else 0 for b in blocks], dtype=torch.int64, device="cuda")


@pytest.mark.parametrize("src_kind", ["device", "pinned"])
@pytest.mark.parametrize("dst_kind", ["device", "pinned"])
@pytest.mark.parametrize("size", [1, 15, 16, 100, 4096, 16384, 16400, 70001])
@pytest.mark.parametrize("max_blocks", [1, 7, 32])
def test_copies(src_kind, dst_kind, size, max_blocks):
    src, dst = buffer(src_kind, 40, size), buffer(dst_kind, 50, size)
    order_a, order_b = torch.randperm(40)[:30].tolist(), torch.randperm(50)[:30].tolist()
    order_a[3], order_b[7] = -1, -1
    expected = dst.clone().cpu()
    for a, b in zip(order_a, order_b):
        if a >= 0 and b >= 0:
            expected[b] = src[a].cpu()
    by_pairs = dst.clone() if dst_kind == "device" else dst.clone().pin_memory()
    kernels.copy_blocks(addresses(src, order_a), addresses(dst, order_b), size, max_blocks=max_blocks)
    pairs = torch.tensor(list(zip(order_a, order_b)), dtype=torch.int64, device="cuda")
    kernels.copy_block_pairs(src, by_pairs, pairs, max_blocks=max_blocks)
    torch.cuda.synchronize()
    what = f"{src_kind} -> {dst_kind}, {size} bytes, {max_blocks} blocks"
    assert torch.equal(dst.cpu(), expected), f"addresses: {what}"
    assert torch.equal(by_pairs.cpu(), expected), f"pairs: {what}"


@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_odd_addresses(offset):
    src, dst = buffer("pinned", 10, 5000), buffer("device", 10, 5000)
    expected = dst.clone().cpu()
    expected[:, offset : offset + 4001] = src[:, 2 * offset : 2 * offset + 4001]
    sources = torch.tensor([src[i].data_ptr() + 2 * offset for i in range(10)], device="cuda")
    targets = torch.tensor([dst[i].data_ptr() + offset for i in range(10)], device="cuda")
    kernels.copy_blocks(sources, targets, 4001)
    assert torch.equal(dst.cpu(), expected), offset


def test_sizes_of_their_own():
    src, dst = buffer("device", 5, 40000), buffer("device", 5, 40000)
    sizes = [0, 1, 16384, 33333, 40000]
    expected = dst.clone()
    for i, size in enumerate(sizes):
        expected[i, :size] = src[i, :size]
    kernels.copy_blocks(addresses(src, range(5)), addresses(dst, range(5)),
                        torch.tensor(sizes, device="cuda"), max_bytes=40000)  # fmt: skip
    assert torch.equal(dst, expected)


def test_strided_blocks_of_many_dimensions():
    src = torch.randn(6, 4, 16, 64, device="cuda").bfloat16()
    dst = torch.zeros(8, 2, 4, 16, 64, dtype=torch.bfloat16).pin_memory()
    pairs = torch.tensor([[5, 0], [0, 7], [2, 3]], device="cuda")
    kernels.copy_block_pairs(src, dst[:, 1], pairs)
    torch.cuda.synchronize()
    assert torch.equal(dst[[0, 7, 3], 1], src[[5, 0, 2]].cpu())
    assert (dst[:, 0] == 0).all()


def test_nothing_to_do():
    src = buffer("device", 4, 64)
    kernels.copy_blocks(addresses(src, []), addresses(src, []), 64)
    kernels.copy_block_pairs(src, src, torch.empty(0, 2, dtype=torch.int64, device="cuda"))


def test_offsets_beyond_2_31_bytes():
    src = torch.zeros(200_000, 16384, dtype=torch.uint8, device="cuda")
    src[-1] = 7
    dst = torch.zeros(200_000, 16384, dtype=torch.uint8, device="cuda")
    kernels.copy_block_pairs(src, dst, torch.tensor([[199_999, 199_998]], device="cuda"))
    assert (dst[199_998] == 7).all()
    assert int(dst[-1].sum()) == 0


def test_wrong_arguments_are_named():
    src = buffer("device", 4, 64)
    ptrs = addresses(src, range(4))
    pairs = torch.zeros(1, 2, dtype=torch.int64, device="cuda")
    for call, name in [
        (lambda: kernels.copy_blocks(ptrs.cpu(), ptrs, 64), "src_ptrs"),
        (lambda: kernels.copy_blocks(ptrs, ptrs.int(), 64), "dst_ptrs"),
        (lambda: kernels.copy_blocks(ptrs, ptrs[:2], 64), "dst_ptrs"),
        (lambda: kernels.copy_blocks(ptrs, ptrs, ptrs), "max_bytes"),
        (lambda: kernels.copy_blocks(ptrs, ptrs, -1), "num_bytes"),
        (lambda: kernels.copy_blocks(ptrs, ptrs, 64, max_blocks=0), "max_blocks"),
        (lambda: kernels.copy_block_pairs(src.cpu(), src, pairs), "src"),
        (lambda: kernels.copy_block_pairs(src, src[:, :32], pairs), "dst"),
        (lambda: kernels.copy_block_pairs(src, src, pairs.int()), "pairs"),
    ]:
        with pytest.raises(ValueError, match=rf"^{name}:"):
            call()
