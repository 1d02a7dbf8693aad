import math

import pytest
import torch
from oracles import prefill as oracle
from poison import poisoned

from lamella import kernels_cuda as kernels

pytestmark = pytest.mark.gpu
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1.5e-3}


def has_hopper():
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def kernels_for(head_dim, cache=None):
    names = ["portable"]
    if head_dim in (64, 128, 256) and cache is None:
        names.append(pytest.param("sm90", marks=pytest.mark.skipif(not has_hopper(), reason="no Hopper device")))
    return names


EVERY = [
    pytest.param(d, k.values[0] if hasattr(k, "values") else k, marks=getattr(k, "marks", ()))
    for d in (64, 80, 96, 128, 192, 256)
    for k in kernels_for(d)
]
BOTH = kernels_for(128)


class Case:
    """Sequences with new lengths and total lengths in a cache whose other slots are NaN."""

    def __init__(
        self, new, total, *, heads=8, kv_heads=2, head_dim=128, block_size=16, dtype=torch.bfloat16, cache=None,
        token_major=False, extra_rows=0, scale_of_q=1.0,
    ):  # fmt: skip
        self.dtype, self.new, self.total = dtype, new, total
        tokens = sum(new) + extra_rows
        # rows of a fused projection
        fused = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, device="cuda").mul_(scale_of_q).to(dtype)
        self.q = fused[:, : heads * head_dim].view(tokens, heads, head_dim)
        self.cu_q = torch.tensor([0, *new], device="cuda").cumsum(0).int()
        self.seq_lens = torch.tensor(total, device="cuda", dtype=torch.int32)
        need = [-(-n // block_size) for n in total]
        num_blocks = sum(need) + 7
        width = max([1, *need]) + 1
        self.block_table = torch.full((len(new), width), -1, device="cuda", dtype=torch.int32)
        places = torch.randperm(num_blocks, device="cuda").int()
        at = 0
        for b, n in enumerate(need):
            self.block_table[b, :n] = places[at : at + n]
            at += n
        inner = (block_size, kv_heads) if token_major else (kv_heads, block_size)
        shape = (num_blocks, *inner, head_dim)
        caches = []
        for _ in range(2):
            c = torch.randn(*shape, device="cuda").to(dtype)
            if token_major:
                c = c.transpose(1, 2)
            used = torch.zeros(num_blocks, block_size, dtype=torch.bool, device="cuda")
            for b, n in enumerate(total):
                keys = torch.arange(n, device="cuda")
                used[self.block_table[b].long()[keys // block_size], keys % block_size] = True
            c = c.masked_fill(~used[:, None, :, None], torch.nan)
            if token_major:
                c = c.transpose(1, 2).contiguous().transpose(1, 2)
            caches.append(c if cache is None else c.to(cache))
        self.k, self.v = caches
        self.scale = head_dim**-0.5

    def check(self, kernel, what="", max_q_len=None, **options):
        tokens, heads, head_dim = self.q.shape
        out = poisoned(tokens, heads, head_dim, dtype=self.dtype)
        lse = poisoned(tokens, heads, dtype=torch.float32)
        longest = max([0, *self.new]) if max_q_len is None else max_q_len
        args = (self.q, self.k, self.v, self.block_table, self.cu_q, self.seq_lens)
        kernels.paged_prefill(*args, longest, self.scale, out=out, lse=lse, _kernel=kernel, **options)
        expected, expected_lse = oracle.paged_prefill(*args, self.scale, **options)
        what = f"{kernel} {what} new={self.new[:8]} total={self.total[:8]} D={head_dim} {options.keys()}"
        covered = int(self.cu_q[-1])
        assert out[covered:].isnan().all(), f"{what}: rows of no sequence were written"
        assert lse[covered:].isnan().all(), f"{what}: lse of rows of no sequence was written"
        out, expected = out[:covered].double(), expected[:covered]
        assert torch.isfinite(out).all(), f"{what}: NaN in rows {_places(~torch.isfinite(out))}"
        # row by row: one wrong row among many must not hide
        gap = (out - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-3)
        limit = 2.5 * TOLERANCE[self.dtype]
        assert gap.numel() == 0 or gap.max() < limit, f"{what}: error {gap.max():.2e} in rows {_places(gap >= limit)}"
        whole = (out - expected).norm() / expected.norm().clamp_min(1e-30) if covered else torch.zeros(())
        assert whole < TOLERANCE[self.dtype], f"{what}: error {whole:.2e}"
        lse, expected_lse = lse[:covered].double(), expected_lse[:covered]
        empty = expected_lse == -math.inf
        assert torch.equal(lse == -math.inf, empty), f"{what}: lse of rows without keys"
        wrong = (lse - expected_lse).abs()[~empty]
        assert wrong.numel() == 0 or wrong.max() < 4e-3, f"{what}: lse is off by {wrong.max():.2e}"
        assert not out[empty].any(), f"{what}: rows without keys"
        return out


def _places(flags):
    """The first few (row, head) where flags hold, and how many there are."""
    flags = flags if flags.dim() == 2 else flags.any(-1)
    return flags.nonzero()[:6].tolist(), int(flags.sum())


@pytest.mark.parametrize(("head_dim", "kernel"), EVERY)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (6, 2)])
def test_mixed_lengths(head_dim, kernel, dtype, heads, kv_heads):
    case = Case([1, 0, 37, 128, 5, 300], [1, 40, 37, 500, 1029, 300], heads=heads, kv_heads=kv_heads, head_dim=head_dim,
                dtype=dtype)  # fmt: skip
    case.check(kernel)


@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize("block_size", [16, 32, 48, 64, 80, 128, 256])
@pytest.mark.parametrize("token_major", [False, True])
def test_block_sizes_and_layouts(kernel, block_size, token_major):
    case = Case([200, 64, 3], [200, 333, 777], block_size=block_size, token_major=token_major)
    case.check(kernel, f"block_size={block_size}")


@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (7, 1), (12, 4), (16, 1), (5, 1), (64, 1), (96, 1), (32, 8)])
def test_head_groups(kernel, heads, kv_heads):
    Case([77, 1, 9], [77, 300, 200], heads=heads, kv_heads=kv_heads).check(kernel, f"heads={heads}/{kv_heads}")


@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize("new", [1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000])
@pytest.mark.parametrize("prefix", [0, 1, 127, 128, 500])
def test_edges_of_tiles(kernel, new, prefix):
    Case([new], [new + prefix], heads=4, kv_heads=1).check(kernel)


@pytest.mark.parametrize(("head_dim", "kernel"), EVERY)
@pytest.mark.parametrize("window", [1, 5, 64, 128, 200, 100_000])
def test_window(head_dim, kernel, window):
    case = Case([300, 40, 1], [300, 700, 513], heads=4, kv_heads=2, head_dim=head_dim)
    case.check(kernel, f"window={window}", window=window)


@pytest.mark.parametrize(("head_dim", "kernel"), EVERY)
def test_blocks_before_the_window_are_not_read(head_dim, kernel):
    case = Case([40, 3], [700, 900], heads=4, kv_heads=2, head_dim=head_dim)
    # positions 660.. and 897.. see from 596 and 833 on
    for b, first in enumerate([(660 - 63) // 16, (897 - 63) // 16]):
        for block in case.block_table[b, :first].tolist():
            case.k[block] = torch.nan
            case.v[block] = torch.nan
        case.block_table[b, :first] = -1
    clean = Case([40, 3], [700, 900], heads=4, kv_heads=2, head_dim=head_dim)
    clean.q, clean.k, clean.v = case.q, case.k.nan_to_num(), case.v.nan_to_num()
    table = case.block_table.clamp_min(0)
    expected, _ = oracle.paged_prefill(case.q, clean.k, clean.v, table, case.cu_q, case.seq_lens, case.scale, window=64)
    out = kernels.paged_prefill(
        case.q, case.k, case.v, case.block_table, case.cu_q, case.seq_lens, 40, case.scale, window=64, _kernel=kernel,
        out=poisoned(*case.q.shape, dtype=case.dtype),
    )  # fmt: skip
    assert torch.isfinite(out).all(), f"{kernel} D={head_dim}: NaN in {_places(~torch.isfinite(out))}"
    assert (out.double() - expected).norm() / expected.norm() < TOLERANCE[case.dtype]


@pytest.mark.parametrize(("head_dim", "kernel"), EVERY)
def test_softcap_sinks_and_scales(head_dim, kernel):
    case = Case([130, 1, 20], [130, 400, 200], heads=8, kv_heads=4, head_dim=head_dim, scale_of_q=4.0)
    case.check(kernel, "softcap", softcap=5.0)
    case.check(kernel, "sinks", sinks=torch.randn(8, device="cuda") * 3)
    one, each = torch.tensor([0.7], device="cuda"), torch.rand(4, device="cuda") + 0.5
    case.check(kernel, "scales", k_scale=one, v_scale=each)
    case.check(kernel, "all", softcap=20.0, sinks=torch.randn(8, device="cuda"), k_scale=each, v_scale=one, window=50)


@pytest.mark.parametrize(("head_dim", "kernel"), EVERY)
def test_without_causal(head_dim, kernel):
    Case([130, 7, 0, 64], [130, 300, 9, 1], heads=4, kv_heads=2, head_dim=head_dim).check(kernel, causal=False)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp8_cache(head_dim, dtype):
    case = Case([1, 70, 33], [300, 70, 555], head_dim=head_dim, dtype=dtype, cache=torch.float8_e4m3fn)
    case.check(None, k_scale=torch.tensor([0.5], device="cuda"), v_scale=torch.tensor([1.5, 0.25], device="cuda"))


@pytest.mark.parametrize("kernel", BOTH)
def test_rows_without_keys(kernel):
    # more new tokens than keys: the first rows stand before the sequence
    sinks = torch.randn(8, device="cuda")
    Case([20, 3, 300], [5, 0, 130]).check(kernel)
    Case([20, 3, 300], [5, 0, 130]).check(kernel, sinks=sinks)
    Case([20, 3], [5, 0]).check(kernel, causal=False)


@pytest.mark.parametrize("kernel", BOTH)
def test_nothing_to_do_and_rows_of_no_sequence(kernel):
    Case([], []).check(kernel)
    Case([0, 0], [10, 0]).check(kernel)
    Case([], [], extra_rows=5).check(kernel)
    Case([40, 0, 3], [40, 5, 100], extra_rows=90).check(kernel, max_q_len=4096)


@pytest.mark.parametrize("kernel", BOTH)
def test_many_sequences(kernel):
    generator = torch.Generator().manual_seed(1)
    new = torch.randint(0, 90, (150,), generator=generator).tolist()
    total = [n + int(torch.randint(0, 300, (1,), generator=generator)) for n in new]
    Case(new, total, heads=4, kv_heads=2).check(kernel)


@pytest.mark.parametrize("kernel", BOTH)
def test_long_rounds(kernel):
    """More tiles than the device holds at once, heads in several groups."""
    Case([3000, 1500], [3000, 9000], heads=16, kv_heads=4, block_size=64).check(kernel)


@pytest.mark.parametrize("kernel", BOTH)
def test_large_scores(kernel):
    Case([200], [400], scale_of_q=30.0).check(kernel)


@pytest.mark.parametrize("kernel", BOTH)
def test_context_of_131072(kernel):
    Case([64], [131_072], heads=2, kv_heads=1).check(kernel)


@pytest.mark.parametrize("kernel", BOTH)
def test_offsets_beyond_2_31(kernel):
    heads, head_dim, block_size, num_blocks = 8, 128, 128, 17_000
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB")
    k, v = (torch.empty(num_blocks, heads, block_size, head_dim, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    assert k.numel() > 2**31
    table = torch.tensor([[num_blocks - 1, 3, num_blocks - 2]], device="cuda", dtype=torch.int32)
    for block in table[0].tolist():
        k[block] = torch.randn(heads, block_size, head_dim, device="cuda")
        v[block] = torch.randn(heads, block_size, head_dim, device="cuda")
    cu, lens = (torch.tensor(x, device="cuda", dtype=torch.int32) for x in ([0, 100], [333]))
    q = torch.randn(100, heads, head_dim, device="cuda").bfloat16()
    out = kernels.paged_prefill(q, k, v, table, cu, lens, 100, 0.09, _kernel=kernel)
    expected, _ = oracle.paged_prefill(q, k, v, table, cu, lens, 0.09)
    assert (out.double() - expected).norm() / expected.norm() < 8e-3


@pytest.mark.parametrize("kernel", BOTH)
def test_strided_output_and_row_strides_beyond_2_31(kernel):
    heads, head_dim = 4, 128
    case = Case([60, 30], [60, 100], heads=heads, kv_heads=2)
    stride = 2**31 // 64
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GiB")
    room = torch.empty(89 * stride + heads * head_dim, dtype=torch.bfloat16, device="cuda")
    q = room.as_strided((90, heads, head_dim), (stride, head_dim, 1))
    q.copy_(case.q)
    out = poisoned(90, 3 * heads * head_dim, dtype=torch.bfloat16)
    view = out[:, heads * head_dim : 2 * heads * head_dim].view(90, heads, head_dim)
    args = (case.k, case.v, case.block_table, case.cu_q, case.seq_lens)
    kernels.paged_prefill(q, *args, 60, case.scale, out=view, _kernel=kernel)
    expected, _ = oracle.paged_prefill(case.q, *args, case.scale)
    assert (view.double() - expected).norm() / expected.norm() < 8e-3
    assert out[:, : heads * head_dim].isnan().all()
    assert out[:, 2 * heads * head_dim :].isnan().all()


@pytest.mark.parametrize("kernel", BOTH)
def test_same_bits_every_time_and_in_graphs(kernel):
    case = Case([700, 1, 130], [700, 2000, 900], heads=16, kv_heads=4)
    args = (case.q, case.k, case.v, case.block_table, case.cu_q, case.seq_lens, 700, case.scale)
    first = kernels.paged_prefill(*args, _kernel=kernel)
    for _ in range(10):
        assert torch.equal(kernels.paged_prefill(*args, _kernel=kernel), first)
    out = torch.empty_like(first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            kernels.paged_prefill(*args, out=out, _kernel=kernel)
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, first)


def test_wrong_arguments_are_named():
    case = Case([10], [20])
    good = {
        "q": case.q, "k_cache": case.k, "v_cache": case.v, "block_table": case.block_table, "cu_q": case.cu_q,
        "seq_lens": case.seq_lens, "max_q_len": 10, "scale": 0.1,
    }  # fmt: skip
    kernels.paged_prefill(**good)
    for name, value in [
        ("q", case.q.float()),
        ("q", case.q[:, :, :72]),
        ("q", case.q[:, :7]),
        ("k_cache", case.k.half()),
        ("k_cache", case.k.cpu()),
        ("v_cache", case.v[:, :1]),
        ("block_table", case.block_table.long()),
        ("cu_q", case.cu_q[:1]),
        ("seq_lens", case.seq_lens.cpu()),
        ("max_q_len", -1),
        ("scale", 0.0),
        ("window", -1),
        ("softcap", -1.0),
        ("sinks", torch.zeros(3, device="cuda")),
        ("k_scale", torch.zeros(3, device="cuda")),
        ("out", torch.empty_like(case.q[:5])),
        ("lse", torch.zeros(10, 8, device="cuda").half()),
    ]:
        with pytest.raises(ValueError, match=rf"^{name}:"):
            kernels.paged_prefill(**{**good, name: value})
    with pytest.raises(ValueError, match="^window:"):
        kernels.paged_prefill(**good, causal=False, window=3)
