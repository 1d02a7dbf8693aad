"""Cosine and sine tables of every kind of rotary embedding.

Computed once per RopeConfig, in float32 as the models' own code does, because an angle at a late position magnifies
what is rounded differently.

inv_i = theta^(-2i / d) is the angle per position of pair i. Kinds that depend on the length of the text (dynamic,
longrope) take the longest one that this runner serves: cached keys cannot be rotated again.
"""

from __future__ import annotations

import math

import torch

from lamella.runner_v2.config import RopeConfig
from lamella.runner_v2.errors import ConfigError
from lamella.runner_v2.ops.rotary import RopeTable


def make_table(rope: RopeConfig, head_dim: int, max_position: int, max_len: int, device: str = "cpu") -> RopeTable:
    """The table for positions [0, max_position). max_len: longest text that is served."""
    width = head_dim if rope.rotary_dim is None else rope.rotary_dim
    try:
        inverse, factor = _KINDS[rope.kind](rope, width, max_len)
    except (ArithmeticError, ValueError) as error:  # of a logarithm, a power or a quotient
        raise ConfigError(f"{_named(rope)} cannot be computed: {error}") from error
    if rope.freq_factors is not None:
        inverse = inverse / _divisors(rope.freq_factors, width)
    angles = torch.outer(torch.arange(max_position, dtype=torch.float32), inverse)
    cos, sin = angles.cos() * factor, angles.sin() * factor
    if not bool((cos[-1] + sin[-1]).isfinite().all()):  # the largest angles
        raise ConfigError(f"{_named(rope)} gives angles that are no finite numbers")
    return RopeTable(cos.to(device), sin.to(device))


def _named(rope: RopeConfig) -> str:
    return f"the rotary embedding of type {rope.kind} with theta {rope.theta} and factor {rope.factor}"


def _inverse(theta: float, width: int) -> torch.Tensor:  # [width / 2]
    exponents = torch.arange(0, width, 2, dtype=torch.int64).float() / width
    return 1.0 / torch.pow(torch.tensor(theta, dtype=torch.float32), exponents)


def _default(rope: RopeConfig, width: int, max_len: int) -> tuple[torch.Tensor, float]:
    return _inverse(rope.theta, width), 1.0


def _linear(rope: RopeConfig, width: int, max_len: int) -> tuple[torch.Tensor, float]:
    return _inverse(rope.theta, width) / rope.factor, 1.0


def _dynamic(rope: RopeConfig, width: int, max_len: int) -> tuple[torch.Tensor, float]:
    """NTK: a larger theta for texts longer than the original context."""
    original = _original(rope)
    if max_len <= original:
        return _inverse(rope.theta, width), 1.0
    stretch = rope.factor * max_len / original - (rope.factor - 1)
    return _inverse(rope.theta * stretch ** (width / (width - 2)), width), 1.0


def _llama3(rope: RopeConfig, width: int, max_len: int) -> tuple[torch.Tensor, float]:
    """Long wavelengths are stretched, short ones kept, those between blended."""
    inverse, original = _inverse(rope.theta, width), _original(rope)
    wavelength = 2 * math.pi / inverse
    blend = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * inverse / rope.factor + blend * inverse
    is_long = wavelength > original / rope.low_freq_factor
    is_short = wavelength < original / rope.high_freq_factor
    return torch.where(is_long, inverse / rope.factor, torch.where(is_short, inverse, blended)), 1.0


def _yarn(rope: RopeConfig, width: int, max_len: int) -> tuple[torch.Tensor, float]:
    """Fast pairs are kept, slow ones stretched, with a linear ramp between the two bounds."""
    original = _original(rope)

    def pair_of(rotations: float) -> float:
        """The pair that turns so often within the original context."""
        return width * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001
    kept = 1 - ((torch.arange(width // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    inverse = _inverse(rope.theta, width)
    return inverse / rope.factor * (1 - kept) + inverse * kept, _yarn_factor(rope)


def _yarn_factor(rope: RopeConfig) -> float:
    def scale(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


def _longrope(rope: RopeConfig, width: int, max_len: int) -> tuple[torch.Tensor, float]:
    """A divisor per pair, one set for texts within the original context and one for longer ones."""
    original = _original(rope)
    divisors = _divisors(rope.long_factor if max_len > original else rope.short_factor, width)
    factor = rope.attention_factor
    if factor is None:
        factor = 1.0 if rope.factor <= 1 else math.sqrt(1 + math.log(rope.factor) / math.log(original))
    return _inverse(rope.theta, width) / divisors, factor


def _divisors(factors: tuple[float, ...] | None, width: int) -> torch.Tensor:  # [width / 2]
    if factors is None or len(factors) != width // 2:
        given = 0 if factors is None else len(factors)
        raise ConfigError(f"rotary factors: {width // 2} are needed, one per rotating pair, {given} are given")
    return torch.tensor(factors, dtype=torch.float32)


def _original(rope: RopeConfig) -> int:
    if rope.original_max_position is None:
        raise ConfigError(f"rope type {rope.kind} needs original_max_position_embeddings")
    return rope.original_max_position


_KINDS = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
