"""Drawn tokens follow the distribution that the definitions give: chi-squared over 100,000 draws."""

import math

import numpy as np
import pytest
import torch

from lamella.runner_v2.sampling.params import RowParams
from lamella.runner_v2.sampling.rows import LogitsRows
from lamella.runner_v2.sampling.sampler import Sampler
from lamella.runner_v2.testing import sampling_oracle as oracle

VOCAB = 32
NUM_ROWS = 2000
NUM_STEPS = 50


PARAMS = {
    "plain": RowParams(1.0),
    "cool": RowParams(0.6),
    "top-k": RowParams(1.3, top_k=20),
    "top-p": RowParams(1.0, top_p=0.9),
    "min-p": RowParams(0.9, min_p=0.05),
    "all": RowParams(1.2, top_k=20, top_p=0.8, min_p=0.02),
}


# the reference is slow, and test_kernels.py shows that both give the same ids
CASES = [("torch", "plain"), ("torch", "all"), *(("host", name) for name in PARAMS)]


@pytest.mark.parametrize(("kernels", "name"), CASES, indirect=["kernels"])
def test_draws_follow_the_distribution(kernels, name):
    """One set of logits; the draws differ by seed (rows) and by position (steps)."""
    params = PARAMS[name]
    rng = np.random.default_rng(5)
    x = (rng.standard_normal(VOCAB) * 1.5).astype(np.float32)
    sampler = Sampler(VOCAB, NUM_ROWS, "cpu", kernels=kernels)
    for row in range(NUM_ROWS):
        sampler.add(row, RowParams(params.temperature, params.top_k, params.top_p, params.min_p, seed=row), [1], [])
    logits = torch.from_numpy(x).expand(NUM_ROWS, VOCAB).contiguous()
    counts = np.zeros(VOCAB)
    for step in range(NUM_STEPS):
        layout = LogitsRows.of(np.arange(NUM_ROWS, dtype=np.int32), np.full(NUM_ROWS, step, np.int32))
        counts += np.bincount(sampler.sample(logits, layout).ids.numpy(), minlength=VOCAB)

    kept = oracle.kept(x.tolist(), params)
    weights = np.array([math.exp(float(x[i]) / params.temperature) for i in kept])
    expected = weights / weights.sum() * NUM_ROWS * NUM_STEPS
    assert counts.sum() == counts[kept].sum()
    rare = expected < 20
    seen = np.append(counts[kept][~rare], counts[kept][rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum() + 1e-9)
    chi2 = float(((seen - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    assert chi2 < freedom + 4 * math.sqrt(2 * freedom)


def test_successive_positions_and_neighbouring_seeds_are_independent(kernels):
    """Pairs of draws fill the square evenly: (position, position + 1), (seed, seed + 1)."""
    n, num_steps = 8, 30
    sampler = Sampler(n, 2000, "cpu", kernels=kernels)
    for row in range(2000):
        sampler.add(row, RowParams(1.0, seed=row), [1], [])
    rows = np.arange(2000, dtype=np.int32)
    draws = np.stack([
        sampler.sample(torch.zeros(2000, n), LogitsRows.of(rows, np.full(2000, step, np.int32))).ids.numpy()
        for step in range(num_steps)
    ])  # [step, seed]  # fmt: skip
    for a, b in ((draws[:-1:2], draws[1::2]), (draws[:, :-1:2], draws[:, 1::2])):
        pairs = np.bincount((a * n + b).ravel(), minlength=n * n)
        expected = pairs.sum() / n**2
        chi2 = float(((pairs - expected) ** 2 / expected).sum())
        assert chi2 < n * n - 1 + 4 * math.sqrt(2 * (n * n - 1))
