"""Speculative decoding for any engine: drafters propose tokens, verification keeps what the target would have said.

Importing this package needs nothing but Python. The files of `lamella.specdec.verify` need torch (the extra `torch`),
but for `reference`, which says in plain Python what `greedy` and `one_hot` do.
"""

from lamella.specdec.batch import DraftBatch, Rows, Verdict
from lamella.specdec.config import NgramConfig, SpeculativeConfig, SuffixConfig, parse_speculative_config
from lamella.specdec.drafters.ngram import NgramDrafter
from lamella.specdec.drafters.suffix import SuffixDrafter
from lamella.specdec.errors import ConfigError, InputError, SpecdecError
from lamella.specdec.length.adaptive import AdaptiveLength
from lamella.specdec.length.fixed import FixedLength
from lamella.specdec.protocols import Drafter, DrafterNeeds, DraftView
from lamella.specdec.stats import AcceptanceStats

__all__ = [
    "AcceptanceStats",
    "AdaptiveLength",
    "ConfigError",
    "DraftBatch",
    "DraftView",
    "Drafter",
    "DrafterNeeds",
    "FixedLength",
    "InputError",
    "NgramConfig",
    "NgramDrafter",
    "Rows",
    "SpecdecError",
    "SpeculativeConfig",
    "SuffixConfig",
    "SuffixDrafter",
    "Verdict",
    "parse_speculative_config",
]
