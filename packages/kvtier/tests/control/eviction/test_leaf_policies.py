from __future__ import annotations

from random import Random

import pytest

from lamella.kvtier import TierPlan
from lamella.kvtier.control.eviction.leaf_lru import LeafLru
from lamella.kvtier.control.eviction.registry import POLICIES
from lamella.kvtier.control.eviction.s3fifo import S3Fifo
from lamella.kvtier.control.host_tier import READY, HostSlots
from lamella.kvtier.testing.hit_ratio import hit_ratio
from lamella.kvtier.testing.traces import TRACES, agent_trace, scan_trace


def key(n: int) -> bytes:
    return n.to_bytes(32, "little")


class NaiveTree:
    """Contents with the moment when they were last used; the leaf that was used longest ago goes first."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.used: dict[tuple[int, ...], int] = {}
        self.now = 0

    def use(self, path: tuple[int, ...]) -> None:
        self.now += 1
        for end in range(1, len(path) + 1):
            if path[:end] in self.used:
                self.used[path[:end]] = self.now

    def add(self, path: tuple[int, ...]) -> bool:
        if len(self.used) == self.num_slots:
            leaves = [p for p in self.used if p != path[:-1] and not any(q[:-1] == p for q in self.used)]
            if not leaves:
                return False
            del self.used[min(leaves, key=lambda p: self.used[p])]
        self.now += 1
        self.used[path] = self.now
        return True


@pytest.mark.parametrize("seed", range(30))
def test_lru_against_a_list_of_contents(seed: int) -> None:
    rng = Random(seed)
    slots = HostSlots(rng.randint(1, 9), "lru", chained=True, slot_bytes=1)
    naive = NaiveTree(slots.num_slots)
    names: dict[tuple[int, ...], bytes] = {}
    for _ in range(200):
        path = tuple(rng.randrange(2) for _ in range(rng.randint(1, 5)))
        keys = [names.setdefault(path[:end], key(len(names) + 1)) for end in range(1, len(path) + 1)]
        there = slots.match(keys, len(keys))
        assert there == next((n for n in range(len(path)) if path[: n + 1] not in naive.used), len(path))
        if there:
            slots.use(slots.slot_of[keys[there - 1]])
            naive.use(path[:there])
        if there < len(path):
            slot = slots.reserve(keys[there], keys[there - 1] if there else None)
            assert bool(slot) == naive.add(path[: there + 1])
            if slot:
                assert slots.ready(slot)
                slots.unpin(slot)
        slots.check()
        assert set(slots.listed) == {names[p] for p in naive.used}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(15))
def test_a_parent_stays_as_long_as_its_children(name: str, seed: int) -> None:
    """Random life of slots: fill, fail, pin, use, drop. check() holds, and the tier ends empty."""
    rng = Random(seed)
    slots = HostSlots(8, name, chained=rng.random() < 0.8, slot_bytes=1)
    filling: list[int] = []
    pinned: list[int] = []
    count = 0
    for _ in range(400):
        action = rng.randrange(8)
        there = sorted(slots.slot_of)
        if action < 3:
            parent = rng.choice([None, *there]) if there else None
            count += 1
            if slot := slots.reserve(key(count), parent):
                filling.append(slot)
        elif action == 3 and filling:
            fill_slot(slots, filling.pop(rng.randrange(len(filling))))
        elif action == 4 and filling:
            slots.failed(filling.pop(rng.randrange(len(filling))))
        elif action == 5 and there:
            slot = slots.slot_of[rng.choice(there)]
            slots.use(slot)
            if slots.state[slot] == READY:
                slots.pin(slot)
                pinned.append(slot)
        elif action == 6 and pinned:
            slots.unpin(pinned.pop(rng.randrange(len(pinned))))
        elif action == 7 and there and rng.random() < 0.2:
            slots.drop(rng.choice(there))
        slots.check()
    for slot in filling:
        fill_slot(slots, slot)
    for slot in pinned:
        slots.unpin(slot)
    slots.drop_all()
    slots.check()
    assert len(slots) == 0


def fill_slot(slots: HostSlots, slot: int) -> None:
    """Its copy has ended, and nobody takes the pin over."""
    if slots.ready(slot):
        slots.unpin(slot)


def fill(policy: LeafLru | S3Fifo, slots: range) -> None:
    for slot in slots:
        policy.insert(slot, key(slot))
        policy.offer(slot)


def test_s3fifo_promotes_on_the_second_hit_and_remembers_what_left_too_early() -> None:
    policy = S3Fifo(11, [0] * 11)
    fill(policy, range(1, 11))
    policy.use(1)
    policy.use(2)
    policy.use(2)
    assert policy.pick() == 1  # one hit is not enough
    assert policy.pick() == 3  # 2 went to main
    policy.insert(1, key(1))  # the ghost knows it: straight to main
    policy.offer(1)
    policy.insert(3, key(99))
    policy.offer(3)
    assert [policy.pick() for _ in range(8)] == [4, 5, 6, 7, 8, 9, 10, 2]


def test_s3fifo_gives_what_was_used_in_main_another_round() -> None:
    policy = S3Fifo(5, [0] * 5)
    fill(policy, range(1, 5))
    for slot in (1, 1, 2, 2, 3, 3):
        policy.use(slot)
    assert policy.pick() == 1  # all three went to main, where it is the first
    policy.use(2)
    assert policy.pick() == 3


def test_hits_count_for_all_that_a_slot_hangs_on() -> None:
    parent_of = [0, 0, 1, 2]
    policy = S3Fifo(4, parent_of)
    for slot in (1, 2, 3):
        policy.insert(slot, key(slot))
    policy.use(3)
    policy.use(2)
    policy.offer(3)
    assert policy.pick() == 3
    parent_of[3] = 0
    policy.offer(2)
    policy.insert(3, key(7))
    policy.offer(3)
    assert policy.pick() == 3  # 2 had two hits


def ratio(eviction: str, trace: str, requests: int) -> float:
    plan = TierPlan(host_slots=(800,), eviction=eviction)
    return hit_ratio(plan, 200, TRACES[trace](3, requests))


def test_s3fifo_beats_lru_on_a_scan() -> None:
    lru, s3fifo = ratio("lru", "scan", 240), ratio("s3fifo", "scan", 240)
    assert s3fifo > 1.1 * lru, (s3fifo, lru)


def test_every_policy_serves_agents() -> None:
    alone = hit_ratio(None, 200, agent_trace(3, 200))
    for name in POLICIES:
        assert ratio(name, "agents", 200) > 1.2 * alone


def test_traces_are_the_same_every_time() -> None:
    assert list(scan_trace(1, 9)) == list(scan_trace(1, 9))
    assert list(scan_trace(1, 9)) != list(scan_trace(2, 9))
