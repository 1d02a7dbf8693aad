"""Errors a user of kvtier can meet. A broken invariant is an AssertionError instead.

KvTierError                 base
├── LayoutError             groups that cannot work together, or a kind this version does not keep
└── CapacityError           fewer blocks than the smallest use needs; the message gives both figures
"""


class KvTierError(Exception):
    """Base of every error kvtier raises on purpose."""


class LayoutError(KvTierError):
    """Groups that cannot work together, or a kind that is not kept."""


class CapacityError(KvTierError):
    """Fewer blocks than the smallest use needs."""
