"""Random traces like a scheduler's. A trace is a string of bytes, so that a failure shrinks to few of them."""

from __future__ import annotations

import random
from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from lamella.kvtier import Extras, Group, KeyChain, Layout, TierManager
from lamella.kvtier.control.pool import FILLING
from lamella.kvtier.testing.oracle import NaiveTiers

WINDOWS: list[tuple[int | None, ...]] = [(None,), (3,), (None, 5), (None, 1, 6), (4, 9), (None, None)]
SALTS = (None, "a")


class Row:
    """A sequence as the scheduler of a trace sees it."""

    def __init__(self, ids: list[int], salt: str | None, chain: KeyChain | None) -> None:
        self.ids = ids
        self.salt = salt
        self.chain = chain
        self.computed_len = 0
        self.covered_len = 0


class Trace:
    """Runs a trace against the manager, a simulated memory and, if wanted, the oracle."""

    def __init__(self, script: bytes, with_oracle: bool) -> None:
        self.bytes: Iterator[int] = iter(script)
        windows = WINDOWS[self.draw(len(WINDOWS))]
        size = (1, 2, 4)[self.draw(3)]
        groups = tuple(
            Group(f"g{i}", "full" if w is None else "sliding", size, 8, window=w) for i, w in enumerate(windows)
        )
        counts = tuple(5 + self.draw(9) for _ in groups)
        layout = Layout(groups, counts)
        self.windows = windows
        self.size = size
        self.manager = TierManager(layout, max_events=4)
        self.oracle = NaiveTiers(layout) if with_oracle else None
        self.memory: list[list[list[object]]] = [[[None] * size for _ in range(n)] for n in counts]
        self.contents: dict[bytes, tuple[object, ...]] = {}
        self.rows: dict[int, Row] = {}
        self.pins: list[tuple[int, int]] = []
        self.next_id = 0
        self.step = 0

    def draw(self, bound: int) -> int:
        return next(self.bytes, 0) % bound

    def run(self, num_ops: int) -> None:
        weights = [self.enter, self.compute, self.compute, self.compute, self.draft, self.leave, self.reset]
        if self.oracle is None:
            weights += [self.fail, self.pin, self.unpin]
        for _ in range(num_ops):
            self.step += 1
            weights[self.draw(len(weights))]()
            self.manager.check()
            if self.oracle is not None:
                self.compare()
        for sequence in list(self.rows):
            self.manager.release(sequence, self.step)
        for group, block in self.pins:
            self.manager.unpin(group, block)
        self.manager.check()
        assert all(usage.in_use == 0 for usage in self.manager.usage())

    def enter(self) -> None:
        """A new sequence; its prompt is a prefix of one of two texts, with a tail of its own now and then."""
        ids = [n % 3 for n in range(1 + self.draw(14))]
        if self.draw(3) == 0:
            ids += [4 + self.draw(2)] * (1 + self.draw(3))
        salt = SALTS[self.draw(2)]
        caching = self.draw(5) > 0
        row = Row(ids, salt, KeyChain(self.size, Extras(salt=salt)) if caching else None)
        chunk = 1 + self.draw(6)
        headroom = self.draw(3)
        sequence = self.next_id
        self.next_id += 1
        released = self.manager.num_released
        got = self.manager.acquire(sequence, ids, row.chain, chunk_len=chunk, headroom=headroom)
        assert self.manager.num_released == released
        if self.oracle is not None:
            expected = self.oracle.acquire(sequence, ids, salt, caching, chunk, headroom)
            assert (None if got is None else got.cached_len) == expected
        if got is None:
            return
        assert got.cached_len < len(ids)
        assert got.cached_len % self.size == 0
        assert got.covered_len >= min(len(ids), got.cached_len + chunk)
        assert got.tables == tuple(self.manager.table(sequence, g) for g in range(len(self.windows)))
        row.computed_len, row.covered_len = got.cached_len, got.covered_len
        self.rows[sequence] = row
        self.read(sequence, row, got.cached_len)

    def pick(self) -> tuple[int, Row] | None:
        if not self.rows:
            return None
        sequence = sorted(self.rows)[self.draw(len(self.rows))]
        return sequence, self.rows[sequence]

    def grow(self, sequence: int, row: Row, new_len: int) -> bool:
        if new_len > row.covered_len:
            rows = [(sequence, new_len)]
            grown = self.manager.extend(rows)
            if self.oracle is not None:
                assert len(grown) == self.oracle.extend(rows)
            if not grown:
                return False
            assert grown[0].covered_len >= new_len
            row.covered_len = grown[0].covered_len
        return True

    def compute(self) -> None:
        """A chunk of the prompt, or one new token."""
        if (picked := self.pick()) is None:
            return
        sequence, row = picked
        count = min(1 + self.draw(6), len(row.ids) - row.computed_len)
        if not self.grow(sequence, row, row.computed_len + count):
            return
        self.write(sequence, row, row.computed_len, count)
        row.computed_len += count
        if row.computed_len == len(row.ids):
            row.ids.append(self.draw(3))
        self.settle(sequence, row)

    def draft(self) -> None:
        """Drafts are written behind the computed tokens and partly rejected."""
        if (picked := self.pick()) is None:
            return
        sequence, row = picked
        if row.computed_len + 1 != len(row.ids):
            return
        drafts = self.draw(5)
        accepted = self.draw(drafts + 1)
        if not self.grow(sequence, row, row.computed_len + 1 + drafts):
            return
        row.ids += [self.draw(3) for _ in range(accepted + 1)]
        self.write(sequence, row, row.computed_len, 1 + accepted)
        row.computed_len += 1 + accepted
        self.settle(sequence, row)
        covered = self.manager.trim(sequence, row.computed_len, row.computed_len + self.draw(3), self.step)
        if self.oracle is not None:
            self.oracle.trim(sequence, covered)
        assert covered <= row.covered_len
        row.covered_len = covered

    def settle(self, sequence: int, row: Row) -> None:
        next_len = self.manager.seal(sequence, row.ids, row.computed_len)
        assert row.computed_len < next_len <= row.computed_len + self.size
        self.manager.slide(sequence, row.computed_len, self.step)
        if row.chain is not None:
            for n, key in enumerate(row.chain.keys):
                content = (row.salt, *row.ids[: (n + 1) * self.size])
                assert self.contents.setdefault(key, content) == content
        if self.oracle is not None:
            self.oracle.seal(sequence, row.ids, row.computed_len)
            self.oracle.slide(sequence, row.computed_len)

    def leave(self) -> None:
        if (picked := self.pick()) is not None:
            del self.rows[picked[0]]
            self.manager.release(picked[0], self.step)
            if self.oracle is not None:
                self.oracle.release(picked[0])

    def fail(self) -> None:
        if (picked := self.pick()) is not None:
            del self.rows[picked[0]]
            self.manager.release(picked[0], self.step, discard=True)

    def reset(self) -> None:
        if self.draw(4) == 0:
            self.manager.reset_prefix_cache()
            if self.oracle is not None:
                self.oracle.reset()

    def pin(self) -> None:
        group = self.draw(len(self.windows))
        pool = self.manager._groups[group].pool
        held = [block for block in range(1, pool.num_blocks) if pool.state[block]]
        if held:
            block = held[self.draw(len(held))]
            after = self.manager.pin(group, block)
            assert after <= self.step
            self.pins.append((group, block))

    def unpin(self) -> None:
        if self.pins:
            self.manager.unpin(*self.pins.pop(self.draw(len(self.pins))))

    def write(self, sequence: int, row: Row, start: int, count: int) -> None:
        """What the device would do, and what it would read first."""
        self.read(sequence, row, start)
        for group in range(len(self.windows)):
            table = self.manager.table(sequence, group)
            pool = self.manager._groups[group].pool
            for position in range(start, start + count):
                block = table[position // self.size]
                assert pool.state[block] == FILLING
                assert pool.refs[block] == 1
                self.memory[group][block][position % self.size] = (row.salt, *row.ids[: position + 1])

    def read(self, sequence: int, row: Row, position: int) -> None:
        """A token at this position must find what it reads."""
        for group, window in enumerate(self.windows):
            table = self.manager.table(sequence, group)
            first = 0 if window is None else max(0, position - window + 1)
            for p in range(first, position):
                found = self.memory[group][table[p // self.size]][p % self.size]
                assert found == (row.salt, *row.ids[: p + 1]), f"group {group}, position {p}: {found}"

    def compare(self) -> None:
        assert self.oracle is not None
        for n, group in enumerate(self.manager._groups):
            assert group.pool.num_free == self.oracle.groups[n].num_free()
            keys = [group.index.key_of(block) for block in group.pool.candidates()]
            assert [self.contents[key] for key in keys if key is not None] == self.oracle.cached_contents(n)


FAST = settings(deadline=None, derandomize=True, database=None)
SCRIPTS = st.builds(
    lambda seed, num_bytes: random.Random(seed).randbytes(num_bytes), st.integers(0, 2**32), st.integers(20, 160)
)


@settings(FAST, max_examples=2000)
@given(SCRIPTS)
def test_random_traces_keep_the_books(script: bytes) -> None:
    Trace(script, with_oracle=False).run(num_ops=len(script) // 4)


@settings(FAST, max_examples=400)
@given(SCRIPTS)
def test_random_traces_agree_with_the_oracle(script: bytes) -> None:
    Trace(script, with_oracle=True).run(num_ops=len(script) // 4)


@settings(FAST, max_examples=400)
@given(st.binary(min_size=20, max_size=140))
def test_small_traces_agree_with_the_oracle(script: bytes) -> None:
    Trace(script, with_oracle=True).run(num_ops=len(script) // 4)
