from __future__ import annotations

import pytest

from lamella.kvtier import Acquired, CopyJob, Group, KeyChain, Layout, TicketResult, TierManager, TierPlan

SIZE = 4


def make(states: int = 12, columns: int = 2, host: int | None = None, window: int | None = None) -> TierManager:
    first = Group("tokens", "full" if window is None else "sliding", SIZE, 8, window=window)
    layout = Layout((first, Group("states", "state", SIZE, 99, num_columns=columns)), (30, states + 1))
    return TierManager(layout, tiers=None if host is None else TierPlan(host_slots=(40, host)))


def move(manager: TierManager) -> list[CopyJob]:
    moved: list[CopyJob] = []
    while jobs := manager.take_jobs():
        for job in jobs:
            assert isinstance(job, CopyJob)
            moved.append(job)
            manager.complete(TicketResult(job.ticket, True))
    return moved


def enter(manager: TierManager, sequence: int, ids: list[int]) -> Acquired:
    got = manager.acquire(sequence, ids, KeyChain(SIZE), chunk_len=len(ids))
    assert got is not None
    manager.check()
    return got


def serve(manager: TierManager, sequence: int, ids: list[int], *at: int) -> Acquired:
    """Compute the whole prompt in chunks that end at the snapshots' positions."""
    got = enter(manager, sequence, ids)
    move(manager)
    for position in (*at, len(ids)):
        if position in at:
            assert manager.snapshot(sequence, position) is not None
        manager.check()
        manager.seal(sequence, ids, position)
        manager.check()
    manager.release(sequence, 0)
    move(manager)
    manager.check()
    return got


def test_a_hit_ends_at_a_snapshot() -> None:
    manager = make()
    ids = list(range(21))
    assert serve(manager, 1, ids, 8, 16).snapshots == ()
    whole = enter(manager, 2, ids)
    assert whole.cached_len == 16
    assert len(whole.snapshots) == 1
    assert whole.snapshots[0] not in whole.tables[1]
    assert enter(manager, 3, [*ids[:15], 99, 98]).cached_len == 8
    assert enter(manager, 4, ids[:7]).cached_len == 0


def test_live_states_are_one_sequence_s_alone_and_go_with_it() -> None:
    manager = make(states=4)
    first, second = enter(manager, 1, [1, 2, 3]), enter(manager, 2, [1, 2, 3])
    assert len({*first.tables[1], *second.tables[1]}) == 4
    assert manager.acquire(3, [1], None, chunk_len=1) is None
    assert manager.num_reclaimable(1) == (1, 2)
    manager.release(1, 5)
    assert manager.num_free(1) == 2
    assert enter(manager, 3, [1]).covered_len == 4


def test_the_snapshot_stays_until_the_sequence_has_gone_on() -> None:
    manager = make(states=3)
    serve(manager, 1, list(range(9)), 8)
    got = enter(manager, 2, list(range(14)))
    assert got.cached_len == 8
    assert manager.num_free(1) == 0
    assert manager.snapshot(2, 12) is None
    manager.seal(2, list(range(14)), 12)
    assert manager.num_free(1) == 1
    manager.check()


def test_rejected_positions_and_ends_drop_what_was_planned() -> None:
    manager = make()
    ids = list(range(30))
    enter(manager, 1, ids)
    before = manager.num_free(1)
    assert manager.snapshot(1, 8) == manager.snapshot(1, 8)
    manager.snapshot(1, 16)
    assert manager.num_free(1) == before - 2
    manager.trim(1, 5, 13, 0)
    assert manager.num_free(1) == before - 1
    manager.check()
    manager.release(1, 0)
    assert manager.num_free(1) == 12
    assert enter(manager, 2, ids).cached_len == 0
    with pytest.raises(AssertionError, match="blocks are 4 tokens"):
        manager.snapshot(2, 6)


def test_discarding_drops_snapshots_too() -> None:
    manager = make()
    ids = list(range(21))
    enter(manager, 1, ids)
    manager.snapshot(1, 16)
    manager.seal(1, ids, 21)
    manager.release(1, 0, discard=True)
    manager.check()
    assert manager.usage()[1].cached == 0


def test_with_a_sliding_window_both_have_to_hold_the_position() -> None:
    manager = make(window=5)
    ids = list(range(21))
    serve(manager, 1, ids, 8, 16)
    assert enter(manager, 2, ids).cached_len == 16


def test_snapshots_go_down_and_come_back() -> None:
    manager = make(states=5, host=40)
    ids = list(range(21))
    serve(manager, 1, ids, 8, 16)
    for n in range(6):  # push everything off the device
        serve(manager, 10 + n, [100 * n + 50 + k for k in range(21)], 8, 16)
    got = enter(manager, 2, ids)
    assert (got.cached_len, got.loaded_len) == (16, 16)
    restored = [job.target.slot for job in move(manager) if job.target.tier == "device" and job.target.group == 1]
    assert restored == list(got.snapshots)
    manager.seal(2, ids, 21)
    manager.check()
