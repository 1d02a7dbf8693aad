"""A target model whose distribution behind every prefix is known exactly."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from fractions import Fraction


class ScriptedModel:
    """Rational probabilities behind every prefix of token ids, fixed by a seed; no state.

    vocab_size ids; each gets a weight of 0 to 7, so that ids with probability 0 and ties occur. `memory` ids of the
    prefix matter (None: all).
    """

    def __init__(self, vocab_size: int, seed: int = 0, memory: int | None = None) -> None:
        self.vocab_size = vocab_size
        self._seed = seed
        self._memory = memory

    def probs(self, prefix: Sequence[int]) -> list[Fraction]:  # [vocab_size]
        """The distribution of the id behind `prefix`; sums to exactly 1."""
        seen = list(prefix if self._memory is None else prefix[max(0, len(prefix) - self._memory) :])
        weights = [_number("weight", self._seed, token_id, *seen) % 8 for token_id in range(self.vocab_size)]
        if not any(weights):
            weights[_number("one", self._seed, *seen) % self.vocab_size] = 1
        return [Fraction(weight, sum(weights)) for weight in weights]

    def best(self, prefix: Sequence[int]) -> int:
        """The most probable id behind `prefix`; the lowest of equal ones."""
        probs = self.probs(prefix)
        return probs.index(max(probs))

    def sample(self, prefix: Sequence[int], seed: int) -> int:
        """An id drawn from probs(prefix) with noise that depends on (seed, position) alone."""
        noise = Fraction(_number("noise", seed, len(prefix)), 2**64)
        for token_id, prob in enumerate(self.probs(prefix)):
            noise -= prob
            if noise < 0:
                return token_id
        raise AssertionError("probabilities sum to less than 1")


def _number(*parts: object) -> int:
    """64 bits that depend on the parts and nothing else."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")
