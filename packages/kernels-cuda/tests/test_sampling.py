import numpy as np
import pytest
import torch
from oracles import sampling as oracle

from lamella import kernels_cuda as kernels

pytestmark = pytest.mark.gpu


def check_sample(logits, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, salt=0, what="", use_rows=False):
    """Compares with the oracle, row by row. Parameters: one number, or one per row."""
    num = logits.shape[0]

    def column(value, dtype):
        return np.broadcast_to(np.asarray(value, dtype), (num,)).copy()

    t, k = column(temperature, np.float32), column(top_k, np.int32)
    p, m = column(top_p, np.float64), column(min_p, np.float64)
    generator = np.random.default_rng(num)
    seeds = generator.integers(-(2**63), 2**63, num, dtype=np.int64)
    positions = generator.integers(0, 2**20, num).astype(np.int32)
    rows = generator.permutation(num).astype(np.int32) if use_rows else np.arange(num, dtype=np.int32)

    def spread(values):  # entry rows[i] belongs to row i
        out = np.empty_like(values)
        out[rows] = values
        return torch.from_numpy(out).cuda()

    got = kernels.sample(
        logits,
        *(spread(x) for x in (t, k, p, m, seeds)),
        torch.from_numpy(positions).cuda(),
        rows=torch.from_numpy(rows).cuda() if use_rows else None,
        salt=salt,
        logprobs=True,
    )
    ids, states, logprobs = got.ids.tolist(), got.status.tolist(), got.logprobs.tolist()
    host = logits.float().cpu().numpy()
    for i in range(num):
        want, state, lead = oracle.sample(host[i], t[i], k[i], p[i], m[i], seeds[i], positions[i], salt)
        about = f"{what} row {i} of {list(logits.shape)} T={t[i]} k={k[i]} p={p[i]} min_p={m[i]}"
        assert states[i] == state, f"status {states[i]}, not {state}: {about}"
        assert ids[i] == want, (
            f"token {ids[i]} (x={host[i][ids[i]]}), not {want} (x={host[i][want]}, ahead by {lead}, best "
            f"{host[i].max()}): {about}"
        )
        if state:
            assert np.isnan(logprobs[i]), about
        else:
            expected = float(host[i][want]) - oracle.logsumexp(host[i])
            assert abs(logprobs[i] - expected) < 1e-4 * max(1, abs(expected)), f"{logprobs[i]} {expected} {about}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 2, 7, 33, 1000, 2047, 2049, 32000, 128256, 151937, 262144])
@pytest.mark.parametrize("num", [1, 5])
def test_every_rule(dtype, vocab_size, num):
    logits = (torch.randn(num, vocab_size, device="cuda") * 3).to(dtype)
    for temperature, k, p, m in [
        (0.0, 0, 1.0, 0.0),
        (1.0, 0, 1.0, 0.0),
        (0.7, 50, 0.95, 0.0),
        (1.0, 1, 1.0, 0.0),
        (1.3, 50, 1.0, 0.0),
        (1.0, 0, 0.9, 0.0),
        (1.0, 0, 1.0, 0.1),
        (0.8, 20, 0.8, 0.02),
        (2.0, 1500, 0.99, 0.0),
        (5.0, 5000, 0.5, 0.0),
        (1.0, 0, 1e-9, 0.0),
        (0.01, 0, 0.9, 0.0),
    ]:
        check_sample(logits, temperature, k, p, m, what=f"{dtype}")


@pytest.mark.parametrize("num", [17, 40, 300])
def test_mixed_rows(num):
    generator = np.random.default_rng(3)
    logits = torch.randn(num, 50257, device="cuda") * torch.rand(num, 1, device="cuda") * 10
    check_sample(
        logits,
        generator.choice([0.0, 0.5, 1.0, 2.0], num),
        generator.choice([0, 1, 40, 3000], num),
        generator.choice([1.0, 0.95, 0.3], num),
        generator.choice([0.0, 0.05], num),
        salt=1,
        use_rows=True,
    )


@pytest.mark.parametrize("num", [1, 20, 200])
@pytest.mark.parametrize(("k", "p"), [(0, 1.0), (50, 0.95), (0, 0.7), (5000, 1.0), (5000, 0.7)])
def test_ties(num, k, p):
    """Equal values in masses: all of them, or a handful of levels."""
    check_sample(torch.zeros(num, 70001, device="cuda"), 1.0, k, p, what="all equal")
    levels = torch.randint(0, 4, (num, 70001), device="cuda").float()
    check_sample(levels, 1.0, k, p, what="four levels")
    check_sample(torch.full((num, 70001), -0.0, device="cuda") * (levels - 1), 1.0, k, p, what="both zeros")


@pytest.mark.parametrize(("k", "p"), [(0, 1.0), (50, 0.95), (0, 0.7), (9000, 0.9)])
def test_masked_rows(k, p):
    logits = torch.randn(6, 128256, device="cuda")
    logits[0, 100:] = -torch.inf
    logits[1, :-3] = -torch.inf
    logits[2, ::2] = -torch.inf
    logits[3, 1:] = -torch.inf
    logits[4, ::3] = -torch.finfo(torch.float32).max
    logits[5, 64000:64100] += 100
    check_sample(logits, 1.0, k, p)
    check_sample(logits, 0.0, k, p)


def test_sorted_rows():
    """The best tokens side by side: few chunks hold them all."""
    logits = torch.linspace(10, -10, 128256, device="cuda").repeat(3, 1)
    logits[1] = logits[1].flip(0)
    for k, p in [(50, 0.95), (1000, 1.0), (0, 0.5)]:
        check_sample(logits, 1.0, k, p)


def test_rows_that_fail():
    logits = torch.randn(6, 32001, device="cuda")
    logits[0, 17] = torch.nan
    logits[1, 32000] = torch.inf
    logits[2] = -torch.inf
    logits[4, 0] = torch.nan
    logits[4, 5] = torch.inf
    for temperature, k in [(0.0, 0), (1.0, 0), (1.0, 50)]:
        check_sample(logits, temperature, k, 0.9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strided_and_unaligned_rows(dtype):
    wide = torch.full((9, 33003), torch.nan, device="cuda").to(dtype)
    for first in (1, 2, 3, 5):
        part = wide[:, first : first + 32003 - first]
        part.copy_(torch.randn(part.shape, device="cuda"))
        wide[:, first - 1] = torch.nan
        for k, p in [(0, 1.0), (50, 0.95), (0, 0.9)]:
            check_sample(part, 1.0, k, p, what=f"offset {first}")
        check_sample(part, 0.0, what=f"offset {first}")


def test_padding_rows_and_zero_rows():
    logits = torch.randn(3, 1000, device="cuda")
    logits[1] = torch.nan
    rows = torch.tensor([0, -1, 0], dtype=torch.int32, device="cuda")
    out = kernels.sample(logits, torch.zeros(1, device="cuda"), seeds=torch.zeros(1, dtype=torch.int64, device="cuda"),
                         positions=torch.zeros(3, dtype=torch.int32, device="cuda"), rows=rows)  # fmt: skip
    assert out.ids.tolist() == [int(logits[0].argmax()), 0, int(logits[2].argmax())]
    assert out.status.tolist() == [0, 0, 0]
    assert kernels.sample(logits[:0]).ids.shape == (0,)
    assert kernels.top_logprobs(logits[:0], 5).ids.shape == (0, 5)


def test_distribution():
    """Frequencies of 40,000 draws follow the softmax."""
    logits = torch.randn(1, 200, device="cuda").expand(40000, 200).contiguous()
    positions = torch.arange(40000, dtype=torch.int32, device="cuda")
    rows = torch.zeros(40000, dtype=torch.int32, device="cuda")
    ids = kernels.sample(
        logits, torch.ones(1, device="cuda"), seeds=torch.full((1,), 7, device="cuda"), positions=positions, rows=rows
    ).ids
    seen = torch.bincount(ids.long(), minlength=200).double() / 40000
    assert (seen - logits[0].double().softmax(-1)).abs().max() < 0.01


def test_beyond_2_31_elements():
    logits = torch.zeros(16400, 131072, dtype=torch.bfloat16, device="cuda")
    logits[-1, 99] = 1.0
    logits[-2, 131071] = 1.0
    assert kernels.sample(logits).ids[-3:].tolist() == [0, 131071, 99]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 40, 3001, 128256])
@pytest.mark.parametrize("num_best", [0, 1, 20, 1000])
def test_top_logprobs(dtype, vocab_size, num_best):
    num_best = min(num_best, vocab_size)
    logits = (torch.randn(4, vocab_size, device="cuda") * 4).to(dtype)
    if vocab_size > 40:
        logits[1] = 0.5
        logits[2, 10:] = -torch.inf
        logits[3] = logits[3].round()
    chosen = torch.randint(0, vocab_size, (4,), device="cuda", dtype=torch.int32)
    got = kernels.top_logprobs(logits, num_best, chosen)
    host = logits.float().cpu().numpy()
    for i in range(4):
        what = f"row {i} {dtype} V={vocab_size} n={num_best}"
        total = oracle.logsumexp(host[i])
        want = oracle.order(host[i])[:num_best]
        assert got.ids[i].tolist() == want.tolist(), what
        np.testing.assert_allclose(
            got.logprobs[i].cpu().numpy(), host[i][want] - total, rtol=1e-5, atol=1e-5, err_msg=what
        )
        x = host[i][int(chosen[i])]
        np.testing.assert_allclose(float(got.chosen[i]), x - total, rtol=1e-5, atol=1e-5, err_msg=what)
        assert int(got.ranks[i]) == int((host[i] >= x).sum()), what
    np.testing.assert_allclose(
        kernels.logsumexp(logits).cpu().numpy(), [oracle.logsumexp(x) for x in host], rtol=1e-6, atol=1e-5
    )


def test_top_logprobs_of_rows_that_fail():
    logits = torch.randn(3, 5000, device="cuda")
    logits[0, 4999], logits[1, 0], logits[2] = torch.nan, torch.inf, -torch.inf
    got = kernels.top_logprobs(logits, 5, torch.zeros(3, dtype=torch.int32, device="cuda"))
    assert got.logprobs.isnan().all()
    assert got.chosen.isnan().all()
    assert (got.ids == 0).all()
    assert torch.equal(kernels.logsumexp(logits)[1:].cpu(), torch.tensor([torch.inf, -torch.inf]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [5, 32000, 50257])
def test_penalties(dtype, vocab_size):
    logits = torch.randn(5, vocab_size + 3, device="cuda").to(dtype)[:, :vocab_size]
    counts = torch.randint(-8, 4, (3, vocab_size), device="cuda", dtype=torch.int32).clamp_min(0)
    in_prompt = np.random.default_rng(0).random((3, vocab_size)) < 0.1
    bits = np.packbits(np.pad(in_prompt, ((0, 0), (0, -vocab_size % 32))), axis=1, bitorder="little").view(np.int32)
    factors = torch.tensor([[1.3, 1.0, 0.8], [0.0, 0.7, 0.1], [0.0, -0.2, 0.4]], device="cuda")
    rows = torch.tensor([2, 0, -1, 1, 2], dtype=torch.int32, device="cuda")
    before = logits.float().cpu().numpy().copy()
    kernels.apply_penalties(
        logits, counts, prompt=torch.from_numpy(bits).cuda(), repetition=factors[0].contiguous(),
        frequency=factors[1].contiguous(), presence=factors[2].contiguous(), rows=rows,
    )  # fmt: skip
    after = logits.float().cpu().numpy()
    for i, row in enumerate(rows.tolist()):
        f = factors[:, row].double().cpu().numpy()
        want = before[i] if row < 0 else oracle.penalise(before[i], counts[row].cpu().numpy(), in_prompt[row], *f)
        tolerance = 1e-6 if dtype == torch.float32 else 1e-2
        np.testing.assert_allclose(after[i], want, rtol=tolerance, atol=tolerance, err_msg=f"row {i} -> {row}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [5, 1024, 128257])
def test_bitmask(dtype, vocab_size):
    logits = torch.randn(4, vocab_size, device="cuda").to(dtype)
    allowed = np.random.default_rng(0).random((3, vocab_size)) < 0.3
    words = np.packbits(np.pad(allowed, ((0, 0), (0, -vocab_size % 32))), axis=1, bitorder="little").view(np.int32)
    want = logits.clone()
    for mask, row in ((0, 3), (2, 1)):
        want[row, torch.from_numpy(~allowed[mask]).cuda()] = -torch.inf
    kernels.apply_bitmask(
        logits, torch.from_numpy(words).cuda(), rows=torch.tensor([3, -1, 1], dtype=torch.int32).cuda()
    )
    assert torch.equal(logits, want)


def test_wrong_arguments_are_named():
    logits = torch.randn(4, 100, device="cuda")
    ones = torch.ones(4, device="cuda")
    good = {
        "logits": logits, "temperature": ones, "top_k": ones.int(), "top_p": ones.double(), "min_p": ones.double(),
        "seeds": ones.long(), "positions": ones.int(),
    }  # fmt: skip
    kernels.sample(**good)
    for name, value in [
        ("logits", logits.double()), ("temperature", ones.double()), ("top_k", ones), ("top_p", ones),
        ("min_p", ones[:2]),
        ("seeds", ones.int()), ("positions", ones.long()), ("seeds", None), ("positions", None),
        ("workspace", torch.empty(8, dtype=torch.uint8, device="cuda")), ("ids", ones), ("rows", ones),
        ("logits", torch.randn(1, 300_000, device="cuda")),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=rf"^{name}:"):
            kernels.sample(**{**good, name: value})
    with pytest.raises(ValueError, match=r"^num_best:"):
        kernels.top_logprobs(logits, 101)
    with pytest.raises(ValueError, match=r"^words:"):
        kernels.apply_bitmask(logits, torch.zeros(4, 3, dtype=torch.int32, device="cuda"))
    with pytest.raises(ValueError, match=r"^counts:"):
        kernels.apply_penalties(logits, torch.zeros(4, 100, dtype=torch.int64, device="cuda"))
