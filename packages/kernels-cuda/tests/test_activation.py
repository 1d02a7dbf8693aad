import pytest
import torch
from oracles import activation as oracle
from poison import poisoned, relative_error

from lamella import kernels_cuda as kernels

pytestmark = pytest.mark.gpu
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 1e-5}


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("rows", [0, 1, 3, 513])
@pytest.mark.parametrize("width", [8, 96, 768, 1032, 14336])
def test_gated(dtype, kind, rows, width):
    x = (torch.randn(rows, 2 * width, device="cuda") * 3).to(dtype)
    out = kernels.gated_activation(x, kind, out=poisoned(rows, width, dtype=dtype))
    error = relative_error(out, oracle.gated(x, kind))
    assert error < TOLERANCE[dtype], f"{kind} {dtype} [{rows}, {width}]: {error}"


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("rows", [0, 1, 3, 700])
@pytest.mark.parametrize("width", [64, 192, 1088, 14336])
def test_gated_in_tiles(dtype, kind, rows, width):
    x = (torch.randn(rows, 2 * width, device="cuda") * 3).to(dtype)
    out = kernels.gated_activation(x, kind, tile=64, out=poisoned(rows, width, dtype=dtype))
    error = relative_error(out, oracle.gated(x, kind, 64))
    assert error < TOLERANCE[dtype], f"{kind} {dtype} [{rows}, {width}] in tiles: {error}"
    # the same arithmetic, so the same bits as on rows in halves
    halves = torch.cat([part.flatten(-2) for part in x.unflatten(-1, (-1, 2, 64)).unbind(-2)], -1)
    assert torch.equal(out, kernels.gated_activation(halves, kind)), f"{kind} {dtype} [{rows}, {width}]"


@pytest.mark.parametrize("width", [128, 1280, 14336])
def test_fp8_in_tiles(width):
    halves = torch.randn(67, 2 * width, device="cuda").bfloat16()
    gate, up = (half.unflatten(-1, (-1, 64)) for half in halves.chunk(2, -1))
    x = torch.stack((gate, up), -2).flatten(1)
    for quantise in (kernels.silu_mul_fp8_per_token, kernels.silu_mul_fp8_per_group):
        out, scale = quantise(x, tile=64)
        expected, expected_scale = quantise(halves)
        assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8)), f"{quantise.__name__} {width}"
        assert torch.equal(scale, expected_scale), f"{quantise.__name__} {width}"


def test_strided_rows_in_tiles():
    wide = torch.randn(70, 4096, device="cuda").bfloat16()
    x = wide[:, 1024:3072]
    out = poisoned(70, 2048, dtype=torch.bfloat16)[:, :1024]
    kernels.silu_mul(x, tile=64, out=out)
    assert relative_error(out, oracle.gated(x, "silu", 64)) < 6e-3


def test_strided_rows_and_more_dimensions():
    wide = torch.randn(70, 4096, device="cuda").bfloat16()
    x = wide[:, 1024:3072]
    out = poisoned(70, 2048, dtype=torch.bfloat16)[:, :1024]
    kernels.silu_mul(x, out=out)
    assert relative_error(out, oracle.gated(x, "silu")) < 6e-3
    x = torch.randn(3, 5, 256, device="cuda").bfloat16()
    out = kernels.silu_mul(x)
    assert out.shape == (3, 5, 128)
    assert relative_error(out, oracle.gated(x, "silu")) < 6e-3


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
def test_far_ends(kind):
    gate = torch.tensor([-1e4, -100.0, -88.0, -0.0, 0.0, 88.0, 100.0, 1e4], device="cuda").bfloat16()
    x = torch.cat((gate, torch.ones_like(gate)))[None]
    out = kernels.gated_activation(x, kind)
    assert torch.isfinite(out).all(), out
    assert torch.allclose(out.double(), oracle.gated(x, kind), rtol=1e-2, atol=1e-6), out


def test_rows_beyond_2_31_elements():
    rows, width = 75_000, 14_336
    x = torch.randn(1, 2 * width, device="cuda").bfloat16().expand(rows, -1).contiguous()
    out = kernels.silu_mul(x)
    assert torch.equal(out[-1], out[0])
    assert relative_error(out[-1:], oracle.gated(x[:1], "silu")) < 6e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [0, 1, 67])
@pytest.mark.parametrize("width", [128, 768, 2048, 5120, 14336, 28672])
@pytest.mark.parametrize("fused", [False, True])
def test_fp8_per_token(dtype, rows, width, fused):
    x = torch.randn(rows, 2 * width if fused else width, device="cuda").to(dtype)
    x[rows // 2 :] *= 1e-3
    y = oracle.gated(x, "silu").to(dtype) if fused else x
    out = poisoned(rows, width, dtype=torch.float8_e4m3fn)
    scale = poisoned(rows, dtype=torch.float32)
    (kernels.silu_mul_fp8_per_token if fused else kernels.quant_fp8_per_token)(x, out=out, scale=scale)
    what = f"{dtype} [{rows}, {width}] fused={fused}"
    assert relative_error(scale, oracle.token_scale(y)) < 1e-2, what
    assert relative_error(out.double() * scale.double()[:, None], y) < 4e-2, what
    assert torch.isfinite(out.float()).all(), what


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [0, 1, 67])
@pytest.mark.parametrize("width", [128, 768, 1280, 14336])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("column_major", [False, True])
@pytest.mark.parametrize("pow2", [False, True])
def test_fp8_per_group(dtype, rows, width, fused, column_major, pow2):
    x = torch.randn(rows, 2 * width if fused else width, device="cuda").to(dtype)
    x[:, :128] *= 0  # a group of zeros
    y = oracle.gated(x, "silu").to(dtype) if fused else x
    quantise = kernels.silu_mul_fp8_per_group if fused else kernels.quant_fp8_per_group
    out, scale = quantise(x, column_major=column_major, pow2=pow2, out=poisoned(rows, width, dtype=torch.float8_e4m3fn))
    what = f"{dtype} [{rows}, {width}] fused={fused} column_major={column_major} pow2={pow2}"
    assert scale.shape == (rows, width // 128), what
    assert not column_major or rows == 0 or (scale.stride(0) == 1 and scale.stride(1) % 4 == 0), what
    expected = oracle.group_scale(y, pow2)
    if pow2:
        mantissa = torch.frexp(scale)[0]
        assert (mantissa == 0.5).all(), what
    else:
        assert relative_error(scale, expected) < 1e-2, what
    if rows:
        assert torch.isfinite(out.float()).all(), what
        assert (
            relative_error((out.double().unflatten(1, (-1, 128)) * scale.double()[..., None]).flatten(1), y) < 4e-2
        ), what
        assert (out[:, :128].float() == 0).all(), what


def test_a_row_of_nan_stays_alone():
    x = torch.randn(3, 512, device="cuda").bfloat16()
    x[1] = torch.nan
    out = kernels.silu_mul(x)
    assert torch.isfinite(out[[0, 2]]).all()
    q, scale = kernels.quant_fp8_per_group(x)
    assert torch.isfinite(q[[0, 2]].float()).all()
    assert torch.isfinite(scale[[0, 2]]).all()


def test_wrong_arguments_are_named():
    x = torch.randn(4, 256, device="cuda").bfloat16()
    for call, name in [
        (lambda: kernels.silu_mul(x.cpu()), "x|out"),
        (lambda: kernels.silu_mul(x.double()), "x|out"),
        (lambda: kernels.silu_mul(x[:, :250]), "x"),
        (lambda: kernels.silu_mul(x[:, 4:132]), "x"),
        (lambda: kernels.silu_mul(x, out=x), "out"),
        (lambda: kernels.gated_activation(x, "relu"), "kind"),
        (lambda: kernels.silu_mul(x, tile=32), "tile"),
        (lambda: kernels.silu_mul(x[:, :192], tile=64), "x"),
        (lambda: kernels.quant_fp8_per_token(x.float()), "x"),
        (lambda: kernels.quant_fp8_per_group(x[:, :64]), "x"),
        (lambda: kernels.quant_fp8_per_token(x, scale=torch.empty(3, device="cuda")), "scale"),
        (lambda: kernels.quant_fp8_per_group(x, scale=torch.empty(4, 3, device="cuda")), "scale"),
    ]:
        with pytest.raises(ValueError, match=rf"^({name}):"):
            call()
