"""Packed matrices of every format on every instruction set of this machine, against float64."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

_C = pytest.importorskip("lamella.runner_v2._C")

from lamella.runner_v2.ops.host_pack import native_part, native_parts, pack_matrices, pack_matrix  # noqa: E402
from lamella.runner_v2.quant.gguf_blocks import dequantise, random_blocks  # noqa: E402
from lamella.runner_v2.quant.scheme import FORMATS  # noqa: E402
from lamella.runner_v2.weights.slots import RawPart  # noqa: E402

ROWS = (1, 2, 3, 5, 7, 8, 12, 13, 30, 201)


@pytest.fixture(params=_C.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _C.isa()
    _C.set_isa(request.param)
    yield request.param
    _C.set_isa(before)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = _C.num_threads()
    _C.set_num_threads(request.param)
    yield request.param
    _C.set_num_threads(before)


def make_part(format: str, rows: int, cols: int, seed: int = 0, key: str = "layers.0.o") -> RawPart:
    """A matrix with entries of about 0.05."""
    f = FORMATS[format]
    rng = np.random.default_rng(seed)
    if f.quantised:
        blocks = random_blocks(f, rows * cols // f.block_len, 0.05, rng)
        data = torch.from_numpy(blocks.reshape(rows, -1))
    else:
        data = torch.from_numpy(rng.normal(0, 0.05, (rows, cols))).to(getattr(torch, format))
    return RawPart(key, f, (rows, cols), data)


def dense(part: RawPart) -> torch.Tensor:
    return dequantise(part.data, part.format).double()


def rounded(x: torch.Tensor) -> torch.Tensor:
    """x as the kernels see it behind quantised weights: 8 bits in groups of 32."""
    groups = x.view(x.shape[0], -1, 32)
    most = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(most > 1e-30, 127.0 / most, torch.zeros(()))
    codes = torch.round(groups * inverse).clamp(-127, 127)
    return (codes.double() * (most * np.float32(1 / 127)).double()).view(x.shape)


def product(parts: list[RawPart], x: torch.Tensor) -> torch.Tensor:
    return torch.cat([(rounded(x) if p.format.quantised else x.double()) @ dense(p).T for p in parts], dim=1)


def run(parts: list[RawPart], x: torch.Tensor) -> torch.Tensor:
    handle = _C.Linear(native_parts(pack_matrices(parts)))
    out = torch.full((x.shape[0], handle.rows), torch.nan)
    _C.linear(x, handle, out)
    return out


def inputs(rows: int, cols: int, seed: int = 1) -> torch.Tensor:
    """Rows of different sizes, some values far out."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator) * torch.rand(rows, 1, generator=generator)
    x[:, ::37] *= 20
    return x


@pytest.mark.parametrize("format", FORMATS)
def test_equals_float64(format: str, isa: str) -> None:
    """Odd numbers of rows and panels, few and many rows of activations."""
    part = make_part(format, 83, 512)
    x = inputs(201, 512)
    expected = product([part], x)
    scale = expected.abs().amax()
    for rows in ROWS:
        out = run([part], x[:rows])
        assert float((out.double() - expected[:rows]).abs().max() / scale) < 3e-6, rows


@pytest.mark.parametrize("format", FORMATS)
def test_a_row_gets_the_same_bits_in_any_company(format: str, isa: str, threads: int) -> None:
    part = make_part(format, 70, 768)
    x = inputs(201, 768)
    alone = torch.cat([run([part], x[i : i + 1]) for i in range(0, 201, 10)])
    for rows in ROWS:
        out = run([part], x[201 - rows :])
        for i in range(0, 201, 10):
            if i >= 201 - rows:
                assert torch.equal(out[i - 201 + rows], alone[i // 10]), (rows, i)


@pytest.mark.parametrize("format", [name for name, f in FORMATS.items() if f.quantised])
def test_packing_is_exact(format: str) -> None:
    """What the table looks up is, bit for bit, what gguf dequantises."""
    part = make_part(format, 41, 512)
    table = _C.Table(native_part(pack_matrix(part)), 1.0)
    out = torch.empty(41, 512)
    _C.embed(torch.arange(41, dtype=torch.int32), table, out)
    expected = dequantise(part.data, part.format)
    torch.testing.assert_close(out, expected, rtol=2e-7, atol=1e-7)
    assert torch.equal(out, expected) or format.startswith(("q4_k", "q5_k"))


@pytest.mark.parametrize("format", ["float32", "float16", "bfloat16"])
def test_dense_packing_is_exact(format: str) -> None:
    part = make_part(format, 17, 37)
    out = torch.empty(17, 37)
    _C.embed(torch.arange(17, dtype=torch.int32), _C.Table(native_part(pack_matrix(part)), 1.0), out)
    assert torch.equal(out, part.data.float())


@pytest.mark.parametrize("format", ["float32", "bfloat16"])
def test_dense_widths_need_no_multiple(format: str, isa: str) -> None:
    part = make_part(format, 19, 37)
    x = inputs(30, 37)
    expected = product([part], x)
    for rows in (1, 7, 30):
        torch.testing.assert_close(run([part], x[:rows]).double(), expected[:rows], rtol=1e-4, atol=1e-6)


def test_parts_of_different_formats_stand_side_by_side(isa: str, threads: int) -> None:
    parts = [
        make_part("q4_1", 40, 256, 0, "layers.0.q"),
        make_part("q6_k", 24, 256, 1, "layers.0.k"),
        make_part("float16", 9, 256, 2, "layers.0.v"),
    ]
    bias = RawPart("layers.0.k_bias", FORMATS["float16"], (24,), torch.randn(24).half())
    x = inputs(30, 256)
    expected = product(parts, x)
    expected[:, 40:64] += bias.data.double()
    for rows in (1, 30):
        torch.testing.assert_close(run([*parts, bias], x[:rows]).double(), expected[:rows], rtol=1e-4, atol=1e-4)


def test_strided_rows(isa: str) -> None:
    part = make_part("q8_0", 32, 64)
    x = inputs(4, 128)
    assert torch.equal(run([part], x[:, 64:]), run([part], x[:, 64:].clone()))


@pytest.mark.parametrize("format", ["float32", "q4_1", "q6_k", "q8_0"])
def test_a_bad_row_fails_alone(format: str, isa: str) -> None:
    part = make_part(format, 32, 256)
    x = inputs(14, 256)
    expected = run([part], x)
    x[3, 5], x[7, 200] = torch.nan, torch.inf
    out = run([part], x)
    assert torch.isnan(out[3]).all()
    assert not torch.isfinite(out[7]).any()
    others = [i for i in range(14) if i not in (3, 7)]
    assert torch.equal(out[others], expected[others])


def test_zeros_and_tiny_values(isa: str) -> None:
    part = make_part("q4_0", 16, 64)
    x = torch.zeros(2, 64)
    x[1, 3] = 1e-38
    out = run([part], x)
    assert torch.equal(out[0], torch.zeros(16))
    assert float(out[1].abs().max()) < 1e-36


def test_extreme_codes(isa: str) -> None:
    """The largest codes against the largest activations: sums of products must not saturate."""
    x = torch.ones(13, 512)
    x[::2] = -1.0
    for format, scales in (("q8_0", 1), ("q4_0", 1), ("q5_1", 2), ("q6_k", 0)):
        f = FORMATS[format]
        blocks = np.full((16 * 512 // f.block_len, f.block_bytes), 0xFF, dtype=np.uint8)
        half = np.float16(0.01).view(np.uint16)
        place = 208 if format == "q6_k" else 0
        for i in range(max(scales, 1)):
            blocks[:, place + 2 * i : place + 2 * i + 2] = np.frombuffer(half.tobytes(), np.uint8)
        part = RawPart("layers.0.o", f, (16, 512), torch.from_numpy(blocks.reshape(16, -1)))
        torch.testing.assert_close(run([part], x).double(), product([part], x), rtol=1e-5, atol=1e-4)


def test_no_rows() -> None:
    part = make_part("q4_1", 32, 64)
    assert run([part], torch.empty(0, 64)).shape == (0, 32)


def test_wrong_shapes_are_named() -> None:
    handle = _C.Linear(native_parts(pack_matrices([make_part("q4_1", 32, 64)])))
    with pytest.raises(ValueError, match="x: has shape"):
        _C.linear(torch.zeros(1, 32), handle, torch.zeros(1, 32))
    with pytest.raises(ValueError, match="out: is float64"):
        _C.linear(torch.zeros(1, 64), handle, torch.zeros(1, 32, dtype=torch.float64))
    with pytest.raises(ValueError, match="no instruction set"):
        _C.set_isa("mmx")


def test_logits_cap_and_norm(isa: str, threads: int) -> None:
    part = make_part("q8_0", 100, 64)
    norm = torch.rand(64) + 0.5
    hidden = inputs(201, 64)
    head = _C.Head(native_part(pack_matrix(part)), norm, 1e-5, 3.0)
    out = torch.empty(201, 100)
    _C.logits(hidden, head, out)
    normed = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-5) * norm
    expected = 3 * torch.tanh(normed.double() @ dense(part).T / 3)
    assert float((out - expected).abs().max()) < 0.05
    one = torch.empty(1, 100)
    _C.logits(hidden[200:], head, one)
    assert torch.equal(one[0], out[200])
