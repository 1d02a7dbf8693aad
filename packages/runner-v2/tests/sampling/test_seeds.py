"""The noise: known answers, agreement with the definition, range and distribution."""

import math

import numpy as np
import pytest
import torch

from lamella.runner_v2.sampling import seeds
from lamella.runner_v2.testing import sampling_oracle as oracle

# From the test vectors of the paper's authors (Random123): counter, key, output.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def as_key(seed: int) -> torch.Tensor:
    return torch.from_numpy(np.array([seeds.key_of(seed)], np.uint64).view(np.int64))


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_known_answers(counter, key, words):
    packed = key[1] << 32 | key[0]
    found = seeds.philox(as_key(packed), *(torch.tensor([c]) for c in counter))
    assert tuple(int(w) for w in found) == words
    assert tuple(oracle.philox_words(counter, packed)) == words


def test_noise_is_that_of_the_definition():
    rng = np.random.default_rng(0)
    for seed in (0, 1, -1, 2**63 - 1, -(2**63), *rng.integers(-(2**63), 2**63, 20).tolist()):
        ids = torch.from_numpy(rng.integers(0, 200_000, 16))
        position = int(rng.integers(0, 2**20))
        found = seeds.gumbel(as_key(seed), torch.tensor([position]), ids, seeds.SALT_TARGET)
        expected = [oracle.noise(seed, position, i) for i in ids.tolist()]
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-14, atol=1e-14)


def test_log_is_accurate_over_the_whole_range():
    x = torch.cat([
        1.0 - torch.logspace(-10, -0.0001, 400, dtype=torch.float64),
        torch.logspace(-10, 2, 400, dtype=torch.float64),
        torch.tensor([0.5, 1.0, 2.0, 2.0**-33, 1 - 2.0**-33], dtype=torch.float64),
    ])  # fmt: skip
    expected = [math.log(v) for v in x.tolist()]
    np.testing.assert_allclose(seeds.log(x).numpy(), expected, rtol=5e-16, atol=1e-300)


def test_noise_reaches_its_bounds_and_no_further():
    for word, bound in ((0, seeds.GUMBEL_MAX), (2**32 - 1, -3.2)):
        u = (torch.tensor([word], dtype=torch.float64) + 0.5) * 2.0**-32
        g = float(-seeds.log(-seeds.log(1.0 - u)))
        assert math.isfinite(g)
        assert abs(g - bound) < 0.1
        assert g <= seeds.GUMBEL_MAX


def test_noise_differs_by_salt_position_token_and_seed():
    key, position, token = as_key(7), torch.tensor([3]), torch.tensor([11])
    base = float(seeds.gumbel(key, position, token, seeds.SALT_TARGET))
    others = [
        seeds.gumbel(key, position, token, seeds.SALT_DRAFT),
        seeds.gumbel(key, position + 1, token, seeds.SALT_TARGET),
        seeds.gumbel(key, position, token + 1, seeds.SALT_TARGET),
        seeds.gumbel(as_key(8), position, token, seeds.SALT_TARGET),
        seeds.gumbel(as_key(7 | 1 << 40), position, token, seeds.SALT_TARGET),
    ]
    assert all(float(o) != base for o in others)


def test_uniforms_are_uniform_and_open():
    positions = torch.arange(200_000)
    u = seeds.uniforms(as_key(5), positions, seeds.SALT_ACCEPT).numpy()
    assert u.min() > 0.0
    assert u.max() < 1.0
    counts = np.histogram(u, bins=100, range=(0, 1))[0]
    chi2 = float(((counts - 2000) ** 2 / 2000).sum())
    assert chi2 < 99 + 4 * math.sqrt(2 * 99)
