import pytest
import torch
from oracles import layer as oracle
from poison import poisoned, relative_error

from lamella import kernels_cuda as kernels

pytestmark = pytest.mark.gpu
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1.2e-3}
"""Sums of another order round to a neighbour at the borders between the products."""
LLAMA_8B = (4096, 4096, 14336, 6144)  # attended, hidden, inner, qkv


class Layer:
    def __init__(self, shape, dtype):
        attended, hidden, inner, qkv = shape
        self.shape, self.dtype = shape, dtype

        def weight(rows, width):
            return (torch.randn(rows, width, device="cuda") * width**-0.5).to(dtype)

        self.w_o, self.w_gate_up = weight(hidden, attended), weight(2 * inner, hidden)
        self.w_down, self.w_qkv = weight(hidden, inner), weight(qkv, hidden)
        self.mlp_norm, self.next_norm = ((torch.rand(hidden, device="cuda") + 0.5).to(dtype) for _ in range(2))
        self.workspace = kernels.layer_tail_workspace(inner)
        self.workspace[256:] = 0xFF

    def inputs(self, num_tokens):
        return [torch.randn(num_tokens, width, device="cuda").to(self.dtype) for width in self.shape[:2]]

    def run(self, attended, residual, closes=False, **options):
        rest = {} if closes else {"next_norm": self.next_norm, "w_qkv": self.w_qkv}
        return kernels.layer_tail(
            attended, self.w_o, residual, self.mlp_norm, self.w_gate_up, self.w_down, self.workspace, eps=1e-5,
            **rest, **options,
        )  # fmt: skip

    def expected(self, attended, residual):
        return oracle.tail(
            attended, self.w_o, residual, self.mlp_norm, self.w_gate_up, self.w_down, 1e-5, self.next_norm, self.w_qkv
        )

    def check(self, num_tokens, closes=False, **options):
        if kernels.layer_tail_rows(*self.shape) == 0:
            pytest.skip("the kernel is Hopper's")
        attended, residual = self.inputs(num_tokens)
        stream, qkv = self.expected(attended, residual)
        out = None if closes else poisoned(num_tokens, self.shape[3], dtype=self.dtype)
        found = self.run(attended, residual, closes, qkv=out, **options)
        what = f"{self.shape} {self.dtype} of {num_tokens} tokens"
        assert relative_error(residual, stream) < TOLERANCE[self.dtype], what
        if closes:
            assert found is None
        else:
            assert found.data_ptr() == out.data_ptr()
            assert relative_error(out, qkv) < TOLERANCE[self.dtype], what


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    return Layer(LLAMA_8B, torch.bfloat16)


@pytest.mark.parametrize("num_tokens", range(9))
def test_numbers_of_tokens(llama, num_tokens):
    llama.check(num_tokens)
    llama.check(num_tokens, closes=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape",
    [
        (512, 512, 512, 16),
        (512, 1024, 3072, 4096),
        (2048, 1024, 3072, 4096),
        (4096, 2560, 9728, 6144),
        (3584, 3584, 18944, 4608),
        (1024, 4096, 1536, 6144),
    ],
    ids=str,
)
@pytest.mark.parametrize("num_tokens", [1, 3, 8])
def test_widths(shape, num_tokens, dtype):
    layer = Layer(shape, dtype)
    layer.check(num_tokens, prefetch=layer.w_o)


def test_a_token_does_not_depend_on_the_others(llama):
    attended, residual = llama.inputs(8)
    attended[3], residual[5] = torch.nan, torch.inf
    alone = []
    for i in range(8):
        stream = residual[i : i + 1].clone()
        alone.append((llama.run(attended[i : i + 1], stream), stream))
    for num_tokens in (2, 5, 8):
        stream = residual[:num_tokens].clone()
        qkv = llama.run(attended[:num_tokens], stream)
        for i in range(num_tokens):
            assert torch.equal(qkv[i].view(torch.int16), alone[i][0][0].view(torch.int16)) or i in (3, 5)
            assert torch.equal(stream[i].view(torch.int16), alone[i][1][0].view(torch.int16)) or i in (3, 5)
    assert qkv[3].isnan().all()
    assert qkv[[0, 1, 2, 4, 6]].isfinite().all()


def test_the_same_bits_every_time(llama):
    attended, residual = llama.inputs(7)
    first = residual.clone()
    qkv = llama.run(attended, first)
    for _ in range(200):
        stream = residual.clone()
        assert torch.equal(llama.run(attended, stream), qkv)
        assert torch.equal(stream, first)


def test_many_behind_each_other_in_a_graph(llama):
    """Each takes what the one before wrote, and starts loading before that one ends."""
    attended, residual = llama.inputs(4)

    def steps(stream):
        x = attended
        for _ in range(12):
            qkv = llama.run(x, stream, prefetch=llama.w_o)
            x = qkv[:, : llama.shape[0]]
        return qkv

    eager = residual.clone()
    expected = steps(eager)
    stream = residual.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream.copy_(residual)
        qkv = steps(stream)
    for _ in range(50):
        graph.replay()
    assert torch.equal(qkv, expected)
    assert torch.equal(stream, eager)


def test_strided_rows(llama):
    attended, residual = llama.inputs(7)
    wide = [poisoned(7, 2 * width, dtype=torch.bfloat16) for width in LLAMA_8B[:2]]
    views = [both[:, : both.shape[1] // 2] for both in wide]
    for view, tensor in zip(views, (attended, residual), strict=True):
        view.copy_(tensor)
    out = poisoned(7, 3 * 6144, dtype=torch.bfloat16)
    expected = llama.run(attended, residual)
    assert torch.equal(llama.run(*views, qkv=out[:, 6144:12288]), expected)
    assert torch.equal(views[1], residual)
    assert out[:, :6144].isnan().all()
    assert out[:, 12288:].isnan().all()
    assert all(both[:, both.shape[1] // 2 :].isnan().all() for both in wide)


def test_what_does_not_fit_is_named(llama):
    attended, residual = llama.inputs(9)
    with pytest.raises(ValueError, match=r"^attended: has 9 rows .* takes 8"):
        llama.run(attended, residual)
    attended, residual = llama.inputs(2)
    with pytest.raises(ValueError, match="^residual: "):
        llama.run(attended, residual[:1])
    with pytest.raises(ValueError, match="^next_norm: is needed with w_qkv"):
        kernels.layer_tail(
            attended, llama.w_o, residual, llama.mlp_norm, llama.w_gate_up, llama.w_down, llama.workspace,
            w_qkv=llama.w_qkv,
        )  # fmt: skip
    with pytest.raises(ValueError, match="^workspace: has "):
        kernels.layer_tail(
            attended, llama.w_o, residual, llama.mlp_norm, llama.w_gate_up, llama.w_down, llama.workspace[:4096]
        )
    assert kernels.layer_tail_rows(4096, 8192, 28672, 10240) == 0
    assert kernels.layer_tail_rows(4096, 4096, 14000, 6144) == 0
