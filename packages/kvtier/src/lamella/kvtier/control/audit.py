"""Every invariant of the books, as assertions. Walks all blocks and tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from lamella.kvtier.control.groups import GroupBlocks
from lamella.kvtier.control.pool import FILLING, SEALED
from lamella.kvtier.control.states import States
from lamella.kvtier.keys import Key, KeyChain
from lamella.kvtier.layout import NULL_BLOCK


class Books(Protocol):
    """What the audit reads of a sequence."""

    chain: KeyChain | None
    caching: bool
    sealed: int
    tables: list[list[int]]
    left: list[int]
    states: States | None


def audit(groups: Sequence[GroupBlocks], holdings: Mapping[int, Books]) -> None:
    """Raise AssertionError where the books disagree."""
    for group in groups:
        group.pool.check()
        group.index.check()
        assert not group.evicted
        _audit_references(group, holdings)
        _audit_index(group)
        if group.chained:
            _audit_order(group)
    for sequence, books in holdings.items():
        for group in groups[: len(books.tables)]:
            _audit_table(group, sequence, books)


def _audit_references(group: GroupBlocks, holdings: Mapping[int, Books]) -> None:
    """References = occurrences in tables."""
    refs = [0] * group.pool.num_blocks
    for sequence, books in holdings.items():
        if group.is_state:
            assert books.states is not None
            table = books.states.blocks(group.idx - len(books.tables))
            for block in books.states.live[group.idx - len(books.tables)]:
                assert group.pool.state[block] == FILLING, f"live state {block} is sealed"
        else:
            table = [block for block in books.tables[group.idx] if block != NULL_BLOCK]
        assert len(set(table)) == len(table), f"sequence {sequence} has a block twice in group {group.idx}"
        for block in table:
            refs[block] += 1
    assert refs == group.pool.refs, f"group {group.idx}: references differ from what tables hold"


def _audit_index(group: GroupBlocks) -> None:
    """What can be hit is sealed, and has at most one copy that nobody uses."""
    pool, index = group.pool, group.index
    candidates = pool.candidates()
    cached = [index.key_of(block) for block in candidates]
    assert None not in cached, "a block waits for a hit but has no key"
    assert len(set(cached)) == len(cached), "a key is cached twice"
    for key in index:
        for block in index.blocks(key):
            assert pool.state[block] == SEALED, f"block {block} can be hit but is not sealed"


def _audit_order(group: GroupBlocks) -> None:
    """Full groups: a prefix is reused only after everything that hangs on it, and never missing below a hit."""
    pool, index = group.pool, group.index
    rank: dict[int, float] = {block: n for n, block in enumerate(pool.candidates())}

    def last_moment(key: Key) -> float:
        return max(rank.get(block, math.inf) for block in index.blocks(key))

    for key in index:
        for block in index.blocks(key):
            parent = index.parent_of(block)
            if parent is None:
                continue
            assert parent in index, f"block {block} can be hit but its prefix cannot"
            mine = rank.get(block, math.inf)
            if mine < math.inf and not pool.pins[block]:
                assert last_moment(parent) > mine, f"the prefix of block {block} would be reused before it"


def _audit_table(group: GroupBlocks, sequence: int, books: Books) -> None:
    """Null blocks only left of the window; then sealed ones; then ones being filled that are nobody else's."""
    table, left = books.tables[group.idx], books.left[group.idx]
    pool, index = group.pool, group.index
    assert group.slides or left == 0
    for n, block in enumerate(table):
        where = f"sequence {sequence}, group {group.idx}, entry {n}, block {block}"
        assert (block == NULL_BLOCK) == (n < left), f"{where}: null blocks are [0, {left})"
        if block == NULL_BLOCK:
            continue
        if n < books.sealed:
            assert pool.state[block] == SEALED, f"{where}: not sealed, but {books.sealed} blocks are"
            if books.caching:
                assert books.chain is not None
                assert index.key_of(block) in (books.chain.keys[n], None), f"{where}: key of another content"
        else:
            assert pool.state[block] == FILLING, f"{where}: sealed beyond {books.sealed}"
            assert pool.refs[block] == 1, f"{where}: filled by one sequence but used by {pool.refs[block]}"
