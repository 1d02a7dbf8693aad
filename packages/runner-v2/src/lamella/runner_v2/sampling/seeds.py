"""Noise as a pure function of (seed, position, token id, salt): the same on every path, in any batch, at any row.

Philox4x32-10 with key = the row's 64-bit seed (low word, high word) and counter = (position, token id, salt, 0); the
first of its four words, h, gives

    u = (h + 1/2) / 2^32            in (0, 1): all 32 bits count where u is small, and there G is large
    G = -log(-log1p(-u))            standard Gumbel noise

in float64. The logarithm is spelled out in additions, multiplications and divisions, which IEEE 754 rounds the same way
everywhere, so that the torch reference and the native kernel agree to the last bit whatever math library they link.
"""

from __future__ import annotations

import torch

SALT_TARGET = 0
"""Noise of the tokens that are emitted."""
SALT_DRAFT = 1
"""Noise of tokens that a drafter draws."""
SALT_ACCEPT = 2
"""Uniforms that decide whether a draft stands."""

GUMBEL_MAX = 22.8739
"""No noise exceeds it: u >= 2^-33."""

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

_LN2_HIGH = 0.6931471803691238  # 33 bits of ln 2, so that exponent · _LN2_HIGH is exact
_LN2_LOW = 1.9082149292705877e-10
_SQRT_HALF = 0.7071067811865476
_LOG_TERMS = 11


def key_of(seed: int) -> int:
    """The 64-bit key of a seed, as an unsigned number; negative seeds count from 2^64 down."""
    return seed & 0xFFFFFFFFFFFFFFFF


def philox(
    keys: torch.Tensor,  # int64, the bits of an unsigned 64-bit key
    c0: torch.Tensor,  # int64 in [0, 2^32), broadcast against keys
    c1: torch.Tensor,
    c2: torch.Tensor | int,
    c3: torch.Tensor | int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The four 32-bit words of Philox4x32-10, each as int64 in [0, 2^32)."""
    k0, k1 = keys & _WORD, (keys >> 32) & _WORD
    words: tuple[torch.Tensor | int, ...] = (c0, c1, c2, c3)
    for _ in range(_ROUNDS):
        # int64 products wrap modulo 2^64, which leaves the right bits; >> is arithmetic, hence the masks
        even, odd = words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]
        words = (
            ((odd >> 32) & _WORD) ^ words[1] ^ k0,
            odd & _WORD,
            ((even >> 32) & _WORD) ^ words[3] ^ k1,
            even & _WORD,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    w0, w1, w2, w3 = (torch.as_tensor(w) for w in words)
    return w0, w1, w2, w3


def gumbel(keys: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor, salt: int) -> torch.Tensor:
    """Gumbel noise in float64 of int64 tensors that broadcast against one another."""
    bits = philox(keys, positions, token_ids, salt)[0]
    u = (bits.to(torch.float64) + 0.5) * 2.0**-32
    return -log(-log(1.0 - u))  # 1 - u is exact: u has 33 bits


def uniforms(keys: torch.Tensor, positions: torch.Tensor, salt: int) -> torch.Tensor:
    """One float64 in (0, 1) per (key, position), apart from the noise of every token id."""
    bits = philox(keys, positions, torch.full_like(positions, _WORD), salt)[0]
    return (bits.to(torch.float64) + 0.5) * 2.0**-32


def log(x: torch.Tensor) -> torch.Tensor:
    """Natural logarithm of positive normal float64, within 2 ulp and the same bits on every machine.

    x = m · 2^e with m in [sqrt 1/2, sqrt 2), s = (m - 1) / (m + 1), log m = 2 s + s · Σ 2 s^2n / (2n + 1).
    """
    m, exponent = torch.frexp(x)
    low = m < _SQRT_HALF
    m = torch.where(low, m * 2.0, m)
    e = exponent.to(torch.float64) - low.to(torch.float64)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    series = torch.full_like(z, 2.0 / (2 * _LOG_TERMS + 1))
    for n in range(_LOG_TERMS - 1, 0, -1):
        series = series * z + 2.0 / (2 * n + 1)
    return e * _LN2_HIGH + (2.0 * s + (s * (z * series) + e * _LN2_LOW))
