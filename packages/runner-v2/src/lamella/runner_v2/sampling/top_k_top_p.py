"""Top-k and top-p on tokens in order (larger logit first, lower id first among equals).

Top-k keeps exactly the first k. Top-p then keeps the shortest prefix whose mass reaches p · Z, where Z is the mass of
all that min-p and top-k left; the first token always stays.

The mass of a token is an integer: floor(2^s · exp((x - x_best) / T)), with exp by a fixed float32 polynomial and s such
that the masses of a whole vocabulary add up to at most 2^53. So float64 sums are exact in any order, and the reference
(sort and cumulate) and the native kernel (threshold search) cut at the same token.
"""

from __future__ import annotations

import torch

_LOG2_E = 1.4426950408889634
_LN2_HIGH = 0.693359375  # 9 bits: n · _LN2_HIGH is exact in float32
_LN2_LOW = -2.12194440e-4
_COEFFICIENTS = (1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0)


def mass_bits(vocab_size: int) -> int:
    """s: the mass of the best token is 2^s."""
    return 53 - vocab_size.bit_length()


def clamp_of(bits: int) -> float:
    """Exponents below it have no mass: it is 2^-(bits + 1.4), well under the rounding."""
    return -(bits + 1.4) * 0.6931471805599453


def mass(
    logits: torch.Tensor,  # [n, m] float32, no NaN
    best: torch.Tensor,  # [n, 1] float32, finite, >= every logit of the row
    inverse_temperature: torch.Tensor,  # [n, 1] float32
    bits: int,
) -> torch.Tensor:  # [n, m] float64, integers in [0, 2^bits]
    """Integer mass of each token. Every operation below is a single IEEE float32 operation.

    exp(d) = 2^n · exp(r) with n = round(d / ln 2). Below the clamp the mass is 0 and n stays small.
    """
    d = torch.clamp((logits - best) * inverse_temperature, min=clamp_of(bits))
    n = torch.round(d * _f32(_LOG2_E, d))
    r = (d - n * _f32(_LN2_HIGH, d)) - n * _f32(_LN2_LOW, d)
    value = torch.full_like(r, _COEFFICIENTS[0])
    for c in _COEFFICIENTS[1:]:
        value = value * r + _f32(c, d)
    scale = ((n.to(torch.int32) + (bits + 127)) << 23).view(torch.float32)
    return torch.floor(value * scale).double()


def prefix_of_mass(masses: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Which of the tokens, given in order, top-p keeps. masses [n, m] float64 (0 where dropped already), top_p [n, 1]
    float64."""
    upto = masses.cumsum(dim=-1)
    return upto - masses < top_p * upto[:, -1:]


def _f32(value: float, like: torch.Tensor) -> torch.Tensor:
    """A constant rounded to float32, so that no operation widens it."""
    return torch.tensor(value, dtype=torch.float32, device=like.device)
