import math

import pytest
import torch
from oracles import attention as oracle
from poison import poisoned, relative_error

from lamella import kernels_cuda as kernels

pytestmark = pytest.mark.gpu
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 2e-3}
FP8 = torch.float8_e4m3fn


class Case:
    """Sequences over a cache in which every slot that no sequence owns is NaN, and every block is in disorder."""

    def __init__(
        self, lens, heads=8, kv_heads=2, dim=128, block=16, n=1, dtype=torch.bfloat16, cache=None, nhd=False, pad=0
    ):
        cache = cache or dtype
        self.n, self.scale, self.dtype = n, dim**-0.5, dtype
        max_blocks = max([-(-length // block) for length in lens], default=0) + 1
        used = sum(-(-length // block) for length in lens)
        num_blocks = used + 3
        shape = (num_blocks, block, kv_heads, dim + pad) if nhd else (num_blocks, kv_heads, block, dim + pad)
        caches = []
        for _ in range(2):
            data = torch.randn(shape, device="cuda").to(cache)[..., :dim]
            caches.append(data.transpose(1, 2) if nhd else data)
        self.k, self.v = caches
        self.table = torch.full((len(lens), max_blocks), num_blocks - 1, dtype=torch.int32, device="cuda")
        order = (torch.randperm(num_blocks - 2, device="cuda") + 1).int()
        owned = torch.zeros(num_blocks, block, dtype=torch.bool, device="cuda")
        for b, length in enumerate(lens):
            count = -(-length // block)
            self.table[b, :count], order = order[:count], order[count:]
            for j in range(count):
                owned[self.table[b, j].item(), : min(block, length - j * block)] = True
        free = ~owned[:, None, :, None].expand(-1, kv_heads, -1, dim)
        for data in caches:
            raw = data.view(torch.uint8) if cache == FP8 else data
            raw.masked_fill_(free, 0x7F if cache == FP8 else math.nan)
        self.lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
        wide = torch.randn(len(lens), n, heads + 2 * kv_heads, dim, device="cuda").to(dtype)
        self.q = wide[:, :, :heads]  # as it lies in a fused projection

    def check(self, what="", parts=None, tolerance=None, **options):
        tolerance = tolerance or TOLERANCE[self.dtype]
        batch, n, heads = self.q.shape[:3]
        out, lse = poisoned(*self.q.shape, dtype=self.dtype), poisoned(batch, n, heads, dtype=torch.float32)
        schedule = None
        if parts:
            size = kernels.decode_schedule_size(batch, heads, self.k.shape[1], num_queries=n, parts=parts)
            schedule = poisoned(size, dtype=torch.int32)
            window = options.get("window", 0)
            kernels.decode_schedule(self.lens, heads, self.k.shape[1], num_queries=n, window=window, out=schedule)
        kernels.paged_decode(
            self.q, self.k, self.v, self.table, self.lens, self.scale, schedule=schedule, out=out, lse=lse, **options
        )
        expected, expected_lse = oracle.paged_decode(
            self.q, self.k, self.v, self.table, self.lens, self.scale, **options
        )
        shapes = f"q {list(self.q.shape)} k {list(self.k.shape)} {self.k.dtype}"
        say = f"{what} lens {self.lens.tolist()[:8]} {shapes} parts {parts} {list(options)}"
        bad = (out.double() - expected).abs().nan_to_num(9.9).amax(-1)
        error = relative_error(out, expected)
        worst = [int(i) for i in torch.unravel_index(bad.argmax(), bad.shape)] if bad.numel() else []
        assert error < tolerance, f"out: error {error:.2e}, worst at (b, i, h) {worst}: {say}"
        empty = expected_lse == -math.inf
        assert (lse[empty] == -math.inf).all(), f"lse of empty rows: {say}"
        assert (out[empty] == 0).all(), f"out of empty rows: {say}"
        off = (lse[~empty].double() - expected_lse[~empty]).abs()
        assert off.numel() == 0 or off.max() < 2e-2, f"lse: off by {off.max():.2e}: {say}"
        return out, schedule


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "n"), [(8, 2, 1), (3, 3, 1), (8, 1, 2), (16, 2, 4), (8, 1, 8), (20, 1, 7)]
)
def test_head_dims_and_groups(dtype, dim, heads, kv_heads, n):
    Case([1, 300, 17, 64, 65, 128], heads, kv_heads, dim, n=n, dtype=dtype).check()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize(("heads", "kv_heads", "n"), [(8, 2, 1), (8, 1, 2), (8, 1, 8)])
@pytest.mark.parametrize("per_head", [False, True])
def test_fp8_cache(dtype, dim, heads, kv_heads, n, per_head):
    case = Case([1, 300, 17, 64, 65, 128], heads, kv_heads, dim, n=n, dtype=dtype, cache=FP8)
    k_scale, v_scale = (torch.rand(kv_heads if per_head else 1, device="cuda") + 0.5 for _ in range(2))
    case.check(k_scale=k_scale, v_scale=v_scale)


def test_fp8_cache_takes_queries_of_any_magnitude():
    case = Case([100, 40], cache=FP8)
    case.q = case.q * torch.logspace(-6, 6, 8, device="cuda")[:, None].bfloat16()
    case.scale = 1e-6
    case.check()


@pytest.mark.parametrize("block", [16, 32, 48, 64, 128, 256])
@pytest.mark.parametrize("nhd", [False, True])
@pytest.mark.parametrize("pad", [0, 8])
def test_block_sizes_and_layouts(block, nhd, pad):
    Case([block - 1, block, block + 1, 3 * block + 5, 700], block=block, nhd=nhd, pad=pad).check()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("window", [1, 5, 16, 64, 100, 4096])
def test_window(n, window):
    case = Case([1, 2, 17, 64, 65, 200, 1000, 0], n=n)
    case.check(window=window)
    for b, length in enumerate(case.lens.tolist()):  # blocks that the window has left belong to somebody else
        gone = max(0, length - n + 1 - window) // 16
        case.table[b, :gone] = 0
    case.check("blocks left of the window", window=window)


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 40, 1000])
@pytest.mark.parametrize(("heads", "kv_heads", "n"), [(8, 2, 1), (8, 1, 4)])
def test_results_do_not_depend_on_the_cut(parts, heads, kv_heads, n):
    Case([700, 0, 1, 3000, 64, 0, 129], heads, kv_heads, n=n).check(parts=parts)


def test_counters_reset_themselves_and_results_repeat():
    case = Case([5000, 64, 3000])
    first, schedule = case.check(parts=50)
    counters = schedule[4 * 51 :]
    assert (counters == 0).all()
    for _ in range(5):
        again = kernels.paged_decode(case.q, case.k, case.v, case.table, case.lens, case.scale, schedule=schedule)
        assert torch.equal(again, first)
    assert (counters == 0).all()


@pytest.mark.parametrize("cache", [torch.bfloat16, FP8])
@pytest.mark.parametrize(("heads", "kv_heads", "n"), [(8, 2, 1), (8, 2, 3), (8, 1, 8)])
@pytest.mark.parametrize("in_graph", [False, True])
def test_right_after_the_write_of_the_new_keys(cache, heads, kv_heads, n, in_graph):
    """The new keys are NaN until the kernel before writes them: whoever reads them too early shows it."""
    lens = [1, 0, 2, 64, 65, 66, 700, 15, 16, 17, 3000]
    case = Case(lens, heads, kv_heads, n=n, cache=cache)
    args = (case.q, case.k, case.v, case.table, case.lens, case.scale)
    schedule = kernels.decode_schedule(case.lens, heads, kv_heads, num_queries=n)
    workspace = torch.empty(
        kernels.paged_decode_workspace_size(heads, kv_heads, 128, num_queries=n), dtype=torch.uint8, device="cuda"
    )
    expected = kernels.paged_decode(*args, schedule=schedule, workspace=workspace)
    slots = []
    for b, length in enumerate(lens):
        for position in range(length - n, length):
            slots.append(int(case.table[b, position // 16]) * 16 + position % 16 if position >= 0 else -1)
    slots = torch.tensor(slots, device="cuda")
    written = slots[slots >= 0]
    blocks, places = written // 16, written % 16
    new = [torch.zeros(len(slots), kv_heads, 128, dtype=case.dtype, device="cuda") for _ in range(2)]
    raw = [data.view(torch.uint8) if cache == FP8 else data for data in (case.k, case.v)]
    for rows, data in zip(new, raw):
        rows[slots >= 0] = data[blocks, :, places].view(cache).to(case.dtype)  # exact, also out of fp8
    poison = torch.tensor(0x7F if cache == FP8 else math.nan, dtype=raw[0].dtype, device="cuda")
    out = poisoned(*case.q.shape, dtype=case.dtype)

    def step():
        for data in raw:
            data[blocks, :, places] = poison
        out.fill_(math.nan)
        kernels.kv_write(*new, case.k, case.v, slots)
        kernels.paged_decode(*args, schedule=schedule, workspace=workspace, out=out, follows_write=True)

    step()
    assert torch.equal(out, expected)
    if in_graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
    for i in range(20):
        graph.replay() if in_graph else step()
        assert torch.equal(out, expected), f"round {i}: {heads}/{kv_heads} heads, {n} queries, {cache}"


@pytest.mark.parametrize("batch", [1, 8, 511, 512, 513, 1024, 1025])
@pytest.mark.parametrize("parts", [1, 5, 264, 1500])
def test_every_part_has_an_even_share(batch, parts):
    lens = torch.randint(0, 2000, (batch,), dtype=torch.int32)
    lens[0] = 5000
    kv_heads = 3
    schedule = poisoned(kernels.decode_schedule_size(batch, 12, kv_heads, parts=parts), dtype=torch.int32)
    kernels.decode_schedule(lens.cuda(), 12, kv_heads, out=schedule)
    assert (schedule[4 * (parts + 1) :] == 0).all(), "counters"
    records = schedule[: 4 * (parts + 1)].view(-1, 4).cpu()
    width = (-(-lens // 64)).clamp_min(1).long()
    first = torch.cat((torch.zeros(1, dtype=torch.long), (width * kv_heads).cumsum(0)))
    total, places = int(first[-1]), []
    for sequence, group, chunk, length in records.tolist():
        if sequence == batch:
            places.append(total)
            continue
        assert length == lens[sequence], f"length of sequence {sequence}"
        assert 0 <= group < kv_heads
        assert 0 <= chunk < width[sequence]
        places.append(int(first[sequence] + group * width[sequence] + chunk))
    shares = torch.tensor(places).diff()
    assert places[0] == 0
    assert places[-1] == total
    assert (shares >= 0).all(), f"parts out of order: {places}"
    # whole sequences per part may take a sixteenth more
    assert shares.max() <= -(-total // parts) * 17 // 16, f"{int(shares.max())} of {total} for one of {parts} parts"


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 2.0, 50.0])
@pytest.mark.parametrize("parts", [None, 1])
def test_soft_cap_and_sinks(sinks, softcap, parts):
    case = Case([1, 100, 0, 2000], n=2)
    sink = torch.tensor([-math.inf, -30.0, 0.0, 1.0, 3.0, 10.0, 60.0, 2.0], device="cuda") if sinks else None
    case.check(softcap=softcap, sinks=sink, parts=parts)


def test_rows_before_the_sequence_are_empty():
    Case([0, 1, 2, 3, 5], n=4).check()
    Case([0, 1, 9], heads=16, kv_heads=1, n=8).check()


def test_nothing_to_do():
    assert Case([]).check()[0].shape == (0, 1, 8, 128)
    Case([0]).check()
    Case([0] * 40).check()


def test_many_ragged_sequences():
    lens = torch.randint(0, 600, (300,)).tolist()
    Case(lens, heads=4, kv_heads=1, dim=64).check()


def test_batch_larger_than_a_round_of_the_schedule():
    Case(torch.randint(0, 40, (2500,)).tolist(), heads=2, kv_heads=1, dim=64).check()


@pytest.mark.parametrize("window", [0, 4096])
def test_long_context(window):
    Case([131_072], heads=8, kv_heads=2, block=64).check(window=window)


def test_offsets_beyond_2_31_elements():
    block, kv_heads, dim = 256, 8, 128
    num_blocks = 2**31 // (block * kv_heads * dim) + 10
    k, v = (torch.empty(num_blocks, kv_heads, block, dim, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    table = torch.tensor([[num_blocks - 1, 0, num_blocks - 3]], dtype=torch.int32, device="cuda")
    for b in table[0].tolist():
        k[b], v[b] = (torch.randn(kv_heads, block, dim, device="cuda").bfloat16() for _ in range(2))
    q = torch.randn(1, 1, 32, dim, device="cuda").bfloat16()
    lens = torch.tensor([700], dtype=torch.int32, device="cuda")
    out = kernels.paged_decode(q, k, v, table, lens, dim**-0.5)
    expected, _ = oracle.paged_decode(q, k, v, table, lens, dim**-0.5)
    assert relative_error(out, expected) < 8e-3


def test_large_scores_and_strided_output():
    case = Case([500], n=2)
    case.q = case.q * 30
    case.check("large scores", tolerance=2e-2)
    wide = poisoned(1, 2, 8, 256, dtype=torch.bfloat16)
    out = kernels.paged_decode(case.q, case.k, case.v, case.table, case.lens, case.scale, out=wide[..., :128])
    expected, _ = oracle.paged_decode(case.q, case.k, case.v, case.table, case.lens, case.scale)
    assert relative_error(out, expected) < 2e-2
    assert wide[..., 128:].isnan().all()


def test_in_a_graph_with_other_lengths():
    case = Case([2000, 900, 1500])
    size = kernels.decode_schedule_size(3, 8, 2)
    schedule = torch.empty(size, dtype=torch.int32, device="cuda")
    workspace = torch.empty(kernels.paged_decode_workspace_size(8, 2, 128), dtype=torch.uint8, device="cuda")
    out = torch.empty_like(case.q, memory_format=torch.contiguous_format)

    def step():
        kernels.decode_schedule(case.lens, 8, 2, out=schedule)
        for _ in range(3):
            inputs = (case.q, case.k, case.v, case.table, case.lens, case.scale)
            kernels.paged_decode(*inputs, schedule=schedule, workspace=workspace, out=out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lens in ([2000, 900, 1500], [1, 900, 0], [64, 65, 1400]):
        case.lens.copy_(torch.tensor(lens))
        workspace.fill_(0xFF)
        out.fill_(math.nan)
        graph.replay()
        expected, _ = oracle.paged_decode(case.q, case.k, case.v, case.table, case.lens, case.scale)
        assert relative_error(out, expected) < 8e-3, lens


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dim", [8, 80, 128, 512])
@pytest.mark.parametrize("states", [1, 2, 9])
def test_merge_states(dtype, dim, states):
    o = torch.randn(states, 5, 7, dim, device="cuda").to(dtype)
    lse = torch.randn(states, 5, 7, device="cuda") * 20
    lse[:, 0, 0] = -math.inf
    lse[-1, 1] = -math.inf
    o[-1, 1] = math.nan  # counts nothing
    expected, expected_lse = oracle.merge_states(o, lse)
    said = lse.clone()
    said[:, 0, 0] = math.inf  # how other libraries say it
    out, total = poisoned(5, 7, dim, dtype=dtype), poisoned(5, 7, dtype=torch.float32)
    if states == 2:
        kernels.merge_states(o[0], said[0], o[1], said[1], out=out, lse=total)
    else:
        kernels.merge_many_states(o, said, out=out, out_lse=total)
    tolerance = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 1e-5}[dtype]
    assert relative_error(out, expected) < tolerance
    empty = expected_lse == -math.inf
    assert torch.equal(total == -math.inf, empty)
    assert (out[empty] == 0).all()
    assert (total[~empty] - expected_lse[~empty]).abs().max() < 1e-4


def test_merging_halves_of_the_keys_is_attention_over_all():
    case = Case([512])
    half, lse = [], []
    for blocks, length in ((case.table[:, :16], 256), (case.table[:, 16:], 256)):
        lens = torch.tensor([length], dtype=torch.int32, device="cuda")
        lse.append(torch.empty(1, 1, 8, device="cuda"))
        half.append(kernels.paged_decode(case.q, case.k, case.v, blocks, lens, case.scale, lse=lse[-1]))
    out, _ = kernels.merge_states(half[0], lse[0], half[1], lse[1])
    expected, _ = oracle.paged_decode(case.q, case.k, case.v, case.table, case.lens, case.scale)
    assert relative_error(out, expected) < 8e-3


def test_wrong_arguments_are_named():
    case = Case([100, 20])
    good = {"q": case.q, "k_cache": case.k, "v_cache": case.v, "block_table": case.table, "seq_lens": case.lens}
    schedule = kernels.decode_schedule(case.lens, 8, 2)
    for change, name in [
        ({"q": case.q.float()}, "q"),
        ({"k_cache": case.k.half()}, "k_cache"),
        ({"v_cache": case.v[:, :, :, :64]}, "v_cache"),
        ({"k_cache": case.k[:, :, :8], "v_cache": case.v[:, :, :8]}, "k_cache"),
        ({"block_table": case.table.long()}, "block_table"),
        ({"block_table": case.table[:1]}, "block_table"),
        ({"sinks": torch.zeros(4, device="cuda")}, "sinks"),
        ({"k_scale": torch.zeros(3, device="cuda")}, "k_scale"),
        ({"schedule": schedule[:21]}, "schedule"),
        ({"schedule": schedule, "workspace": torch.empty(16, dtype=torch.uint8, device="cuda")}, "workspace"),
        ({"lse": torch.empty(2, 8, device="cuda")}, "lse"),
        ({"window": -1}, "window"),
        ({"softcap": -1.0}, "softcap"),
    ]:
        with pytest.raises(ValueError, match=rf"^{name}:"):
            kernels.paged_decode(**(good | change), scale=0.1)
