"""Errors a user of this package can meet.

SpecdecError        base
├── ConfigError     an option of the speculative config is unknown, unsupported or out of range; the message names it
└── InputError      what a drafter was shown cannot be: a negative token id, a row that became shorter
"""


class SpecdecError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(SpecdecError, ValueError):
    """An option is unknown, unsupported or out of range."""


class InputError(SpecdecError, ValueError):
    """What a drafter was shown cannot be."""
