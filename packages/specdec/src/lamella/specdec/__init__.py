"""Speculative decoding for any engine: drafters propose tokens, verification keeps what the target would have said.

Importing this package needs nothing but Python. The files of `lamella.specdec.verify` need torch (the extra `torch`),
but for `reference`, which says in plain Python what `greedy` and `one_hot` do.
"""

from lamella.specdec.batch import Computed, DraftBatch, Rows, Verdict
from lamella.specdec.config import (
    ArbitraryConfig,
    NetworkConfig,
    NgramConfig,
    SpeculativeConfig,
    SuffixConfig,
    parse_speculative_config,
)
from lamella.specdec.drafters.arbitrary import ArbitraryDrafter
from lamella.specdec.drafters.combined import CombinedDrafter
from lamella.specdec.drafters.ngram import NgramDrafter
from lamella.specdec.drafters.suffix import SuffixDrafter
from lamella.specdec.errors import ConfigError, InputError, SpecdecError
from lamella.specdec.length.adaptive import AdaptiveLength
from lamella.specdec.length.fixed import FixedLength
from lamella.specdec.protocols import Drafter, DrafterNeeds, DraftView
from lamella.specdec.rules import Rule
from lamella.specdec.speculation import Speculation, parse_speculation
from lamella.specdec.stats import AcceptanceStats, LengthStats

__all__ = [
    "AcceptanceStats",
    "AdaptiveLength",
    "ArbitraryConfig",
    "ArbitraryDrafter",
    "CombinedDrafter",
    "Computed",
    "ConfigError",
    "DraftBatch",
    "DraftView",
    "Drafter",
    "DrafterNeeds",
    "FixedLength",
    "InputError",
    "LengthStats",
    "NetworkConfig",
    "NgramConfig",
    "NgramDrafter",
    "Rows",
    "Rule",
    "SpecdecError",
    "Speculation",
    "SpeculativeConfig",
    "SuffixConfig",
    "SuffixDrafter",
    "Verdict",
    "parse_speculation",
    "parse_speculative_config",
]
