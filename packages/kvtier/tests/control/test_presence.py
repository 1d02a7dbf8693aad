from __future__ import annotations

from random import Random

import pytest

from lamella.kvtier.control.presence import PresenceBook


def key(n: int) -> bytes:
    return n.to_bytes(32, "little")


@pytest.mark.parametrize("seed", range(20))
def test_listed_is_what_hangs_on_listed(seed: int) -> None:
    """Random news about a random forest, against a set and a walk to the root."""
    rng = Random(seed)
    parents = {n: rng.choice([None, *range(max(0, n - 4), n)]) for n in range(40)}
    book, held = PresenceBook(chained=True), set[int]()

    def listed(n: int | None) -> bool:
        while n is not None:
            if n not in held:
                return False
            n = parents[n]
        return True

    for _ in range(300):
        n = rng.randrange(40)
        parent = parents[n]
        if rng.random() < 0.6:
            book.add(key(n), None if parent is None else key(parent))
            held.add(n)
        else:
            assert book.remove(key(n)) == (n in held)
            held.discard(n)
        book.check()
        assert set(book) == {key(n) for n in held if listed(n)}
        assert len(book) + book.num_waiting == len(held)
    book.clear()
    book.check()
    assert len(book) == 0


def test_match_is_a_search_among_whole_prefixes() -> None:
    keys = [key(n) for n in range(20)]
    for length in range(21):
        book = PresenceBook(chained=True)
        for n in range(length):
            book.add(keys[n], keys[n - 1] if n else None)
        for limit in range(21):
            assert book.match(keys, limit) == min(length, limit)


def test_blocks_that_hang_on_nothing() -> None:
    book = PresenceBook(chained=False)
    book.add(key(2), key(1))
    assert key(2) in book
    assert book.remove(key(2))
    assert not book.remove(key(2))
    book.check()
