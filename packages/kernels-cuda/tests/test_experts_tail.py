import pytest
import torch
from oracles import layer as oracle
from poison import poisoned, relative_error

from lamella import kernels_cuda as kernels

pytestmark = pytest.mark.gpu
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1.2e-3}
QWEN3_30B = (4096, 2048, 768, 5120, 128, 8)  # attended, hidden, inner, qkv, experts, top_k


class Layer:
    def __init__(self, shape, dtype, spread=1.0):
        attended, hidden, inner, qkv, experts, self.top_k = shape
        self.shape, self.dtype = shape, dtype

        def weight(*sizes):
            return (torch.randn(*sizes, device="cuda") * sizes[-1] ** -0.5).to(dtype)

        self.w_o, self.w_qkv = weight(hidden, attended), weight(qkv, hidden)
        self.w13, self.w2 = weight(experts, 2 * inner, hidden), weight(experts, hidden, inner)
        self.router = weight(experts, hidden) * spread
        self.mlp_norm, self.next_norm = ((torch.rand(hidden, device="cuda") + 0.5).to(dtype) for _ in range(2))
        self.workspace = kernels.experts_tail_workspace(inner, experts, self.top_k)
        self.workspace[256:] = 0xFF

    def inputs(self, num_tokens):
        return [torch.randn(num_tokens, width, device="cuda").to(self.dtype) for width in self.shape[:2]]

    def run(self, attended, residual, closes=False, **options):
        rest = {} if closes else {"next_norm": self.next_norm, "w_qkv": self.w_qkv}
        return kernels.experts_tail(
            attended, self.w_o, residual, self.mlp_norm, self.router, self.w13, self.w2, self.top_k, self.workspace,
            eps=1e-5, **rest, **options,
        )  # fmt: skip

    def separate(self, attended, residual):
        """By kernels that have their own tests; for the choices of experts, in which roundings are not forgiven."""
        x = kernels.rms_norm(attended @ self.w_o.T, self.mlp_norm, 1e-5, residual=residual.clone())
        return kernels.moe_route(x @ self.router.T, self.top_k)

    def check(self, num_tokens, closes=False, renormalize=True):
        if kernels.experts_tail_rows(*self.shape) == 0:
            pytest.skip("the kernel is Hopper's")
        attended, residual = self.inputs(num_tokens)

        def choose(x):
            logits = (x @ self.router.double().T).to(self.dtype)
            # a choice by less than a rounding is not checked: other tokens are
            top = logits.float().sort(-1, descending=True).values
            sure.append(top[:, self.top_k - 1] - top[:, self.top_k] > 0.02)
            return kernels.moe_route(logits, self.top_k, renormalize=renormalize)

        sure = []
        stream, qkv = oracle.experts_tail(
            attended, self.w_o, residual, self.mlp_norm, choose, self.w13, self.w2, 1e-5, self.next_norm, self.w_qkv
        )
        sure = sure[0] if num_tokens else torch.zeros(0, dtype=torch.bool, device="cuda")
        out = None if closes else poisoned(num_tokens, self.shape[3], dtype=self.dtype)
        found = self.run(attended, residual, closes, qkv=out, renormalize=renormalize)
        what = f"{self.shape} {self.dtype} of {num_tokens} tokens, {int(sure.sum())} sure"
        assert sure.sum() >= num_tokens // 2, what
        assert relative_error(residual[sure], stream[sure]) < TOLERANCE[self.dtype], what
        if closes:
            assert found is None
        else:
            assert found.data_ptr() == out.data_ptr()
            assert relative_error(out[sure], qkv[sure]) < TOLERANCE[self.dtype], what
            assert out.isfinite().all()


@pytest.fixture(scope="module")
def qwen():
    torch.manual_seed(0)
    return Layer(QWEN3_30B, torch.bfloat16, 8.0)


@pytest.mark.parametrize("num_tokens", range(9))
def test_numbers_of_tokens(qwen, num_tokens):
    qwen.check(num_tokens)
    qwen.check(num_tokens, closes=True, renormalize=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape",
    [
        (256, 256, 256, 16, 16, 1),
        (512, 1024, 512, 2048, 64, 6),
        (1024, 512, 2560, 512, 32, 2),
        (4096, 4096, 256, 1024, 256, 8),
        (2048, 2048, 1536, 3072, 48, 4),
    ],
    ids=str,
)
@pytest.mark.parametrize("num_tokens", [1, 3, 8])
def test_sizes(shape, num_tokens, dtype):
    Layer(shape, dtype, 8.0).check(num_tokens)


def test_tokens_that_choose_the_same(qwen):
    """One expert serves several, in other places of their choices."""
    attended, residual = qwen.inputs(1)
    attended, residual = attended.repeat(8, 1), residual.repeat(8, 1)
    attended[4:] *= 1.01
    alone = residual[:1].clone()
    expected = qwen.run(attended[:1], alone)
    qkv = qwen.run(attended, residual)
    for i in range(4):
        assert torch.equal(qkv[i], expected[0])
        assert torch.equal(residual[i], alone[0])


def test_a_token_does_not_depend_on_the_others(qwen):
    attended, residual = qwen.inputs(8)
    attended[3], residual[5] = torch.nan, torch.inf
    alone = []
    for i in range(8):
        stream = residual[i : i + 1].clone()
        alone.append((qwen.run(attended[i : i + 1], stream)[0], stream[0]))
    for num_tokens in (2, 5, 8):
        stream = residual[:num_tokens].clone()
        qkv = qwen.run(attended[:num_tokens], stream)
        for i in set(range(num_tokens)) - {3, 5}:
            assert torch.equal(qkv[i], alone[i][0])
            assert torch.equal(stream[i], alone[i][1])
    assert qkv[3].isnan().all()
    assert qkv[[0, 1, 2, 4, 6]].isfinite().all()


def test_the_same_bits_every_time_and_in_a_graph(qwen):
    attended, residual = qwen.inputs(5)

    def steps(stream):
        x = attended
        for _ in range(12):
            qkv = qwen.run(x, stream, prefetch=qwen.w_o)
            x = qkv[:, : qwen.shape[0]]
        return qkv

    eager = residual.clone()
    expected = steps(eager)
    for _ in range(20):
        assert torch.equal(steps(residual.clone()), expected)
    stream = residual.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream.copy_(residual)
        qkv = steps(stream)
    for _ in range(50):
        graph.replay()
    assert torch.equal(qkv, expected)
    assert torch.equal(stream, eager)


def test_choices_are_those_of_separate_kernels(qwen):
    """With a router that is sure: what differs is a rounding of the normed stream."""
    attended, residual = qwen.inputs(8)
    ids, weights = qwen.separate(attended, residual)
    x = kernels.rms_norm(attended @ qwen.w_o.T, qwen.mlp_norm, 1e-5, residual=(stream := residual.clone()))
    expected = stream.double() + kernels.fused_moe(x, qwen.w13, qwen.w2, ids, weights).double()
    qwen.run(attended, residual, closes=True)
    errors = (residual.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.median() < 8e-3
    assert (errors < 8e-3).sum() >= 4


def test_what_does_not_fit_is_named(qwen):
    attended, residual = qwen.inputs(9)
    with pytest.raises(ValueError, match=r"^attended: has 9 rows .* takes 8"):
        qwen.run(attended, residual)
    attended, residual = qwen.inputs(2)
    with pytest.raises(ValueError, match="^residual: "):
        qwen.run(attended, residual[:1])
    with pytest.raises(ValueError, match="^top_k: is 0 of 128 experts"):
        kernels.experts_tail(
            attended, qwen.w_o, residual, qwen.mlp_norm, qwen.router, qwen.w13, qwen.w2, 0, qwen.workspace
        )
    with pytest.raises(ValueError, match="^workspace: has "):
        kernels.experts_tail(
            attended, qwen.w_o, residual, qwen.mlp_norm, qwen.router, qwen.w13, qwen.w2, 8, qwen.workspace[:4096]
        )
    assert kernels.experts_tail_rows(4096, 2048, 768, 5120, 128, 9) == 0
    assert kernels.experts_tail_rows(4096, 2048, 768, 5120, 512, 8) == 0
