"""A store over a disk that crashes and fails, held to an oracle that is too simple to be wrong."""

from __future__ import annotations

import hashlib
import random

import pytest

from lamella.kvtier import TicketResult
from lamella.kvtier.data.disk.header import PAGE
from lamella.kvtier.data.disk.plan import StorePlan
from lamella.kvtier.data.disk.record_store import RecordStore
from lamella.kvtier.jobs import Presence
from lamella.kvtier.testing.fake_clock import FakeClock
from lamella.kvtier.testing.fake_disk import FakeDisk, FakeFolder

FINGERPRINT = b"f" * 16
SIZES = (4 * PAGE, 10_000, 12 * PAGE)
"""Bytes of a block, per group; group 2 stands alone."""
CAPACITY = 1 << 20


def key_of(path: tuple[int, ...]) -> bytes:
    return hashlib.blake2b(repr(path).encode(), digest_size=32).digest()


def content_of(group: int, key: bytes) -> bytes:
    return hashlib.blake2b(key + bytes([group]), digest_size=64).digest() * (SIZES[group] // 64) + bytes(
        SIZES[group] % 64
    )


class World:
    """One folder, the process that has it open, and what that process may believe."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = FakeClock()
        limit = 1 << 60 if self.rng.random() < 0.8 else self.rng.randrange(CAPACITY // 4, CAPACITY)
        self.folder = FakeFolder(limit)
        eio = self.rng.choice((0.0, 0.0, 0.02))
        self.faulty = eio > 0 or limit < CAPACITY
        self.disk = FakeDisk(self.folder, self.clock, seed, eio_reads=eio, eio_writes=eio)
        self.written: set[tuple[int, bytes]] = set()
        """Ever given to write()."""
        self.paths: list[tuple[int, ...]] = [()]
        self.num_opened = 0
        self.open()

    def open(self) -> None:
        plan = StorePlan(FINGERPRINT, CAPACITY, depth=self.rng.choice((1, 4, 16)), standalone=frozenset((2,)))
        self.num_opened += 1
        self.store = RecordStore(self.disk, self.clock, plan, f"{self.num_opened:08x}")
        self.open_tickets: dict[int, tuple[str, int, bytes, bytearray]] = {}
        self.book = {(group, key) for group, key, _ in self.store.content()}
        self.next_ticket = 0
        assert self.book <= self.written, "a record that nobody wrote"
        self.check()

    def act(self) -> None:
        choice = self.rng.random()
        if choice < 0.45:
            self.write()
        elif choice < 0.7:
            self.read()
        elif choice < 0.71 and self.book:
            group, key = self.rng.choice(sorted(self.book))
            self.store.delete(group, [key])
        elif choice < 0.712:
            self.store.clear()
        elif choice < 0.8:
            self.clock.advance(self.rng.random() * 3)
        self.step(self.rng.choice((0.0, 0.0005)))

    def write(self) -> None:
        path = self.rng.choice(self.paths[-20:])
        if len(path) < 12:
            path = (*path, self.rng.randrange(3))
            self.paths.append(path)
        if not path:
            return
        group = self.rng.randrange(3)
        key = key_of(path)
        parent = key_of(path[:-1]) if len(path) > 1 else None
        data = bytearray(content_of(group, key))
        self.written.add((group, key))
        self.open_tickets[self.next_ticket] = ("write", group, key, data)
        self.store.write(self.next_ticket, group, key, parent, memoryview(data))
        self.next_ticket += 1

    def read(self) -> None:
        if not self.written:
            return
        group, key = self.rng.choice(sorted(self.book if self.book and self.rng.random() < 0.8 else self.written))
        into = bytearray(b"\xee") * SIZES[group]
        self.open_tickets[self.next_ticket] = ("read", group, key, into)
        self.store.read(self.next_ticket, group, key, memoryview(into))
        self.next_ticket += 1

    def step(self, timeout_s: float) -> None:
        self.store.step(timeout_s)
        events, self.store.events = self.store.events, []
        for event in events:
            if isinstance(event, Presence):
                assert {(group, key) for group, key, _ in event.added} <= self.written
                self.book |= {(group, key) for group, key, _ in event.added}
                self.book -= set(event.removed)
                continue
            assert isinstance(event, TicketResult)
            kind, group, key, data = self.open_tickets.pop(event.ticket)
            if kind == "write" and event.ok:
                self.book.add((group, key))
            elif kind == "read" and event.ok:
                assert data == content_of(group, key), "wrong bytes"
        self.check()

    def check(self) -> None:
        self.store.index.check()
        listed = {(group, key) for group, key, _ in self.store.content()}
        held = {(int.from_bytes(name[:4], "little"), name[4:]) for name in self.store.index.records}
        told = self.book
        assert listed <= told | self.just_written(), "a record is listed that nobody was told of"
        assert told <= held | self.just_written(), "a record went and nobody was told"
        assert self.folder.taken <= CAPACITY, "more space than allowed"

    def just_written(self) -> set[tuple[int, bytes]]:
        """Their tickets are on their way."""
        return {(group, key) for kind, group, key, _ in self.open_tickets.values() if kind == "write"}

    def settle(self) -> None:
        for _ in range(2000):
            if not self.store.busy and not self.open_tickets:
                return
            self.step(0.01)
        raise AssertionError(f"tickets do not end: {self.open_tickets}")


def run(seed: int) -> None:
    world = World(seed)
    for _ in range(world.rng.randrange(1, 4)):
        for _ in range(world.rng.randrange(5, 60)):
            world.act()
        ending = world.rng.random()
        if ending < 0.4:
            world.settle()
        if ending < 0.2:
            assert world.store.close()
            world.disk = FakeDisk(world.folder, world.clock, seed)
            world.open()
            continue
        acknowledged = {
            (group, key)
            for group, key, _ in world.store.content()
            if (group, key) not in world.just_written() and not world.faulty
        }
        power_loss = world.rng.random() < 0.3
        reclaims = world.store.writer.reclaiming
        world.disk = world.disk.crash(power_loss=power_loss)
        world.open()
        if not (power_loss or reclaims):
            assert acknowledged <= world.book, "what was acknowledged did not survive the process"
    world.settle()
    for group, key in sorted(world.book):
        into = bytearray(SIZES[group])
        world.open_tickets[world.next_ticket] = ("read", group, key, into)
        world.store.read(world.next_ticket, group, key, memoryview(into))
        world.next_ticket += 1
    world.settle()
    assert world.store.close()
    assert not world.folder.locks


@pytest.mark.parametrize("slice_", range(20))
def test_a_store_that_crashes_and_fails_serves_only_what_was_written(slice_: int) -> None:
    for seed in range(slice_ * 100, slice_ * 100 + 100):
        try:
            run(seed)
        except BaseException:
            print("seed", seed)
            raise
