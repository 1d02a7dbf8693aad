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
