"""Rules by which drafts that were chosen are kept, by the names that `rejection_sample_method` gives them. No torch.

    standard     a draft stands if the target samples it            exact: the target's law, seeded output id for id
    typical      … or its probability is typical of the target      lossy
    relaxed      … or it is among the target's best few             lossy
    threshold    … or its probability, scaled up, wins a coin       lossy
    synthetic    by given rates, whatever the target says           garbage, for measuring

Lossy rules keep every draft that `standard` keeps, and more. They have to be asked for by name and are named wherever
figures or answers are shown. Temperature 0 leaves them nothing to add: all of the target's law is on one id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from lamella.specdec.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Standard:
    """A draft stands if it is what the target samples at its position."""

    name: ClassVar[str] = "standard"
    exact: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Synthetic:
    """A draft stands by chance. rates[i]: probability that the first i + 1 drafts of a row all stand."""

    name: ClassVar[str] = "synthetic"
    exact: ClassVar[bool] = False

    rates: tuple[float, ...]

    def __post_init__(self) -> None:
        """Raises ConfigError naming the rate that is no probability or above the one before it."""
        conditional_rates(self.rates)


@dataclass(frozen=True, slots=True)
class Typical:
    """Also stands what the target gives more than min(threshold, alpha · exp(-H)), H being its entropy in nats.

    The rule of Cai et al., "Medusa" (2024), §3.3.1.
    """

    name: ClassVar[str] = "typical"
    exact: ClassVar[bool] = False

    posterior_threshold: float = 0.09
    posterior_alpha: float = 0.3

    def __post_init__(self) -> None:
        _share("posterior_threshold", self.posterior_threshold)
        _share("posterior_alpha", self.posterior_alpha)


@dataclass(frozen=True, slots=True)
class Relaxed:
    """Also stands what is among the target's `relaxed_topk` likeliest ids, of a log-probability at most `relaxed_delta`
    below the likeliest one's. TensorRT-LLM's relaxed acceptance, over the whole output."""

    name: ClassVar[str] = "relaxed"
    exact: ClassVar[bool] = False

    relaxed_topk: int
    relaxed_delta: float

    def __post_init__(self) -> None:
        if not 2 <= self.relaxed_topk <= MAX_RELAXED_TOPK:
            raise ConfigError(f"relaxed_topk must be in [2, {MAX_RELAXED_TOPK}], got {self.relaxed_topk}")
        if not 0.0 < self.relaxed_delta <= MAX_RELAXED_DELTA:
            raise ConfigError(f"relaxed_delta must be in (0, {MAX_RELAXED_DELTA}], got {self.relaxed_delta}")


@dataclass(frozen=True, slots=True)
class Threshold:
    """Stands with probability min(1, p / accept_threshold_acc), and in any case where p >= accept_threshold_single.

    SGLang's thresholds; both at 1 would be `standard`.
    """

    name: ClassVar[str] = "threshold"
    exact: ClassVar[bool] = False

    accept_threshold_single: float = 1.0
    accept_threshold_acc: float = 1.0

    def __post_init__(self) -> None:
        _share("accept_threshold_single", self.accept_threshold_single)
        _share("accept_threshold_acc", self.accept_threshold_acc)
        if self.accept_threshold_single == self.accept_threshold_acc == 1.0:
            raise ConfigError(
                "accept_threshold_single and accept_threshold_acc are both 1, which is the standard rule: lower one "
                "of them, or leave rejection_sample_method out"
            )


MAX_RELAXED_TOPK = 1024
MAX_RELAXED_DELTA = 1000.0

LossyRule = Typical | Relaxed | Threshold
Rule = Standard | Synthetic | LossyRule
STANDARD = Standard()


def rates_of_length(length: float, num_drafts: int) -> list[float]:
    """Synthetic rates of so many drafts that make steps of `length` tokens on average, the next token included.

    They are 1 for the first drafts, then the fraction, then 0. Raises ConfigError unless 1 <= length <= num_drafts + 1.
    """
    if not 1.0 <= length <= num_drafts + 1:
        raise ConfigError(
            f"synthetic_acceptance_length must be in [1, {num_drafts + 1}] with {num_drafts} drafts, got {length}"
        )
    return [min(1.0, max(0.0, length - 1 - i)) for i in range(num_drafts)]


def conditional_rates(rates: Sequence[float]) -> list[float]:
    """Probability that each draft stands behind accepted ones. Raises ConfigError for rates that cannot be."""
    before = 1.0
    conditional = []
    for i, rate in enumerate(rates):
        if not 0.0 <= rate <= before:
            raise ConfigError(f"synthetic_acceptance_rates[{i}] must be in [0, {before}], got {rate}")
        conditional.append(rate / before if before else 0.0)
        before = rate
    return conditional


def _share(name: str, value: float) -> None:
    if not 0.0 < value <= 1.0:
        raise ConfigError(f"{name} must be in (0, 1], got {value}")
