import pytest
import torch
from oracles import cache as oracle
from poison import poisoned, relative_error

from lamella import kernels_cuda as kernels

pytestmark = pytest.mark.gpu
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-5}


def table(rotary_dim, length=4096):
    angles = torch.outer(
        torch.arange(length).double(), 10000.0 ** (-torch.arange(0, rotary_dim, 2).double() / rotary_dim)
    )
    return angles.cos().float().cuda(), angles.sin().float().cuda()


def qkv(tokens, q_heads, kv_heads, width, dtype):
    """Views of fused rows."""
    row = torch.randn(tokens, (q_heads + 2 * kv_heads) * width, device="cuda").to(dtype)
    q, k, v = row.split([q_heads * width, kv_heads * width, kv_heads * width], dim=1)
    return q.view(tokens, q_heads, width), k.view(tokens, kv_heads, width), v.view(tokens, kv_heads, width)


def empty_cache(blocks, kv_heads, size, width, dtype, tokens_first):
    cache = poisoned(
        *((blocks, size, kv_heads, width) if tokens_first else (blocks, kv_heads, size, width)), dtype=dtype
    )
    return cache.transpose(1, 2) if tokens_first else cache


def slots_of(tokens, blocks, size):
    slots = torch.randperm(blocks * size, device="cuda")[:tokens].long()
    if tokens > 2:
        slots[tokens // 2] = -1
    return slots


def check_cache(cache, before, x, slots, tolerance, what, scale=None):
    """The written places hold x, all others what they held."""
    size = cache.shape[2]
    for i, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        got = cache[slot // size, :, slot % size].double()
        if scale is not None:
            got = got * scale.double().view(-1, 1)
        assert relative_error(got, x[i]) < tolerance, f"{what}: token {i} slot {slot}: {relative_error(got, x[i])}"
    written = torch.zeros(cache.shape[0], size, dtype=torch.bool, device="cuda")
    keep = slots[slots >= 0]
    written[keep // size, keep % size] = True
    same = (cache.view(torch.uint8) == before.view(torch.uint8)) if cache.is_contiguous() else None
    if same is not None:
        same = same.view(*cache.shape[:3], -1).all(-1)
        assert (same | written[:, None]).all(), f"{what}: places without a token were touched"


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("tokens", [0, 1, 37, 700])
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "width", "rotary"),
    [
        (32, 8, 128, 128),
        (4, 1, 64, 64),
        (6, 2, 80, 80),
        (5, 5, 96, 96),
        (2, 1, 192, 64),
        (8, 2, 256, 128),
        (3, 1, 40, 20),
        (4, 2, 80, 32),
        (2, 2, 112, 56),
        (4, 2, 18, 10),
    ],
)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_rope_write(dtype, tokens, q_heads, kv_heads, width, rotary, interleaved, norm):
    q, k, v = qkv(tokens, q_heads, kv_heads, width, dtype)
    cos, sin = table(rotary)
    positions = torch.randint(0, 4096, (tokens,), device="cuda", dtype=torch.int32 if norm else torch.int64)
    size = 16
    blocks = -(-tokens // size) + 3
    caches = [empty_cache(blocks, kv_heads, size, width, dtype, interleaved) for _ in range(2)]
    before = [c.clone() for c in caches]
    slots = slots_of(tokens, blocks, size)
    weights = [torch.randn(width, device="cuda").to(dtype) if norm else None for _ in range(2)]
    parts = [x.double() if w is None else oracle.head_norm(x, w, 1e-5, False) for x, w in zip((q, k), weights)]
    want_q, want_k = (oracle.rotate(x, positions, cos, sin, interleaved) for x in parts)
    want_v, old_k = v.double(), k.clone()
    kernels.rope_write(q, k, v, positions, cos, sin, *caches, slots, q_norm=weights[0], k_norm=weights[1], eps=1e-5,
                       interleaved=interleaved)  # fmt: skip
    what = (
        f"{dtype} T={tokens} heads={q_heads}/{kv_heads}x{width} rotary={rotary} interleaved={interleaved} norm={norm}"
    )
    assert relative_error(q, want_q) < TOLERANCE[dtype], f"q, {what}: {relative_error(q, want_q)}"
    assert torch.equal(k, old_k), f"k changed, {what}"
    check_cache(caches[0], before[0], want_k, slots, TOLERANCE[dtype], f"k, {what}")
    check_cache(caches[1], before[1], want_v, slots, TOLERANCE[dtype], f"v, {what}")


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("width", [64, 128, 100])
def test_rope_in_place(width, plus_one):
    q, k, _ = qkv(65, 8, 2, width, torch.bfloat16)
    cos, sin = table(width)
    positions = torch.randint(0, 4096, (65,), device="cuda", dtype=torch.int32)
    weight = torch.randn(width, device="cuda").bfloat16()
    want = [oracle.rotate(oracle.head_norm(x, weight, 1e-6, plus_one), positions, cos, sin, False) for x in (q, k)]
    kernels.rope(q, k, positions, cos, sin, q_norm=weight, k_norm=weight, plus_one=plus_one)
    for got, expected, name in zip((q, k), want, "qk"):
        assert relative_error(got, expected) < 6e-3, f"{name} width={width}: {relative_error(got, expected)}"


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("width", [128, 80, 36])
def test_fp8_cache(per_head, width):
    tokens, kv_heads, size = 50, 4, 32
    q, k, v = qkv(tokens, 8, kv_heads, width, torch.bfloat16)
    cos, sin = table(width)
    positions = torch.arange(tokens, device="cuda", dtype=torch.int32)
    scales = [torch.rand(kv_heads if per_head else 1, device="cuda") * 0.01 + 0.01 for _ in range(2)]
    caches = [empty_cache(6, kv_heads, size, width, torch.float8_e4m3fn, False) for _ in range(2)]
    before = [c.clone() for c in caches]
    slots = slots_of(tokens, 6, size)
    want_k = oracle.rotate(k.double(), positions, cos, sin, False)
    kernels.rope_write(q, k, v, positions, cos, sin, *caches, slots, k_scale=scales[0], v_scale=scales[1])
    full = [s.expand(kv_heads) for s in scales]
    check_cache(caches[0], before[0], want_k, slots, 4e-2, f"fp8 k {width}", full[0])
    check_cache(caches[1], before[1], v.double(), slots, 4e-2, f"fp8 v {width}", full[1])


def test_fp8_saturates():
    k = torch.full((1, 1, 64), 1e4, device="cuda").bfloat16()
    caches = [empty_cache(1, 1, 1, 64, torch.float8_e4m3fn, False) for _ in range(2)]
    kernels.kv_write(k, -k, *caches, torch.zeros(1, dtype=torch.int64, device="cuda"))
    assert (caches[0].float() == 448).all()
    assert (caches[1].float() == -448).all()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_kv_write_is_exact(dtype):
    _, k, v = qkv(300, 4, 2, 128, dtype)
    caches = [empty_cache(40, 2, 16, 128, dtype, False) for _ in range(2)]
    expected = [c.clone() for c in caches]
    slots = slots_of(300, 40, 16)
    for cache, x in zip(expected, (k, v)):
        oracle.insert(cache, x, slots)
    kernels.kv_write(k, v, *caches, slots)
    for got, want, name in zip(caches, expected, "kv"):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), name


def test_cache_beyond_2_31_elements():
    blocks, size = 140_000, 16  # 2.3e9 elements in each
    k, v = torch.randn(2, 8, 128, device="cuda").bfloat16(), torch.randn(2, 8, 128, device="cuda").bfloat16()
    caches = [torch.empty(blocks, 8, size, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    slots = torch.tensor([blocks * size - 1, 5], device="cuda")
    kernels.kv_write(k, v, *caches, slots)
    assert torch.equal(caches[0][-1, :, -1], k[0])
    assert torch.equal(caches[1][-1, :, -1], v[0])
    assert torch.equal(caches[0][0, :, 5], k[1])


def test_padding_with_wild_positions_and_nan_stays_alone():
    q, k, v = qkv(3, 4, 2, 128, torch.bfloat16)
    q[2], k[2], v[2] = torch.nan, torch.nan, torch.nan
    cos, sin = table(128)
    positions = torch.tensor([5, 7, -(2**31)], dtype=torch.int32, device="cuda")
    caches = [torch.zeros(2, 2, 16, 128, device="cuda").bfloat16() for _ in range(2)]
    kernels.rope_write(q, k, v, positions, cos, sin, *caches, torch.tensor([3, 20, -1], device="cuda"))
    assert all(torch.isfinite(c).all() for c in caches)
    assert torch.isfinite(q[:2]).all()


def test_wrong_arguments_are_named():
    q, k, v = qkv(4, 4, 2, 64, torch.bfloat16)
    cos, sin = table(64)
    good = {
        "q": q, "k": k, "v": v, "positions": torch.zeros(4, dtype=torch.int32, device="cuda"), "cos": cos, "sin": sin,
        "k_cache": torch.zeros(2, 2, 16, 64, device="cuda").bfloat16(),
        "v_cache": torch.zeros(2, 2, 16, 64, device="cuda").bfloat16(),
        "slot_mapping": torch.zeros(4, dtype=torch.int64, device="cuda"),
    }  # fmt: skip
    kernels.rope_write(**good)
    for name, value in [
        ("k", k.float()), ("v", v[:, :1]), ("positions", good["positions"][:3]), ("cos", cos.double()),
        ("sin", sin[:, :8]),
        ("k_cache", good["k_cache"].float()), ("v_cache", good["v_cache"][:1]), ("slot_mapping", good["positions"]),
        ("k_scale", torch.ones(1, device="cuda")), ("q_norm", torch.ones(32, device="cuda").bfloat16()), ("k", k.cpu()),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=rf"^{name}:"):
            kernels.rope_write(**{**good, name: value})
