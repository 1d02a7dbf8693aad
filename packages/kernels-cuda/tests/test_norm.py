import pytest
import torch
from oracles import norm as oracle
from poison import poisoned, relative_error

from lamella import kernels_cuda as kernels

pytestmark = pytest.mark.gpu
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 1e-5}


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("rows", [0, 1, 3, 257])
@pytest.mark.parametrize("width", [8, 64, 128, 576, 4096, 5120, 8192, 16384])
@pytest.mark.parametrize("plus_one", [False, True])
def test_rms_norm(dtype, rows, width, plus_one):
    x = torch.randn(rows, width, device="cuda").to(dtype)
    weight = torch.randn(width, device="cuda").to(dtype)
    out = kernels.rms_norm(x, weight, 1e-6, plus_one=plus_one, out=poisoned(rows, width, dtype=dtype))
    expected, _ = oracle.rms_norm(x, weight, 1e-6, plus_one=plus_one)
    assert relative_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("rows", [1, 33])
def test_residual_is_added_and_rounded_first(dtype, rows):
    wide = torch.randn(rows, 3 * 4096, device="cuda").to(dtype)
    x, residual = wide[:, :4096], wide[:, 4096:8192]  # strided rows
    weight = torch.randn(4096, device="cuda").to(dtype)
    expected, summed = oracle.rms_norm(x, weight, 1e-5, residual=residual)
    out = kernels.rms_norm(x, weight, 1e-5, residual=residual, out=poisoned(rows, 4096, dtype=dtype))
    assert torch.equal(residual, summed)
    assert relative_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("rows", [1, 65])
def test_fp8_rows_carry_their_scale(rows):
    x = torch.randn(rows, 4096, device="cuda").bfloat16() * torch.logspace(-6, 3, rows, device="cuda")[:, None]
    x = x.bfloat16()
    weight = torch.randn(4096, device="cuda").bfloat16()
    out, scale = kernels.rms_norm_fp8(x, weight, 1e-6)
    expected, _ = oracle.rms_norm(x, weight, 1e-6)
    assert out.float().abs().amax(1).ge(440).all()  # the range is used
    assert relative_error(out.double() * scale[:, None].double(), expected) < 4e-2


def test_rows_beyond_2_31_elements():
    rows, width = 131_080, 16_384
    x = torch.randn(1, width, device="cuda").bfloat16().expand(rows, width).contiguous()
    weight = torch.ones(width, device="cuda").bfloat16()
    out = kernels.rms_norm(x, weight, 1e-6)
    assert torch.equal(out[-1], out[0])
    assert relative_error(out[-1:], oracle.rms_norm(x[:1], weight, 1e-6)[0]) < 6e-3


def test_wrong_arguments_are_named():
    x = torch.randn(4, 64, device="cuda").bfloat16()
    weight = torch.randn(64, device="cuda").bfloat16()
    for arguments, name in [
        ((x.cpu(), weight), "x"),
        ((x, weight.cpu()), "weight"),
        ((x, weight.float()), "weight"),
        ((x, weight[:32]), "weight"),
        ((x.T, weight), "x"),
        ((x[:, 1:33], weight[:32]), "x"),
    ]:
        with pytest.raises(ValueError, match=rf"^{name}:|^out:"):
            kernels.rms_norm(*arguments, 1e-6)
