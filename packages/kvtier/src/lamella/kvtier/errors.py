"""Errors a user of kvtier can meet. A broken invariant is an AssertionError instead.

KvTierError                 base
├── LayoutError             groups that cannot work together, or a kind this version does not keep
├── CapacityError           fewer blocks, or less memory, than is needed; the message gives both figures
├── TierConfigError         a --kv-tier text, or its Python form, that says nothing sensible
└── ExternalManagerError    an external manager that cannot be imported or made
"""


class KvTierError(Exception):
    """Base of every error kvtier raises on purpose."""


class LayoutError(KvTierError):
    """Groups that cannot work together, or a kind that is not kept."""


class CapacityError(KvTierError):
    """Fewer blocks, or less memory, than is needed."""


class TierConfigError(KvTierError):
    """A text or value that describes no tiers; the message names it, what is wrong and what would do."""


class ExternalManagerError(KvTierError):
    """An external manager that cannot be imported or made."""
