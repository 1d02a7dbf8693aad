from __future__ import annotations

import subprocess
import sys

import pytest

from lamella.kvtier import Acquired, Extras, Group, KeyChain, Layout, TierManager
from lamella.kvtier.events import BlockRemoved, BlockStored, Cleared


def make(num_blocks: int = 9, size: int = 4, max_events: int = 0) -> TierManager:
    return TierManager(Layout((Group("full", "full", size, 1),), (num_blocks,)), max_events)


def enter(manager: TierManager, sequence: int, ids: list[int], salt: str | None = None, **more: int) -> Acquired | None:
    """Acquire, compute and seal the whole of ids. more: limits of acquire()."""
    chain = KeyChain(manager.block_size, Extras(salt=salt))
    got = manager.acquire(sequence, ids, chain, chunk_len=len(ids), **more)
    if got is not None:
        manager.seal(sequence, ids, len(ids))
        manager.check()
    return got


def test_a_second_sequence_hits_what_the_first_sealed() -> None:
    manager = make()
    first = enter(manager, 1, list(range(10)))
    assert first == Acquired(0, 12, ([1, 2, 3],))
    second = enter(manager, 2, list(range(10)))
    assert second is not None
    assert second.cached_len == 8
    assert second.tables[0][:2] == [1, 2]
    assert second.tables[0][2] not in (1, 2, 3)
    assert (manager.counters.queried_tokens, manager.counters.hit_tokens) == (20, 8)


def test_a_block_is_sealed_and_found_by_the_id_behind_it_too() -> None:
    manager = make(20)
    ids = list(range(9))

    def acquire(sequence: int, token_ids: list[int]) -> Acquired | None:
        return manager.acquire(sequence, token_ids, KeyChain(4, lookahead=1), chunk_len=len(token_ids))

    acquire(1, ids[:4])
    manager.extend([(1, 9)])
    assert manager.seal(1, ids[:4], 4) == 4  # what follows is not known yet
    assert manager.seal(1, ids[:5], 4) == 8
    assert manager.seal(1, ids, 8) == 12
    manager.check()
    same, shorter, other = acquire(2, ids), acquire(3, ids[:8]), acquire(4, [*range(8), 99])
    assert [got.cached_len for got in (same, shorter, other) if got is not None] == [8, 4, 4]
    manager.check()


def test_at_least_one_token_is_always_left_to_compute() -> None:
    manager = make()
    enter(manager, 1, list(range(8)))
    got = enter(manager, 2, list(range(8)))
    assert got is not None
    assert got.cached_len == 4


def test_the_caller_may_limit_the_hit() -> None:
    manager = make()
    enter(manager, 1, list(range(12)))
    for limit, expected in ((0, 0), (3, 0), (4, 4), (9, 8), (99, 8)):
        got = manager.acquire(2, list(range(12)), KeyChain(4), chunk_len=12, max_hit_len=limit)
        assert got is not None
        assert got.cached_len == expected
        manager.release(2, 0)


def test_salts_and_opting_out_keep_sequences_apart() -> None:
    manager = make(20)
    enter(manager, 1, list(range(9)), salt="a")
    other = enter(manager, 2, list(range(9)), salt="b")
    same = enter(manager, 3, list(range(9)), salt="a")
    assert other is not None
    assert same is not None
    assert (other.cached_len, same.cached_len) == (0, 8)
    alone = manager.acquire(4, list(range(9)), None, chunk_len=9)
    assert alone is not None
    assert alone.cached_len == 0
    manager.seal(4, list(range(9)), 9)
    manager.check()
    sealed = manager.counters.sealed_blocks
    manager.release(4, 0)
    manager.check()
    assert manager.counters.sealed_blocks == sealed


def test_refusal_changes_nothing() -> None:
    manager = make(5)
    enter(manager, 1, list(range(6)))
    before = (manager.usage(), manager.table(1, 0), manager.counters.acquired)
    assert enter(manager, 2, list(range(100, 110))) is None
    assert (manager.usage(), manager.table(1, 0), manager.counters.acquired) == before
    assert not manager.holds(2)
    assert manager.counters.refused == 1
    assert enter(manager, 3, [100, 101], headroom=2) is None
    assert enter(manager, 3, [100, 101], headroom=1) is not None


def test_a_cached_prefix_counts_as_needed_when_it_leaves_the_free_blocks() -> None:
    manager = make(5)
    enter(manager, 1, list(range(9)))
    manager.release(1, 0)
    assert manager.num_free(0) == 4
    assert enter(manager, 2, list(range(17))) is None
    got = enter(manager, 3, list(range(16)))
    assert got is not None
    assert got.cached_len == 8
    assert manager.num_free(0) == 0


def test_freed_blocks_can_be_hit_until_reused_and_tails_go_first() -> None:
    manager = make(6)
    enter(manager, 1, list(range(12)))
    manager.release(1, 3)
    assert enter(manager, 2, list(range(200, 212))) is not None  # two empty blocks, then the tail of 1
    again = enter(manager, 3, list(range(9)))
    assert again is None
    manager.release(2, 4)
    got = manager.acquire(4, list(range(12)), KeyChain(4), chunk_len=12)
    assert got is not None
    assert got.cached_len == 8


def test_empty_blocks_are_reused_before_cached_ones() -> None:
    manager = make(9)
    enter(manager, 1, list(range(8)))
    manager.release(1, 0)
    for n in range(6):
        assert manager.acquire(10 + n, [n], None, chunk_len=1) is not None
    assert manager.counters.evicted_blocks == 0
    assert manager.acquire(20, [0], None, chunk_len=1) is not None
    assert manager.counters.evicted_blocks == 1
    manager.check()


def test_duplicates_merge_when_nobody_uses_one_of_them() -> None:
    manager = make(9)
    ids = list(range(8))
    manager.acquire(1, ids, KeyChain(4), chunk_len=8)
    manager.acquire(2, ids, KeyChain(4), chunk_len=8)
    for sequence in (1, 2):
        manager.seal(sequence, ids, 8)
    assert manager.counters.duplicate_blocks == 2
    manager.check()
    manager.release(1, 0)
    manager.check()
    assert manager.usage()[0].cached == 0
    manager.release(2, 0)
    manager.check()
    assert manager.usage()[0].cached == 2


def test_extend_is_all_or_nothing_per_row_and_stops_at_the_first_that_does_not_fit() -> None:
    manager = make(7)
    for sequence in (1, 2, 3):
        enter(manager, sequence, [sequence])
    growths = manager.extend([(1, 4), (1, 8), (2, 16), (3, 8)])
    assert [(g.sequence, g.covered_len) for g in growths] == [(1, 4), (1, 8)]
    assert growths[0].blocks == []
    assert growths[1].blocks == [(0, 1, [4])]
    manager.check()
    assert [g.sequence for g in manager.extend([(2, 8), (3, 8)])] == [2, 3]


def test_trim_returns_whole_blocks_beyond_what_is_planned() -> None:
    manager = make(9)
    enter(manager, 1, list(range(6)))
    manager.extend([(1, 20)])
    assert manager.trim(1, 6, 9, last_step=5) == 12
    assert len(manager.table(1, 0)) == 3
    assert manager.pin(0, manager.table(1, 0)[0]) == -1
    manager.check()
    with pytest.raises(AssertionError, match="committed"):
        manager.trim(1, 3, 9, last_step=5)


def test_freed_blocks_carry_the_last_step_that_may_touch_them() -> None:
    manager = make(9)
    enter(manager, 1, list(range(9)))
    table = manager.table(1, 0)
    manager.release(1, last_step=41)
    assert manager.pin(0, table[0]) == 41
    manager.unpin(0, table[0])
    manager.check()


def test_a_pinned_block_is_not_handed_out() -> None:
    manager = make(4)
    enter(manager, 1, list(range(8)))
    first, second = manager.table(1, 0)
    manager.release(1, 0)
    manager.pin(0, second)
    manager.check()
    assert manager.num_free(0) == 2
    got = manager.acquire(2, [1] * 8, None, chunk_len=8)
    assert got is not None
    assert second not in got.tables[0]
    assert first in got.tables[0]
    manager.check()
    assert manager.acquire(3, [1], None, chunk_len=1) is None
    manager.unpin(0, second)  # its prefix is gone: nobody could reach it
    manager.check()
    assert manager.usage()[0].cached == 0
    assert manager.acquire(3, [1], None, chunk_len=1) is not None


def test_a_sliding_group_drops_what_is_left_of_its_window_and_can_still_hit_it() -> None:
    groups = (Group("full", "full", 4, 1), Group("sliding", "sliding", 4, 1, window=6))
    manager = TierManager(Layout(groups, (20, 8)))
    ids = list(range(40))
    got = manager.acquire(1, ids, KeyChain(4), chunk_len=8)
    assert got is not None
    assert [len(table) for table in got.tables] == [10, 2]
    assert got.covered_len == 8
    for computed in range(8, 41, 8):
        if computed < 40:
            assert len(manager.extend([(1, computed + 8)])) == 1
        manager.seal(1, ids, computed)
        manager.slide(1, computed, last_step=computed)
        manager.check()
    assert manager.table(1, 1)[:8] == [0] * 8
    assert 0 not in manager.table(1, 1)[8:]
    manager.release(1, 40)
    again = manager.acquire(2, ids[:38], KeyChain(4), chunk_len=8)
    assert again is not None
    assert again.cached_len == 36
    assert again.tables[1][:7] == [0] * 7
    assert 0 not in again.tables[1][7:]
    manager.check()


def test_a_failed_sequence_leaves_nothing_to_hit() -> None:
    manager = make(12)
    enter(manager, 1, list(range(8)))
    enter(manager, 2, [*range(8), 9, 9, 9, 9])
    manager.release(2, 0)
    manager.release(1, 0, discard=True)
    manager.check()
    got = enter(manager, 3, list(range(12)))
    assert got is not None
    assert got.cached_len == 0


def test_a_failed_sequence_takes_nothing_from_others() -> None:
    manager = make(12)
    enter(manager, 1, list(range(9)))
    enter(manager, 2, list(range(9)))
    manager.release(2, 0, discard=True)
    manager.check()
    got = enter(manager, 3, list(range(9)))
    assert got is not None
    assert got.cached_len == 8


def test_copies_of_a_failed_sequence_take_its_place_in_the_order() -> None:
    manager = make(20)
    ids = list(range(8))
    enter(manager, 1, ids)
    manager.release(1, 0)
    enter(manager, 2, ids, max_hit_len=0)
    enter(manager, 3, ids)  # shares 2's first block, computes the second again
    assert manager.table(3, 0)[0] == manager.table(2, 0)[0]
    manager.release(3, 0)  # 1's second block is now as recent as 3's would be, its first one is not
    manager.release(2, 0, discard=True)
    manager.check()


def test_reset_forgets_content_but_not_blocks_in_use() -> None:
    manager = make(12)
    enter(manager, 1, list(range(8)))
    enter(manager, 2, list(range(50, 58)))
    manager.release(2, 0)
    table = manager.table(1, 0)
    assert manager.reset_prefix_cache() == 4
    manager.check()
    assert manager.table(1, 0) == table
    manager.extend([(1, 12)])
    manager.seal(1, list(range(12)), 12)
    manager.check()
    fresh = enter(manager, 3, list(range(9)))
    assert fresh is not None
    assert fresh.cached_len == 0
    manager.release(1, 0)
    manager.check()
    assert enter(manager, 4, list(range(9))) is not None
    assert manager.counters.hit_tokens == 8


def test_events_tell_what_can_be_hit() -> None:
    manager = make(5, max_events=3)
    enter(manager, 1, list(range(8)))
    chain = KeyChain(4)
    chain.extend(list(range(8)))
    stored = manager.take_events()
    assert stored == [
        BlockStored(0, chain.keys[0], chain.parent(0), 1),
        BlockStored(0, chain.keys[1], chain.keys[0], 2),
    ]
    manager.release(1, 0)
    manager.acquire(2, [7] * 12, None, chunk_len=12)
    assert manager.take_events() == [BlockRemoved(0, chain.keys[1])]
    manager.reset_prefix_cache()
    assert manager.take_events() == [BlockRemoved(0, chain.keys[0]), Cleared()]
    for _ in range(4):
        manager.reset_prefix_cache()
    assert len(manager.take_events()) == 3
    assert manager.counters.dropped_events == 1


def test_usage_counts_every_block_once() -> None:
    manager = make(9)
    enter(manager, 1, list(range(8)))
    enter(manager, 2, list(range(20, 28)))
    manager.release(2, 0)
    usage = manager.usage()[0]
    assert (usage.total, usage.in_use, usage.cached, usage.empty) == (8, 2, 2, 4)
    assert usage.share == manager.in_use == 0.25
    assert manager.num_reclaimable(1) == (2,)
    enter(manager, 3, list(range(9)))
    assert manager.num_reclaimable(1) == (0,)


def test_the_audit_sees_a_fault() -> None:
    manager = make(9)
    enter(manager, 1, list(range(8)))
    manager._groups[0].pool.refs[1] += 1
    with pytest.raises(AssertionError):
        manager.check()


def test_the_control_plane_is_pure() -> None:
    program = (
        "import sys, lamella.kvtier; bad = {'torch', 'numpy', 'random', 'asyncio'} & set(sys.modules); "
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-S", "-c", f"import sys; sys.path[:] = {sys.path!r}; {program}"], check=True)
