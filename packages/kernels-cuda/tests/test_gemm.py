import pytest
import torch
from oracles import gemm as oracle
from poison import poisoned, relative_error

from lamella import kernels_cuda as kernels

pytestmark = pytest.mark.gpu
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4}


@pytest.fixture(scope="module")
def workspace():
    return kernels.linear_workspace(256)


def draw(*shape, dtype=torch.bfloat16, scale=1.0):
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def check(out, expected, limit, what):
    error = relative_error(out, expected)
    assert error < limit, f"{what}: relative error {error:.2e}, limit {limit:.0e}"


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("m", [0, 1, 3, 8, 9, 16, 17, 32, 40, 64, 65, 128, 200, 256, 300])
@pytest.mark.parametrize(
    ("n", "k"), [(8, 8), (128, 64), (136, 200), (1024, 576), (4096, 4096), (6144, 2048), (320, 14336)]
)
def test_linear(workspace, portable, m, n, k):
    x, w = draw(m, k), draw(n, k, scale=k**-0.5)
    out = kernels.linear(x, w, workspace, out=poisoned(m, n, dtype=x.dtype), portable=portable)
    check(out, oracle.linear(x, w), 4e-3, f"m={m} n={n} k={k}")
    assert not workspace[:1024].any(), "flags are left as zeros"


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("m", [1, 7, 33, 130])
def test_float16_bias_and_strided_rows(workspace, portable, m):
    wide = draw(m, 3 * 1024, dtype=torch.float16)
    x, w, bias = wide[:, 1024:2048], draw(512, 1024, dtype=torch.float16, scale=0.03), draw(512, dtype=torch.float16)
    out = poisoned(m, 1024, dtype=torch.float16)
    kernels.linear(x, w, workspace, bias=bias, out=out[:, 512:], portable=portable)
    check(out[:, 512:], oracle.linear(x, w, bias), 6e-4, f"m={m}")
    assert out[:, :512].isnan().all()


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize("m", [1, 20, 64, 129])
def test_gate_and_up_in_one_product(workspace, portable, activation, m):
    x, gate, up = draw(m, 1024), draw(2816, 1024, scale=0.03), draw(2816, 1024, scale=0.03)
    packed = kernels.pack_gate_up(gate, up)
    out = poisoned(m, 2816, dtype=x.dtype)
    kernels.linear(x, packed, workspace, activation=activation, out=out, portable=portable)
    expected = oracle.act(oracle.linear(x, gate), activation) * oracle.linear(x, up)
    check(out, expected, 8e-3, f"m={m} {activation}")


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("m", [1, 5, 64, 200])
def test_norm_between_two_products(workspace, portable, m):
    """o projection + residual, then the next layer's norm and projection, without a norm kernel."""
    h = 4096
    x, w, residual, gain = draw(m, 2048), draw(h, 2048, scale=0.02), draw(m, h), draw(h)
    squares, scaled = torch.full((h // 128, m), torch.nan, device="cuda"), poisoned(m, h, dtype=x.dtype)
    hidden = residual.clone()
    kernels.linear(
        x,
        w,
        workspace,
        residual=hidden,
        out=hidden,
        gain=gain,
        scaled_out=scaled,
        squares_out=squares,
        portable=portable,
    )
    expected = oracle.linear(x, w).to(x.dtype).double() + residual.double()
    check(hidden, expected, 6e-3, "residual stream")
    check(squares.sum(0), hidden.double().square().sum(1), 1e-5, "squares")
    assert torch.equal(scaled, (hidden.float() * gain.float()).to(x.dtype))
    w2 = draw(1024, h, scale=0.02)
    out = kernels.linear(scaled, w2, workspace, squares_in=squares, eps=1e-5, portable=portable)
    normed = hidden.double() / (hidden.double().square().mean(1, keepdim=True) + 1e-5).sqrt() * gain.double()
    check(out, oracle.linear(normed, w2), 6e-3, "product of the norm")


@pytest.mark.parametrize("m", [1, 16, 61, 200])
@pytest.mark.parametrize("blocks", [False, True])
def test_fp8(workspace, m, blocks):
    n, k = 1536, 2048
    x, w = draw(m, k).float(), draw(n, k, scale=0.02).float()
    if blocks:
        x_scale = x.view(m, -1, 128).abs().amax(2) / 448
        w_scale = w.view(n // 128, 128, k // 128, 128).abs().amax((1, 3)) / 448
        xq = (x.view(m, -1, 128) / x_scale[..., None]).view(m, k).to(torch.float8_e4m3fn)
        wq = (w / w_scale.repeat_interleave(128, 0).repeat_interleave(128, 1)).to(torch.float8_e4m3fn)
        expected = oracle.dequantised(xq, x_scale) @ oracle.dequantised_blocks(wq, w_scale).T
    else:
        x_scale, w_scale = x.abs().amax(1) / 448, w.abs().amax(1) / 448
        xq, wq = ((t / s[:, None]).to(torch.float8_e4m3fn) for t, s in ((x, x_scale), (w, w_scale)))
        expected = oracle.dequantised(xq, x_scale) @ oracle.dequantised(wq, w_scale).T
    out = kernels.linear_fp8(xq, wq, x_scale, w_scale, workspace, out=poisoned(m, n, dtype=torch.bfloat16))
    check(out, expected, 5e-3, f"m={m} blocks={blocks}")


def draw_fp8(m, n, k, blocks, spread=0.0):
    """e4m3 x and w with scales within 10^-spread .. 10^spread, and their product in float64."""
    x, w = draw(m, k).to(torch.float8_e4m3fn), draw(n, k).to(torch.float8_e4m3fn)
    units = -(-k // 128)
    shapes = ((m, units), (-(-n // 128), units)) if blocks else ((m,), (n,))
    x_scale, w_scale = (10 ** torch.empty(shape, device="cuda").uniform_(-spread, spread) for shape in shapes)
    weights = oracle.dequantised_blocks(w, w_scale) if blocks else oracle.dequantised(w, w_scale)
    return x, w, x_scale, w_scale, oracle.dequantised(x, x_scale) @ weights.T


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("k", [16, 128, 2048, 2064, 7168])
@pytest.mark.parametrize("n", [8, 136, 1536, 4096])
def test_fp8_of_many_rows(workspace, n, k, blocks):
    x, w, x_scale, w_scale, expected = draw_fp8(4096, n, k, blocks, spread=0.3)
    for m in (129, 200, 255, 256, 1000, 4096):
        room = poisoned(m + 64, n + 64, dtype=torch.bfloat16)
        kernels.linear_fp8(x[:m], w, x_scale[:m], w_scale, workspace, out=room[:m, :n])
        check(room[:m, :n], expected[:m], 5e-3, f"m={m} n={n} k={k} blocks={blocks}")
        assert room[m:].isnan().all(), "rows behind the last one were written"
        assert room[:, n:].isnan().all(), "columns behind the last one were written"
    assert not workspace[:1024].any(), "flags are left as zeros"


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("m", [129, 256, 2000])
def test_fp8_of_many_rows_with_bias_and_strided_rows(workspace, m, blocks):
    n, k = 1544, 2064
    x, w, x_scale, w_scale, expected = draw_fp8(m, n, k, blocks, spread=0.3)
    wide = poisoned(m, 3 * k, dtype=torch.float8_e4m3fn)
    wide[:, k : 2 * k] = x
    bias = draw(n, scale=50.0)
    out = kernels.linear_fp8(wide[:, k : 2 * k], w, x_scale, w_scale, workspace, bias=bias)
    check(out, expected + bias.double(), 5e-3, f"m={m} blocks={blocks}")


@pytest.mark.parametrize("m", [200, 2000])
def test_fp8_scales_of_blocks_may_differ_wildly(workspace, m):
    """Each row by itself, since a row of large scales would hide the others."""
    x, w, x_scale, w_scale, expected = draw_fp8(m, 1536, 7168, True, spread=3.0)
    out = kernels.linear_fp8(x, w, x_scale, w_scale, workspace).double()
    errors = (out - expected).norm(dim=1) / expected.norm(dim=1)
    assert out.isfinite().all()
    assert errors.max() < 6e-3, f"row {errors.argmax()}: relative error {errors.max():.2e}"


@pytest.mark.parametrize("m", [512, 2000])
@pytest.mark.parametrize("unit", [0, 7, 8, 15, 16, 54, 55])
def test_fp8_small_blocks_are_not_lost(workspace, m, unit):
    """What the scale of one block of K does, where all the others are a million times larger but hold zeros."""
    n, k = 1536, 55 * 128 + 48
    x, w, x_scale, w_scale, _ = draw_fp8(m, n, k, True)
    here = torch.arange(k, device="cuda") // 128 == unit
    x = torch.where(here, x.float(), 0).to(torch.float8_e4m3fn)
    x_scale = torch.where(torch.arange(x_scale.shape[1], device="cuda") == unit, 1e-3, 1e3).expand(m, -1).contiguous()
    expected = oracle.dequantised(x, x_scale) @ oracle.dequantised_blocks(w, w_scale).T
    check(kernels.linear_fp8(x, w, x_scale, w_scale, workspace), expected, 5e-3, f"m={m} unit={unit}")


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("m", [256, 2000])
def test_fp8_sums_are_promoted(workspace, m, blocks):
    """Products of one sign: in 14 bits, the more there are the more of each is lost."""
    x, w, x_scale, w_scale, _ = draw_fp8(m, 1536, 7168, blocks)
    x, w = (torch.empty(t.shape, device="cuda").uniform_(0.5, 1.0).to(torch.float8_e4m3fn) for t in (x, w))
    expected = x.double() @ w.double().T
    check(kernels.linear_fp8(x, w, x_scale, w_scale, workspace), expected, 5e-3, f"m={m} blocks={blocks}")


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(("m", "n"), [(200, 1536), (1000, 4096), (4096, 4096)])
def test_fp8_of_many_rows_has_the_same_bits_every_time_and_in_graphs(workspace, m, n, blocks):
    x, w, x_scale, w_scale, _ = draw_fp8(m, n, 2064, blocks)
    first = kernels.linear_fp8(x, w, x_scale, w_scale, workspace)
    for _ in range(20):
        assert torch.equal(kernels.linear_fp8(x, w, x_scale, w_scale, workspace), first)
    out = torch.empty_like(first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            kernels.linear_fp8(x, w, x_scale, w_scale, workspace, out=out)
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, first)


def test_fp8_rows_and_scales_of_the_kernel_before(workspace):
    """Weights are asked for before the kernel before has ended; rows, their scales and the output are not."""
    m, n, k = 1024, 4096, 2048
    x, w, x_scale, w_scale, expected = draw_fp8(m, n, k, True)
    rows, scales = torch.zeros_like(x.view(torch.uint8)), torch.full_like(x_scale, torch.nan)
    other = draw(8192, 8192)
    for _ in range(5):
        rows.zero_()
        scales.fill_(torch.nan)
        other @ other  # something to wait behind
        rows.copy_(x.view(torch.uint8))
        scales.copy_(x_scale)
        out = kernels.linear_fp8(rows.view(torch.float8_e4m3fn), w, scales, w_scale, workspace)
        check(out, expected, 5e-3, "behind other kernels")


def test_same_bits_every_time_and_in_graphs(workspace):
    x, w = draw(17, 4096), draw(6144, 4096, scale=0.02)
    first = kernels.linear(x, w, workspace)
    for _ in range(20):
        assert torch.equal(kernels.linear(x, w, workspace), first)
    out = torch.empty_like(first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            kernels.linear(x, w, workspace, out=out)
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, first)


def test_neighbours_do_not_matter(workspace):
    """A row's bits do not depend on the other rows of the same tile size."""
    x, w = draw(8, 4096), draw(4096, 4096, scale=0.02)
    whole = kernels.linear(x, w, workspace)
    x[1:] = torch.nan
    assert torch.equal(kernels.linear(x, w, workspace)[0], whole[0])


def test_wrong_arguments_are_named(workspace):
    x, w = draw(4, 64), draw(128, 64)
    with pytest.raises(ValueError, match="^w:"):
        kernels.linear(x, w[:, :32], workspace)
    with pytest.raises(ValueError, match="^w:"):
        kernels.linear(x, w.half(), workspace)
    with pytest.raises(ValueError, match="^workspace:"):
        kernels.linear(x, w, workspace[:64])
    with pytest.raises(ValueError, match="^residual:"):
        kernels.linear(x, w, workspace, residual=draw(4, 64))
    with pytest.raises(ValueError, match="^scaled_out:"):
        kernels.linear(x, w, workspace, gain=draw(128))
    with pytest.raises(ValueError, match="activation"):
        kernels.linear(x, w, workspace, activation="relu")
