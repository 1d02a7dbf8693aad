"""Kernel sets against the definitions, and against one another to the last bit."""

import math

import numpy as np
import pytest
import torch

from lamella.runner_v2.sampling.choice import Choice
from lamella.runner_v2.sampling.host import HostKernels, pick_kernels
from lamella.runner_v2.sampling.kernels import TorchKernels
from lamella.runner_v2.sampling.masks import RowMasks
from lamella.runner_v2.sampling.params import RowParams
from lamella.runner_v2.sampling.penalties import PenaltyEntries
from lamella.runner_v2.sampling.rows import INFINITE, NONE_ALLOWED, NOT_A_NUMBER, OK
from lamella.runner_v2.testing import sampling_oracle as oracle

native = pick_kernels("cpu").name == "host"
needs_native = pytest.mark.skipif(not native, reason="no native module")
INF = math.inf


@pytest.fixture(params=["generic", "avx2", "avx512", "avx512vnni"])
def isa(request):
    """The native kernels on one instruction set."""
    if not native:
        pytest.skip("no native module")
    from lamella.runner_v2 import _C

    if request.param not in _C.isas():
        pytest.skip(f"this machine has no {request.param}")
    before = _C.isa()
    _C.set_isa(request.param)
    yield request.param
    _C.set_isa(before)


def choice_of(params: list[RowParams], positions: list[int], vocab_size: int) -> Choice:
    temperature = np.array([0.0 if p.greedy else p.temperature for p in params], np.float32)
    with np.errstate(divide="ignore"):
        inverse = np.where(temperature > 0, np.float32(1) / temperature, 0).astype(np.float32)
    return Choice(
        temperature,
        inverse,
        np.array([math.log(p.min_p) if p.min_p > 0 else -INF for p in params]),
        np.array([p.top_k if p.top_k < vocab_size else 0 for p in params], np.int32),
        np.array([p.top_p for p in params]),
        np.array([p.seed % 2**64 for p in params], np.uint64),
        np.array(positions, np.int32),
    )


def random_params(rng: np.random.Generator, vocab_size: int) -> RowParams:
    return RowParams(
        temperature=float(np.float32(rng.choice([0.0, 1e-3, 0.3, 1.0, 2.5, 50.0]))),
        top_k=int(rng.choice([0, 0, 1, 2, 20, 50, vocab_size - 1, vocab_size, vocab_size + 1])),
        top_p=float(rng.choice([1.0, 1.0, 1e-6, 0.1, 0.5, 0.9, 0.99, 0.9999999])),
        min_p=float(rng.choice([0.0, 0.0, 1e-30, 0.05, 0.5, 1.0])),
        seed=int(rng.integers(-(2**63), 2**63)),
    )


def logits_of(kind: str, rng: np.random.Generator, num_rows: int, vocab_size: int) -> torch.Tensor:
    """Logits of a kind that has broken samplers."""
    x = rng.standard_normal((num_rows, vocab_size)) * rng.choice([0.1, 1.0, 5.0, 30.0], (num_rows, 1))
    if kind == "ties":
        x = np.round(x)
    elif kind == "two values":
        x = np.where(x > 0, 1.0, -1.0)
    elif kind == "one value":
        x = np.zeros_like(x) - 0.0
        x[:, ::2] = -0.0
    elif kind == "masked":
        x[rng.random(x.shape) < 0.7] = -INF
    elif kind == "one token":
        x = np.full_like(x, -INF)
        x[np.arange(num_rows), rng.integers(0, vocab_size, num_rows)] = -50.0
    elif kind == "huge":
        x = x / np.abs(x).max() * 3.3e38
    elif kind == "tiny":
        x = x * 1e-42
    elif kind == "peaked":
        x[np.arange(num_rows), rng.integers(0, vocab_size, num_rows)] += 200.0
    elif kind == "broken":
        x[0, vocab_size // 2] = math.nan
        x[1] = -INF
        x[2, vocab_size - 1] = INF
        x[3] = math.nan
        x[4, 0], x[4, -1] = INF, math.nan
    return torch.from_numpy(x.astype(np.float32))


KINDS = ["normal", "ties", "two values", "one value", "masked", "one token", "huge", "tiny", "peaked", "broken"]


class TestSameBits:
    """The native kernels give the ids of the reference."""

    @pytest.mark.parametrize("kind", KINDS)
    def test_choose(self, isa, kind):
        rng = np.random.default_rng(KINDS.index(kind))
        for vocab_size in (1, 2, 17, 63, 64, 65, 257, 1000, 4099):
            logits = logits_of(kind, rng, 24, vocab_size)
            params = [random_params(rng, vocab_size) for _ in range(24)]
            choice = choice_of(params, rng.integers(0, 2**20, 24).tolist(), vocab_size)
            expected_ids, expected_status = TorchKernels().choose(logits.clone(), choice)
            before = logits.clone()
            ids, status = HostKernels().choose(logits, choice)
            assert torch.equal(status, expected_status)
            wrong = (ids != expected_ids).nonzero().flatten().tolist()
            assert not wrong, [(vocab_size, params[i], int(ids[i]), int(expected_ids[i])) for i in wrong]
            assert torch.equal(logits.nan_to_num(), before.nan_to_num()), "choosing changes no logits"
            greedy_ids, greedy_status = HostKernels().greedy(logits)
            assert torch.equal(greedy_status, status)
            assert torch.equal(greedy_ids, TorchKernels().greedy(logits)[0])

    @pytest.mark.parametrize("spread", [0.0, 0.3, 1.0, 4.0])
    def test_choose_in_a_large_vocabulary(self, isa, spread):
        """Wide nuclei and large k: the search narrows down over many passes."""
        vocab_size = 50_257
        rng = np.random.default_rng(3)
        x = rng.standard_normal((8, vocab_size)) * spread
        x[4:] = np.round(x[4:] * 8) / 8
        logits = torch.from_numpy(x.astype(np.float32))
        params = [
            RowParams(0.8, top_k=k, top_p=p, min_p=m, seed=i)
            for i, (k, p, m) in enumerate([
                (5000, 1.0, 0.0), (0, 0.95, 0.0), (30_000, 0.5, 0.0), (0, 0.999, 1e-3),
                (5000, 1.0, 0.0), (0, 0.95, 0.0), (30_000, 0.5, 0.0), (700, 0.9, 1e-3),
            ])
        ]  # fmt: skip
        choice = choice_of(params, [9] * 8, vocab_size)
        assert torch.equal(HostKernels().choose(logits, choice)[0], TorchKernels().choose(logits, choice)[0])

    @pytest.mark.parametrize("kind", KINDS)
    def test_logprobs(self, isa, kind):
        rng = np.random.default_rng(KINDS.index(kind))
        for vocab_size in (1, 2, 65, 1000):
            logits = logits_of(kind, rng, 24, vocab_size)
            rows = rng.permutation(24).astype(np.int32)[:20]
            given = torch.from_numpy(rng.integers(0, vocab_size, 20).astype(np.int32))
            for k in {0, 1, min(7, vocab_size), vocab_size}:
                a = TorchKernels().logprobs(logits, rows, given, k)
                b = HostKernels().logprobs(logits, rows, given, k)
                good = ~a.chosen.isnan()
                assert torch.equal(good, ~b.chosen.isnan())
                assert torch.equal(a.ranks[good], b.ranks[good])
                assert torch.equal(a.best_ids[good], b.best_ids[good])
                torch.testing.assert_close(a.chosen[good], b.chosen[good], atol=2e-6, rtol=1e-6)
                torch.testing.assert_close(a.best[good], b.best[good], atol=2e-6, rtol=1e-6)

    def test_edits(self, isa):
        rng = np.random.default_rng(1)
        for vocab_size in (31, 32, 33, 1000):
            logits = torch.from_numpy(rng.standard_normal((6, vocab_size)).astype(np.float32))
            num_ids = [3, 0, 20]
            entries = PenaltyEntries(
                np.array([4, 1, 0], np.int32),
                np.concatenate(([0], np.cumsum(num_ids))).astype(np.int64),
                np.concatenate([rng.permutation(vocab_size)[:n] for n in num_ids]).astype(np.int32),
                rng.integers(0, 4, sum(num_ids)).astype(np.int32),
                np.array([1.0, 1.3, 0.7], np.float32),
                np.array([0.0, 0.1, -0.3], np.float32),
                np.array([1.7, 0.0, 0.2], np.float32),
            )
            words = rng.integers(-(2**31), 2**31, (2, -(-vocab_size // 32))).astype(np.int32)
            words[0, 0] = -1
            masks = RowMasks(np.array([5, 2], np.int32), words)
            expected, found = logits.clone(), logits.clone()
            for kernels, x in ((TorchKernels(), expected), (HostKernels(), found)):
                kernels.penalise(x, entries)
                kernels.mask(x, masks)
            assert torch.equal(found, expected)
            assert torch.equal(found[3], logits[3])

    def test_a_slice_of_wider_rows(self, isa):
        wide = torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
        narrow = wide[::2, 40:241]
        params = [RowParams(1.0, top_k=9, seed=i) for i in range(3)]
        choice = choice_of(params, [1, 2, 3], 201)
        assert torch.equal(HostKernels().choose(narrow, choice)[0], TorchKernels().choose(narrow.clone(), choice)[0])


class TestDefinition:
    """Every kernel set against the oracle."""

    @pytest.mark.parametrize("kind", ["normal", "ties", "two values", "masked", "one token", "peaked"])
    def test_choose(self, kernels, kind):
        rng = np.random.default_rng(10 + KINDS.index(kind))
        for vocab_size in (1, 5, 64, 97):
            logits = logits_of(kind, rng, 40, vocab_size)
            logits[logits.isneginf().all(dim=-1), 0] = 0.0
            params = [random_params(rng, vocab_size) for _ in range(40)]
            positions = rng.integers(0, 5000, 40).tolist()
            ids, status = kernels.choose(logits, choice_of(params, positions, vocab_size))
            assert not status.any()
            for x, p, position, token_id in zip(logits.tolist(), params, positions, ids.tolist()):
                assert token_id in oracle.choices(x, p, position), (vocab_size, p)

    def test_exactly_k_of_equal_tokens(self, kernels):
        """The lowest ids among equals stay, no more and no fewer than k."""
        logits = torch.tensor([[0.0, 1.0, 1.0, 1.0, 1.0, 2.0, 1.0]]).repeat(400, 1)
        params = [RowParams(1.0, top_k=4, seed=s) for s in range(400)]
        ids, _ = kernels.choose(logits, choice_of(params, [0] * 400, 7))
        assert set(ids.tolist()) == {1, 2, 3, 5}

    def test_nucleus_ends_at_the_token_that_reaches_p(self, kernels):
        """Four equal tokens: p = 0.5 is reached by two, one hair more takes a third."""
        logits = torch.zeros(400, 4)
        for p, kept in ((0.5, {0, 1}), (0.5001, {0, 1, 2}), (1e-9, {0}), (0.75, {0, 1, 2}), (0.7501, {0, 1, 2, 3})):
            params = [RowParams(1.0, top_p=p, seed=s) for s in range(400)]
            ids, _ = kernels.choose(logits, choice_of(params, [0] * 400, 4))
            assert set(ids.tolist()) == kept

    def test_nucleus_is_of_what_top_k_left(self, kernels):
        """Three of four equal tokens: 0.66 of them are two, where 0.66 of all would be three."""
        params = [RowParams(1.0, top_k=3, top_p=0.66, seed=s) for s in range(300)]
        ids, _ = kernels.choose(torch.zeros(300, 4), choice_of(params, [0] * 300, 4))
        assert set(ids.tolist()) == {0, 1}

    def test_min_p_comes_before_the_nucleus(self, kernels):
        """Masses 1, 1, 0.4, 0.4 .. (20): min-p 0.5 leaves two, of which p = 0.4 is one."""
        logits = torch.full((300, 22), math.log(0.4))
        logits[:, 3] = logits[:, 7] = 0.0
        params = [RowParams(1.0, top_p=0.4, min_p=0.5, seed=s) for s in range(300)]
        ids, _ = kernels.choose(logits, choice_of(params, [0] * 300, 22))
        assert set(ids.tolist()) == {3}

    def test_lowest_id_of_equal_scores(self, kernels):
        logits = torch.full((1, 300), 2.0)
        logits[0, :7] = -1.0
        assert kernels.greedy(logits)[0].tolist() == [7]

    def test_status(self, kernels):
        nan = math.nan
        logits = torch.tensor([[0.0, 1.0], [nan, 1.0], [1.0, nan], [INF, 1.0], [-INF, -INF], [INF, nan], [-INF, 0.0]])
        expected = [OK, NOT_A_NUMBER, NOT_A_NUMBER, INFINITE, NONE_ALLOWED, NOT_A_NUMBER, OK]
        for params in (RowParams(0.0), RowParams(1.0, top_k=1)):
            ids, status = kernels.choose(logits.clone(), choice_of([params] * 7, [0] * 7, 2))
            assert status.tolist() == expected
            assert ids.tolist() == [1, 0, 0, 0, 0, 0, 1]

    def test_no_rows(self, kernels):
        logits = torch.empty(0, 11)
        ids, status = kernels.choose(logits, choice_of([], [], 11))
        assert ids.shape == status.shape == (0,)
        assert kernels.greedy(logits)[0].shape == (0,)

    def test_logprobs(self, kernels):
        rng = np.random.default_rng(2)
        logits = torch.from_numpy((rng.standard_normal((5, 97)) * 6).astype(np.float32))
        logits[1] = logits[1].round()
        logits[2, ::3] = -INF
        rows = np.array([3, 1, 2], np.int32)
        given = torch.tensor([5, 96, 1], dtype=torch.int32)
        found = kernels.logprobs(logits, rows, given, 97)
        for j, row in enumerate(rows.tolist()):
            x = logits[row].tolist()
            expected = oracle.logprobs(x)
            order = sorted(range(97), key=lambda i: (-x[i], i))
            assert found.best_ids[j].tolist() == order
            np.testing.assert_allclose(found.best[j].numpy(), [expected[i] for i in order], atol=2e-6)
            assert float(found.chosen[j]) == pytest.approx(expected[int(given[j])], abs=2e-6)
            assert int(found.ranks[j]) == sum(v >= x[int(given[j])] for v in x)
        assert torch.equal(kernels.logprobs(logits, rows, given, 4).best_ids, found.best_ids[:, :4])


@needs_native
class TestBorder:
    """What the native functions refuse."""

    def test_wrong_arguments(self):
        kernels = HostKernels()
        choice = choice_of([RowParams(1.0)] * 2, [0, 0], 8)
        with pytest.raises(ValueError, match="one number per row"):
            kernels.choose(torch.zeros(3, 8), choice)
        with pytest.raises(ValueError, match="float32"):
            kernels.greedy(torch.zeros(3, 8, dtype=torch.float64))
        with pytest.raises(ValueError, match="contiguous"):
            kernels.greedy(torch.zeros(8, 3).T)
        with pytest.raises(IndexError, match="token id 8"):
            kernels.logprobs(torch.zeros(3, 8), np.array([0], np.int32), torch.tensor([8], dtype=torch.int32), 1)
        one = np.ones(1, np.float32)
        ids = np.array([-1], np.int32)
        with pytest.raises(IndexError, match="token id -1"):
            kernels.penalise(
                torch.zeros(3, 8), PenaltyEntries(np.zeros(1, np.int32), np.array([0, 1]), ids, ids, one, one, one)
            )
