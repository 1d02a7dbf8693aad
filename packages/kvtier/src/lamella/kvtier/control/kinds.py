"""Which books a kind of group has."""

from __future__ import annotations

from lamella.kvtier.control.groups import GroupBlocks, SlidingBlocks
from lamella.kvtier.control.states import StateBlocks
from lamella.kvtier.errors import LayoutError
from lamella.kvtier.layout import Group

KINDS: dict[str, type[GroupBlocks]] = {"full": GroupBlocks, "sliding": SlidingBlocks, "state": StateBlocks}


def make_group(idx: int, group: Group, num_blocks: int) -> GroupBlocks:
    """The books of one group, by its kind."""
    if group.kind not in KINDS:
        raise LayoutError(f"group {group.name}: kind {group.kind} is not kept by this version, only {', '.join(KINDS)}")
    return KINDS[group.kind](idx, group, num_blocks)
