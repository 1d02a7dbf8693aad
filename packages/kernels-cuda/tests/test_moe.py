import pytest
import torch
from oracles import moe as oracle
from poison import poisoned, relative_error

from lamella import kernels_cuda as kernels

pytestmark = pytest.mark.gpu
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1.2e-3}
FP8_TOLERANCE = 2e-2  # the oracle quantises, too; what is left are roundings that fall the other way
EXPERTS = [8, 64, 128, 160, 256, 384, 512, 896, 1024]


def routed(logits, top_k, **options):
    shape = (logits.shape[0], top_k)
    ids, weights = poisoned(*shape, dtype=torch.int32), poisoned(*shape, dtype=torch.float32)
    return kernels.moe_route(logits, top_k, ids=ids, weights=weights, **options)


def check_distinct(ids, num_experts):
    assert ids.min() >= 0, ids.min()
    assert ids.max() < num_experts, ids.max()
    ordered = ids.sort(-1).values
    assert (ordered[:, 1:] != ordered[:, :-1]).all(), "an expert was chosen twice"


@pytest.mark.parametrize("num_experts", EXPERTS)
@pytest.mark.parametrize("top_k", [1, 6, 8, 22, 32])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_route(num_experts, top_k, scoring, dtype):
    top_k = min(top_k, num_experts)
    logits = torch.randn(67, num_experts + 8, device="cuda").mul(3).to(dtype)[:, :num_experts]  # bfloat16: many ties
    for renormalize in (False, True):
        ids, weights = routed(logits, top_k, scoring=scoring, renormalize=renormalize, scale=2.5)
        assert torch.equal(ids.long(), oracle.ranked(oracle.choices(logits, scoring), top_k))
        expected = oracle.route_weights(logits, ids, scoring, renormalize, 2.5)
        assert relative_error(weights, expected) < 1e-5


@pytest.mark.parametrize(("num_experts", "num_groups", "topk_groups", "top_k"), [
    (256, 8, 4, 8), (160, 8, 3, 6), (64, 4, 1, 4), (1024, 32, 7, 16), (896, 1, 1, 16), (512, 2, 2, 10),
])  # fmt: skip
@pytest.mark.parametrize("with_bias", [False, True])
def test_route_with_bias_and_groups(num_experts, num_groups, topk_groups, top_k, with_bias):
    logits = torch.randn(129, num_experts, device="cuda")
    bias = torch.randn(num_experts, device="cuda") * 0.1 if with_bias else None
    groups = {"num_groups": num_groups, "topk_groups": topk_groups}
    ids, weights = routed(logits, top_k, scoring="sigmoid", bias=bias, scale=1.5, **groups)
    check_distinct(ids, num_experts)
    c = oracle.choices(logits, "sigmoid", bias, **groups)
    # float32 may order what differs by a rounding the other way: the ranked values must agree
    best = c.gather(1, oracle.ranked(c, top_k))
    assert torch.allclose(c.gather(1, ids.long()), best, atol=1e-5, rtol=0), "other experts were chosen"
    assert relative_error(weights, oracle.route_weights(logits, ids, "sigmoid", True, 1.5)) < 1e-5


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("num_groups", [1, 4])
def test_bad_rows_still_give_distinct_experts(scoring, num_groups):
    logits = torch.randn(9, 128, device="cuda")
    logits[1] = torch.nan
    logits[2] = torch.inf
    logits[3] = -torch.inf
    logits[4, 5:] = torch.nan
    logits[5, ::2] = torch.inf
    logits[6] = 0.25
    logits[7] = 1e30
    bias = torch.zeros(128, device="cuda")
    for b in (None, bias):
        ids, weights = routed(logits, 8, scoring=scoring, bias=b, num_groups=num_groups, topk_groups=1)
        check_distinct(ids, 128)
        assert torch.isfinite(weights).all()
        for row in (1, 2, 3, 6):
            assert ids[row].tolist() == list(range(8)), (row, ids[row])
        assert (weights[1:4] == 0).all()
        assert set(ids[4, :5].tolist()) == set(range(5)), ids[4]
    assert routed(logits[:0], 8)[0].shape == (0, 8)


def check_align(ids, num_experts, block_rows, expert_map=None):
    sorted_ids, block_experts, num_rows = kernels.moe_align(ids, num_experts, block_rows, expert_map=expert_map)
    ordered, experts = oracle.align(ids, num_experts, block_rows, expert_map)
    what = f"ids {tuple(ids.shape)}, {num_experts} experts, blocks of {block_rows}"
    assert num_rows.item() == len(ordered), what
    assert block_experts[: len(experts)].tolist() == experts, what
    assert (block_experts[len(experts) :] == -1).all(), what
    assert sorted_ids[: len(ordered)].tolist() == ordered, what
    assert (sorted_ids[len(ordered) :] == ids.numel()).all(), what


@pytest.mark.parametrize("num_experts", EXPERTS)
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 128, 4096])
@pytest.mark.parametrize("block_rows", [8, 64, 128])
def test_align(num_experts, num_tokens, block_rows):
    ids = torch.rand(num_tokens, num_experts, device="cuda").argsort(-1)[:, :8].int()
    check_align(ids, num_experts, block_rows)


def test_align_of_special_ids():
    ids = torch.randint(0, 256, (300, 6), device="cuda", dtype=torch.int32)
    check_align(torch.full_like(ids, 200), 256, 16)  # all to one
    check_align(torch.full_like(ids, -1), 256, 16)  # nothing
    ids[torch.rand(ids.shape, device="cuda") < 0.3] = -1
    check_align(ids, 256, 16)
    expert_map = torch.full((256,), -1, device="cuda", dtype=torch.int32)
    expert_map[64:128] = torch.arange(64, device="cuda", dtype=torch.int32).flip(0)
    check_align(ids, 64, 16, expert_map)


def experts_of(num_experts, hidden, inner, dtype):
    w13 = torch.randn(num_experts, 2 * inner, hidden, device="cuda", dtype=dtype) * hidden**-0.5
    w2 = torch.randn(num_experts, hidden, inner, device="cuda", dtype=dtype) * inner**-0.5
    return w13, w2


def spread(num_tokens, num_experts, top_k):
    ids = torch.rand(num_tokens, num_experts, device="cuda").topk(top_k, -1).indices.int()
    weights = torch.rand(num_tokens, top_k, device="cuda") + 0.1
    return ids, weights


def dirty_workspace(x, w13, ids, expert_map=None, portable=False):
    """Full of NaN, but for what must be zero."""
    map_size = 0 if expert_map is None else expert_map.numel()
    num_bytes = kernels.moe_workspace_bytes(
        x.shape[0], ids.shape[1], w13.shape[0], x.shape[1], w13.shape[1] // 2,
        fp8=w13.dtype == torch.float8_e4m3fn, map_size=map_size, portable=portable,
    )  # fmt: skip
    workspace = torch.full((num_bytes,), 0xFF, dtype=torch.uint8, device="cuda")
    head = 4096
    workspace[:head] = 0
    return workspace, head


@pytest.mark.parametrize(("experts", "top_k", "fp8"), [(4, 2, False), (16, 4, False), (128, 8, False), (128, 8, True)])
def test_workspace_holds_any_smaller_call(experts, top_k, fp8):
    """Tiles grow with the number of tokens, and at some borders the need falls."""
    shape = (top_k, experts, 256, 128)
    exact = [kernels.moe_workspace_bytes(n, *shape, fp8=fp8) for n in range(1, 700)]
    assert exact == sorted(exact)
    hidden, inner = shape[2:]
    if not fp8:
        w13, w2 = experts_of(experts, hidden, inner, torch.bfloat16)
        workspace = kernels.moe_workspace(exact[299])
        for num_tokens in range(1, 301):
            ids, weights = spread(num_tokens, experts, top_k)
            x = torch.ones(num_tokens, hidden, device="cuda", dtype=torch.bfloat16)
            kernels.fused_moe(x, w13, w2, ids, weights, workspace=workspace)


def check_experts(x, w13, w2, ids, weights, expert_map=None, portable=False, tolerance=None):
    workspace, head = dirty_workspace(x, w13, ids, expert_map, portable)
    out = poisoned(*x.shape, dtype=x.dtype)
    kernels.fused_moe(x, w13, w2, ids, weights, expert_map=expert_map, workspace=workspace, out=out, portable=portable)
    known = ids if expert_map is not None else ids.masked_fill(ids >= len(w13), -1)
    expected = oracle.fused_moe(x, lambda e: w13[e].double(), lambda e: w2[e].double(), known, weights, expert_map)
    error = relative_error(out, expected)
    what = f"x {tuple(x.shape)}, w13 {tuple(w13.shape)}, top {ids.shape[1]}, portable {portable}: error {error}"
    if error == float("inf"):
        bad = ~torch.isfinite(out)
        what += f"; not finite: rows {bad.any(1).nonzero().flatten()[:8].tolist()}, "
        what += f"columns {bad.any(0).nonzero().flatten()[:8].tolist()}, {int(bad.sum())} in all"
    elif error >= (tolerance or TOLERANCE[x.dtype]):
        off = (out.double() - expected).abs() > 0.05 * expected.abs().amax()
        what += f"; off: rows {off.any(1).nonzero().flatten()[:8].tolist()} ({int(off.any(1).sum())}), "
        what += f"columns {off.any(0).nonzero().flatten()[:8].tolist()} ({int(off.any(0).sum())})"
    assert error < (tolerance or TOLERANCE[x.dtype]), what
    assert (workspace[:head] == 0).all(), "flags were left up"
    # again, in the same workspace: bit for bit
    again = kernels.fused_moe(x, w13, w2, ids, weights, expert_map=expert_map, workspace=workspace, portable=portable)
    assert torch.equal(out, again), "two runs differ: " + what
    return out


@pytest.mark.parametrize("portable", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 8, 33, 70, 200, 300, 400, 700, 2500])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_experts_small(portable, num_tokens, dtype):
    w13, w2 = experts_of(16, 256, 128, dtype)
    x = torch.randn(num_tokens, 256, device="cuda").to(dtype)
    check_experts(x, w13, w2, *spread(num_tokens, 16, 4), portable=portable)


@pytest.mark.parametrize("portable", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 5, 40, 150, 400, 1500])
@pytest.mark.parametrize(("hidden", "inner"), [(8, 8), (72, 40), (136, 200), (328, 104), (1000, 264), (64, 520)])
def test_odd_widths(portable, num_tokens, hidden, inner):
    w13, w2 = experts_of(6, hidden, inner, torch.bfloat16)
    x = torch.randn(num_tokens, hidden, device="cuda").bfloat16()
    check_experts(x, w13, w2, *spread(num_tokens, 6, 3), portable=portable)


@pytest.mark.parametrize(("num_experts", "top_k"), [(64, 6), (128, 8), (256, 8), (512, 10), (896, 16)])
@pytest.mark.parametrize("num_tokens", [1, 4, 32, 500])
def test_many_experts(num_experts, top_k, num_tokens):
    w13, w2 = experts_of(num_experts, 512, 128, torch.bfloat16)
    x = torch.randn(num_tokens, 512, device="cuda").bfloat16()
    check_experts(x, w13, w2, *spread(num_tokens, num_experts, top_k))


@pytest.mark.parametrize(("num_experts", "hidden", "inner"), [(128, 2048, 768), (256, 2304, 1024)])
@pytest.mark.parametrize("num_tokens", [1, 2, 8, 32, 128, 256, 512, 1024, 4096])
def test_experts_of_models(num_experts, hidden, inner, num_tokens):
    w13, w2 = experts_of(num_experts, hidden, inner, torch.bfloat16)
    x = torch.randn(num_tokens, hidden, device="cuda").bfloat16()
    check_experts(x, w13, w2, *spread(num_tokens, num_experts, 8))


@pytest.mark.parametrize("portable", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 20, 300, 4096])
def test_all_to_one_expert(portable, num_tokens):
    w13, w2 = experts_of(64, 256, 192, torch.bfloat16)
    x = torch.randn(num_tokens, 256, device="cuda").bfloat16()
    ids = torch.full((num_tokens, 1), 63, device="cuda", dtype=torch.int32)
    weights = torch.rand(num_tokens, 1, device="cuda") + 0.1
    check_experts(x, w13, w2, ids, weights, portable=portable)


# around the widths and blocks of the kernels for 96, 128 and more rows of an expert, and experts without tokens
RAGGED = {
    96: [0, 1, 95, 96, 97, 0, 191, 192, 193, 8, 9, 31, 32, 33, 63, 64, 65, 40, 0],
    128: [0, 127, 128, 129, 255, 256, 257, 1, 31, 32, 33, 96, 97, 7, 0],
    320: [
        0, 1, 0, 7, 8, 9, 16, 63, 64, 65, 127, 128, 129, 160, 161, 176, 192, 193, 255, 256, 257, 288, 289, 304, 319,
        320, 321, 0, 639, 640, 641, 1000, 0,
    ],
}  # fmt: skip


@pytest.mark.parametrize("portable", [True, False])
@pytest.mark.parametrize("counts", list(RAGGED.values()), ids=list(RAGGED))
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("hidden", "inner"), [(256, 128), (1160, 200), (64, 520)])
def test_ragged_experts(portable, counts, dtype, hidden, inner):
    w13, w2 = experts_of(len(counts), hidden, inner, dtype)
    of_expert = torch.arange(len(counts), device="cuda", dtype=torch.int32)
    ids = of_expert.repeat_interleave(torch.tensor(counts, device="cuda"))[:, None]
    ids = ids[torch.randperm(len(ids), device="cuda")].contiguous()
    x = torch.randn(len(ids), hidden, device="cuda").to(dtype)
    check_experts(x, w13, w2, ids, torch.rand(ids.shape, device="cuda") + 0.1, portable=portable)


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 63, 64, 65, 1000, 4096])
@pytest.mark.parametrize("used", [8, 13, 64])
def test_some_experts_get_nothing(num_tokens, used):
    w13, w2 = experts_of(64, 512, 384, torch.bfloat16)
    x = torch.randn(num_tokens, 512, device="cuda").bfloat16()
    ids, weights = spread(num_tokens, used, 8)
    check_experts(x, w13, w2, 63 - ids, weights)


@pytest.mark.parametrize("portable", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 2, 50, 600, 3000])
def test_skipped_ids_and_nan_in_padding(portable, num_tokens):
    w13, w2 = experts_of(32, 256, 128, torch.bfloat16)
    wide = torch.randn(num_tokens, 3 * 256, device="cuda").bfloat16()
    x = wide[:, 256:512]  # strided rows
    ids, weights = spread(num_tokens, 32, 4)
    ids[torch.rand(ids.shape, device="cuda") < 0.3] = -1
    ids[0, 1] = 32  # outside
    ids[-1] = -1
    x[-1] = torch.nan
    weights[-1] = torch.nan
    out = check_experts(x, w13, w2, ids, weights, portable=portable)
    assert (out[-1] == 0).all()


@pytest.mark.parametrize("num_tokens", [1, 2, 64, 2000, 5000])
def test_expert_map(num_tokens):
    w13, w2 = experts_of(16, 256, 128, torch.bfloat16)
    x = torch.randn(num_tokens, 256, device="cuda").bfloat16()
    ids, weights = spread(num_tokens, 64, 8)
    expert_map = torch.full((64,), -1, device="cuda", dtype=torch.int32)
    expert_map[16:32] = torch.arange(16, device="cuda", dtype=torch.int32)
    check_experts(x, w13, w2, ids, weights, expert_map)


def test_no_tokens():
    w13, w2 = experts_of(8, 64, 64, torch.bfloat16)
    ids, weights = spread(0, 8, 2)
    assert kernels.fused_moe(torch.empty(0, 64, device="cuda").bfloat16(), w13, w2, ids, weights).shape == (0, 64)


def test_strided_out():
    w13, w2 = experts_of(8, 64, 64, torch.bfloat16)
    x = torch.randn(10, 64, device="cuda").bfloat16()
    ids, weights = spread(10, 8, 2)
    wide = torch.zeros(10, 192, device="cuda").bfloat16()
    kernels.fused_moe(x, w13, w2, ids, weights, out=wide[:, 64:128])
    assert torch.equal(wide[:, 64:128], kernels.fused_moe(x, w13, w2, ids, weights))
    assert (wide[:, :64] == 0).all()
    assert (wide[:, 128:] == 0).all()


@pytest.mark.parametrize("portable", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 2, 5, 63, 1000])
@pytest.mark.parametrize(("hidden", "top_k"), [(72, 4), (2048, 8), (2304, 3), (8192, 40), (4096, 33)])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_residual_and_next_norm(portable, num_tokens, hidden, top_k, dtype):
    num_experts, inner, eps = 64, 64, 1e-5
    w13, w2 = experts_of(num_experts, hidden, inner, dtype)
    x = torch.randn(num_tokens, hidden, device="cuda").to(dtype)
    ids, weights = spread(num_tokens, num_experts, top_k)
    ids[torch.rand(ids.shape, device="cuda") < 0.1] = -1
    ids[-1, :2] = -1
    weights[ids < 0] = torch.nan
    before = torch.randn(num_tokens, 2 * hidden, device="cuda").to(dtype)
    gain = torch.rand(hidden, device="cuda").to(dtype) + 0.5
    workspace, _ = dirty_workspace(x, w13, ids, portable=portable)
    options = {"workspace": workspace, "portable": portable}
    delta = kernels.fused_moe(x, w13, w2, ids, weights, **options)
    expected = before[:, :hidden] + delta
    what = f"x {tuple(x.shape)}, top {top_k}, portable {portable}"

    stream = before.clone()
    residual, normed = stream[:, :hidden], poisoned(num_tokens, hidden, dtype=dtype)
    result = kernels.fused_moe(
        x, w13, w2, ids, weights, residual=residual, next_norm=gain, eps=eps, normed=normed, **options
    )
    assert result is normed
    assert torch.equal(residual, expected), f"{what}: {int((residual != expected).sum())} elements of residual differ"
    assert torch.equal(stream[:, hidden:], before[:, hidden:]), f"{what}: written beside the residual"
    exact = residual.double()
    exact = exact * (exact.square().mean(-1, keepdim=True) + eps).rsqrt() * gain.double()
    error = relative_error(normed, exact)
    assert error < TOLERANCE[dtype], f"{what}: norm, error {error}"

    residual = before[:, :hidden].contiguous()
    assert kernels.fused_moe(x, w13, w2, ids, weights, residual=residual, **options) is residual
    assert torch.equal(residual, expected), f"{what}, no norm: {int((residual != expected).sum())} elements differ"


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 40])
@pytest.mark.parametrize(
    ("num_experts", "top_k"), [(8, 2), (96, 8), (128, 8), (160, 6), (256, 32), (257, 8), (512, 10)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("renormalize", [False, True])
def test_experts_from_logits(num_tokens, num_experts, top_k, dtype, renormalize):
    w13, w2 = experts_of(num_experts, 256, 128, torch.bfloat16)
    x = torch.randn(num_tokens, 256, device="cuda").bfloat16()
    logits = torch.randn(num_tokens, num_experts + 8, device="cuda").to(dtype)[:, :num_experts]
    logits[0, :3] = torch.nan
    ids, weights = routed(logits, top_k, renormalize=renormalize)
    expected = kernels.fused_moe(x, w13, w2, ids, weights)
    workspace, head = dirty_workspace(x, w13, ids)
    got_ids, got_weights = poisoned(*ids.shape, dtype=torch.int32), poisoned(*ids.shape, dtype=torch.float32)
    residual = torch.zeros_like(x)
    for _ in range(2):
        out = kernels.fused_moe(
            x, w13, w2, got_ids, got_weights, logits=logits, renormalize=renormalize, workspace=workspace
        )
        assert torch.equal(got_ids, ids), (got_ids[0], ids[0])
        assert torch.equal(got_weights, weights), (got_weights[0], weights[0])
        assert torch.equal(out, expected), relative_error(out, expected)
        got_ids.fill_(-1)
        residual.zero_()
        kernels.fused_moe(
            x, w13, w2, got_ids, got_weights, logits=logits, renormalize=renormalize, workspace=workspace,
            residual=residual,
        )  # fmt: skip
        assert torch.equal(residual, expected), relative_error(residual, expected)
    assert (workspace[:head] == 0).all(), "flags were left up"


@pytest.mark.parametrize("num_tokens", [1, 2, 20])
def test_experts_from_logits_with_map(num_tokens):
    w13, w2 = experts_of(16, 256, 128, torch.bfloat16)
    x, logits = torch.randn(num_tokens, 256, device="cuda").bfloat16(), torch.randn(num_tokens, 64, device="cuda")
    expert_map = torch.full((64,), -1, device="cuda", dtype=torch.int32)
    expert_map[16:32] = torch.arange(16, device="cuda", dtype=torch.int32)
    ids, weights = routed(logits, 8)
    expected = kernels.fused_moe(x, w13, w2, ids, weights, expert_map=expert_map)
    ids.fill_(-1)
    assert torch.equal(kernels.fused_moe(x, w13, w2, ids, weights, expert_map=expert_map, logits=logits), expected)


@pytest.mark.parametrize("num_tokens", [2, 40])
def test_weights_beyond_2_31_elements(num_tokens):
    num_experts, hidden, inner = 512, 2304, 1024
    w13 = torch.empty(num_experts, 2 * inner, hidden, device="cuda", dtype=torch.bfloat16).normal_(0, hidden**-0.5)
    w2 = torch.empty(num_experts, hidden, inner, device="cuda", dtype=torch.bfloat16).normal_(0, inner**-0.5)
    x = torch.randn(num_tokens, hidden, device="cuda").bfloat16()
    ids, weights = spread(num_tokens, 16, 4)
    check_experts(x, w13, w2, 511 - ids, weights)


@pytest.mark.parametrize("portable", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 30, 100, 400, 2000])
@pytest.mark.parametrize(("hidden", "inner"), [(256, 128), (512, 384), (1152, 256)])
def test_fp8_blocks(portable, num_tokens, hidden, inner):
    w13, w2 = experts_of(8, hidden, inner, torch.bfloat16)
    # blocks of very different size
    w13 *= torch.logspace(-1, 1, 2 * inner // 128, device="cuda").repeat_interleave(128)[:, None].bfloat16()
    w2 *= torch.logspace(-1, 1, hidden // 128, device="cuda").repeat_interleave(128)[:, None].bfloat16()
    x = (torch.randn(num_tokens, hidden, device="cuda") * torch.logspace(-1, 1, hidden, device="cuda")).bfloat16()
    q13, s13, back13 = oracle.fp8_blocks(w13)
    q2, s2, back2 = oracle.fp8_blocks(w2)
    ids, weights = spread(num_tokens, 8, 2)
    workspace, head = dirty_workspace(x, q13, ids, portable=portable)
    out = poisoned(*x.shape, dtype=x.dtype)
    kernels.fused_moe(
        x, q13, q2, ids, weights, w13_scale=s13, w2_scale=s2, workspace=workspace, out=out, portable=portable
    )
    expected = oracle.fused_moe(x, lambda e: back13[e], lambda e: back2[e], ids, weights, fp8=True)
    error = relative_error(out, expected)
    assert error < FP8_TOLERANCE, f"x {tuple(x.shape)}, inner {inner}, portable {portable}: error {error}"
    assert (workspace[:head] == 0).all()


@pytest.mark.parametrize("num_tokens", [1, 16, 300])
def test_captured_in_a_graph(num_tokens):
    w13, w2 = experts_of(32, 256, 128, torch.bfloat16)
    logits = torch.randn(num_tokens, 32, device="cuda")
    x = torch.randn(num_tokens, 256, device="cuda").bfloat16()
    ids, weights = kernels.moe_route(logits, 4)
    workspace, _ = dirty_workspace(x, w13, ids)
    out = poisoned(*x.shape, dtype=x.dtype)

    def step():
        kernels.fused_moe(x, w13, w2, ids, weights, workspace=workspace, out=out, logits=logits)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            step()
    for _ in range(3):
        logits.normal_()
        x.normal_()
        graph.replay()
        replayed = out.clone()
        step()
        assert torch.equal(replayed, out)
        expected = oracle.fused_moe(x, lambda e: w13[e].double(), lambda e: w2[e].double(), ids, weights)
        assert relative_error(out, expected) < TOLERANCE[torch.bfloat16]


def test_wrong_arguments_are_named():
    w13, w2 = experts_of(8, 64, 64, torch.bfloat16)
    x = torch.randn(4, 64, device="cuda").bfloat16()
    ids, weights = spread(4, 8, 2)
    small = torch.zeros(512, dtype=torch.uint8, device="cuda")
    for arguments, options, name in [
        ((x.cpu(), w13, w2, ids, weights), {"workspace": small}, "x"),
        ((x, w13[:, :, :32], w2, ids, weights), {"workspace": small}, "w13"),
        ((x, w13, w2[:4], ids, weights), {"workspace": small}, "w2"),
        ((x, w13, w2, ids.long(), weights), {"workspace": small}, "ids"),
        ((x, w13, w2, ids, weights[:, :1]), {"workspace": small}, "weights"),
        ((x, w13, w2, ids, weights), {"workspace": small}, "workspace"),
        ((x, w13, w2, ids, weights), {"activation": "gelu"}, "activation"),
        ((x, w13, w2, ids, weights), {"w13_scale": weights}, "w13_scale"),
        ((x, w13, w2, ids, weights), {"residual": x[:2]}, "residual"),
        ((x, w13, w2, ids, weights), {"residual": x, "out": x}, "out"),
        ((x, w13, w2, ids, weights), {"next_norm": x[0]}, "next_norm"),
        ((x, w13, w2, ids, weights), {"residual": x, "next_norm": x[0, :8]}, "next_norm"),
        ((x, w13, w2, ids, weights), {"residual": x, "normed": x}, "normed"),
        ((x, w13, w2, ids, weights), {"logits": torch.zeros(4, 9, device="cuda")}, "logits"),
        ((x, w13.half(), w2, ids, weights), {}, "w13"),
    ]:
        with pytest.raises(ValueError, match=rf"^{name}:"):
            kernels.fused_moe(*arguments, **options)
    logits = torch.randn(4, 64, device="cuda")
    for arguments, options, name in [
        ((logits.T, 8), {}, "logits"),
        ((logits, 33), {}, "top_k"),
        ((logits, 8), {"scoring": "tanh"}, "scoring"),
        ((logits, 8), {"num_groups": 5}, "num_groups"),
        ((logits, 8), {"bias": torch.zeros(3, device="cuda")}, "bias"),
    ]:
        with pytest.raises(ValueError, match=rf"^{name}:"):
            kernels.moe_route(*arguments, **options)
    with pytest.raises(ValueError, match="^num_experts:"):
        kernels.moe_align(ids, 0, 8)
