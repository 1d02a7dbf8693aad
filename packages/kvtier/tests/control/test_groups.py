from __future__ import annotations

import itertools

from lamella.kvtier import Group
from lamella.kvtier.control.groups import GroupBlocks, longest_match
from lamella.kvtier.control.kinds import make_group

KEYS = [bytes([n]) * 32 for n in range(6)]


def group(window: int | None, held: tuple[bool, ...], size: int = 2) -> GroupBlocks:
    kind = "full" if window is None else "sliding"
    books = make_group(0, Group("g", kind, size, 1, window=window), 10)  # type: ignore[arg-type]
    for n, present in enumerate(held):
        if present:
            block = books.pool.take(1)[0]
            books.pool.seal(block)
            books.index.add(KEYS[n], None, block)
    return books


def expected(windows: tuple[int | None, ...], held: tuple[tuple[bool, ...], ...], limit: int, size: int = 2) -> int:
    for hit in range(limit, 0, -1):
        if all(
            all(mine[n] for n in range(0 if w is None else max(0, hit * size - w + 1) // size, hit))
            for w, mine in zip(windows, held)
        ):
            return hit
    return 0


def test_one_group_finds_the_longest_readable_prefix() -> None:
    for window in (None, 1, 2, 3, 4, 5, 8, 20):
        for held in itertools.product((False, True), repeat=6):
            if window is None and list(held) != sorted(held, reverse=True):
                continue  # a full group holds whole prefixes only, and searches
            books = group(window, held)
            for limit in range(7):
                assert longest_match([books], KEYS, limit) == expected((window,), (held,), limit), (window, held, limit)


def test_several_groups_agree_on_the_longest_common_prefix() -> None:
    windows = (None, 3, 5)
    patterns = [(True,) * 6, (True, True, True, False, True, True), (False, True, True, True, False, True)]
    patterns += [(True, True, False, True, True, False), (True, False, True, True, True, True), (False,) * 6]
    prefixes = [tuple(n < length for n in range(6)) for length in (0, 2, 5, 6)]
    for held in itertools.product(prefixes, patterns, patterns):
        books = [group(w, h) for w, h in zip(windows, held)]
        for order in itertools.permutations(range(3)):
            found = longest_match([books[n] for n in order], KEYS, 6)
            assert found == expected(windows, held, 6), (held, order)
