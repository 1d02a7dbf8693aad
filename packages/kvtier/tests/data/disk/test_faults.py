"""Every fault of a folder ends as a miss: damaged files, a full disk, one that fails, hangs, vanishes."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter

import pytest

from lamella.kvtier import KvTierError, TicketResult
from lamella.kvtier.data.disk import checkpoint
from lamella.kvtier.data.disk.header import FIELDS, HEADER_BYTES, PAGE
from lamella.kvtier.data.disk.plan import StorePlan
from lamella.kvtier.data.disk.record_store import RecordStore
from lamella.kvtier.jobs import Presence
from lamella.kvtier.testing.fake_clock import FakeClock
from lamella.kvtier.testing.fake_disk import FakeDisk, FakeFolder

FINGERPRINT = b"f" * 16
NUM_BYTES = 6000
RECORD = PAGE + 2 * PAGE


def key(n: int) -> bytes:
    return hashlib.blake2b(bytes([n]), digest_size=32).digest()


def block(n: int) -> bytes:
    return (key(n) * (NUM_BYTES // 32 + 1))[:NUM_BYTES]


class Rig:
    """A store on a fake folder, and a chain of blocks 0 … n - 1 in it."""

    def __init__(self, num_blocks: int = 0, limit: int = 1 << 60, **options) -> None:
        self.folder, self.clock = FakeFolder(limit), FakeClock()
        self.num_opened = 0
        self.open(**options)
        if num_blocks:
            assert all(self.write(n).ok for n in range(num_blocks))

    def open(self, fingerprint: bytes = FINGERPRINT, capacity: int = 2 << 20, **options) -> None:
        disk_options = {name: options.pop(name) for name in ("read_only", "eio_reads", "eio_writes") if name in options}
        self.disk = FakeDisk(self.folder, self.clock, 1, **disk_options)
        self.num_opened += 1
        self.store = RecordStore(
            self.disk, self.clock, StorePlan(fingerprint, capacity, **options), f"{self.num_opened:08x}"
        )
        self.removed: list[bytes] = []
        self.added: list[bytes] = []

    def reopen(self, **options) -> None:
        assert self.store.close()
        self.open(**options)

    def results(self, count: int = 1, steps: int = 200) -> list[TicketResult]:
        found: list[TicketResult] = []
        for _ in range(steps):
            self.store.step(0.01)
            for event in self.store.events:
                if isinstance(event, Presence):
                    self.removed += [name for _, name in event.removed]
                    self.added += [name for _, name, _ in event.added]
                else:
                    found.append(event)
            self.store.events.clear()
            if len(found) >= count:
                return found
        return found

    def write(self, n: int) -> TicketResult:
        self.store.write(n, 0, key(n), key(n - 1) if n else None, memoryview(block(n)))
        return self.results()[0]

    def read(self, n: int) -> TicketResult:
        into = bytearray(NUM_BYTES)
        self.store.read(1000 + n, 0, key(n), memoryview(into))
        result = self.results()[0]
        assert not result.ok or into == block(n), "wrong bytes"
        return result

    @property
    def segment(self) -> str:
        return next(file for file in sorted(self.folder.files) if file.endswith((".kv", ".open")))

    def listed(self) -> list[bytes]:
        return [name for _, name, _ in self.store.content()]


@pytest.mark.parametrize("field", [*FIELDS, "header padding", "payload", "payload padding"])
@pytest.mark.parametrize("reopened", [False, True, "without a checkpoint"])
def test_a_flipped_bit_anywhere_is_a_miss_or_harmless(field: str, reopened: bool | str) -> None:
    spans = {
        "header padding": (HEADER_BYTES, PAGE),
        "payload": (PAGE, PAGE + NUM_BYTES),
        "payload padding": (PAGE + NUM_BYTES, RECORD),
        **FIELDS,
    }
    start, end = spans[field]
    for offset in {start, (start + end) // 2, end - 1}:
        for bit in (0, 7):
            rig = Rig(4)
            if reopened:
                assert rig.store.close()
            rig.folder.flip(rig.segment, RECORD + offset, bit)
            if reopened == "without a checkpoint":
                del rig.folder.files["index-66666666.ckpt"]
            if reopened:
                rig.open()
            results = [rig.read(n) for n in range(4)]
            harmless = "padding" in field
            if harmless:
                assert all(result.ok for result in results)
                continue
            assert [result.ok for result in results] == [True, False, False, False]
            assert rig.listed() == [key(0)], "a child is listed without its parent"
            if reopened != "without a checkpoint":
                assert rig.removed == [key(1), key(2), key(3)]
                assert not rig.read(1).ok
                assert sum(rig.store.counts.faults.values()) == 1
            assert rig.write(1).ok, "it can be written again"
            assert rig.read(1).ok


def test_any_flipped_bit_of_a_checkpoint_is_noticed() -> None:
    rig = Rig(3)
    assert rig.store.close()
    file = "index-66666666.ckpt"
    data = bytes(rig.folder.files[file].data)
    for offset in range(len(data)):
        damaged = bytearray(data)
        damaged[offset] ^= 1 << (offset % 8)
        assert isinstance(checkpoint.decode(bytes(damaged), FINGERPRINT), str)
    for length in range(0, len(data), 7):
        assert isinstance(checkpoint.decode(data[:length], FINGERPRINT), str)
    rig.folder.flip(file, len(data) // 2)
    rig.open()
    assert rig.store.counts.faults == Counter({"checkpoint checksum": 1})
    assert rig.listed() == [key(n) for n in range(3)]


@pytest.mark.parametrize("keep", [0, 1, PAGE - 1, PAGE, RECORD, RECORD + PAGE, 2 * RECORD - 1])
def test_a_truncated_segment_ends_at_its_last_whole_record(keep: int) -> None:
    rig = Rig(3)
    assert rig.store.close()
    del rig.folder.files[rig.segment].data[keep:]
    rig.open()
    assert rig.listed() == [key(n) for n in range(keep // RECORD)]
    assert [rig.read(n).ok for n in range(3)] == [n < keep // RECORD for n in range(3)]


def test_records_of_another_fingerprint_are_not_seen() -> None:
    rig = Rig(3)
    rig.reopen(fingerprint=b"g" * 16)
    assert rig.listed() == []
    assert not rig.read(1).ok
    assert rig.write(0).ok
    # equal in the digits that the file's name has, different in the rest
    rig.reopen(fingerprint=b"f" * 8 + b"x" * 8)
    assert rig.listed() == []
    assert rig.store.counts.faults["fingerprint"] == 3
    rig.reopen()
    assert rig.listed() == [key(n) for n in range(3)]


def test_a_full_disk_switches_writing_off_and_not_reading(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(limit=300_000)
    with caplog.at_level(logging.WARNING, "lamella.kvtier"):
        results = [rig.write(n) for n in range(60)]
    assert [result.error for result in results if not result.ok] == ["no space"] * (60 - sum(r.ok for r in results))
    kept = sum(result.ok for result in results)
    assert 0 < kept < 60
    assert all(rig.read(n).ok for n in range(kept))
    assert len(caplog.records) == 1, "one line, not one a write"
    rig.folder.limit = 1 << 60
    assert not rig.write(kept).ok, "not tried again at once"
    rig.clock.advance(120)
    assert rig.write(kept).ok


def test_a_disk_that_fails_ends_as_misses() -> None:
    rig = Rig(4)
    rig.disk.eio_reads = 1.0
    assert rig.read(2).error == "EIO"
    assert rig.listed() == [key(0), key(1)]
    rig.disk.eio_reads, rig.disk.eio_writes = 0.0, 1.0
    assert not rig.write(2).ok
    assert rig.read(1).ok
    rig.disk.eio_writes = 0.0
    rig.clock.advance(120)
    assert rig.write(2).ok
    assert rig.read(2).ok


def test_a_folder_that_vanishes_ends_as_misses() -> None:
    rig = Rig(4)
    rig.folder.vanished = True
    assert rig.read(3).error == "ENOENT"
    rig.clock.advance(10)
    assert not rig.write(9).ok
    for n in range(4):
        assert not rig.read(n).ok
    assert rig.listed() == []
    assert rig.store.close()


def test_a_read_only_folder_serves_reads() -> None:
    rig = Rig(4)
    rig.reopen(read_only=True)
    assert rig.read(3).ok
    assert rig.write(9).error == "read-only"
    assert rig.store.close()


def test_what_waits_behind_a_hung_transfer_fails_in_time() -> None:
    rig = Rig(4, depth=1)
    rig.disk.hung = True
    into = [bytearray(NUM_BYTES) for _ in range(3)]
    for n in range(3):
        rig.store.read(n, 0, key(n), memoryview(into[n]))
    rig.store.write(9, 0, key(9), None, memoryview(block(9)))
    rig.store.step(0.0)
    rig.clock.advance(11)
    assert {(r.ticket, r.error) for r in rig.results(3)} == {(1, "stalled"), (2, "stalled"), (9, "stalled")}
    rig.disk.hung = False
    assert rig.results()[0].ticket == 0


def test_writes_beyond_the_bound_are_refused_and_reads_are_not() -> None:
    rig = Rig(4, max_writes=2, depth=1)
    for n in range(10, 16):
        rig.store.write(n, 0, key(n), None, memoryview(block(n)))
        rig.store.read(100 + n, 0, key(n % 4), memoryview(bytearray(NUM_BYTES)))
    results = {result.ticket: result for result in rig.results(12)}
    assert [results[n].error for n in range(10, 16)] == [None, None, "busy", "busy", "busy", "busy"]
    assert all(results[100 + n].ok for n in range(10, 16))


def test_a_block_of_another_length_is_a_miss() -> None:
    rig = Rig(2)
    rig.store.read(5, 0, key(1), memoryview(bytearray(10)))
    assert rig.results()[0].error == "length"


def test_the_space_limit_holds_and_what_is_used_survives() -> None:
    rig = Rig(capacity=1 << 20)
    for n in range(3):  # a prefix that is read again and again, and one-off blocks behind it
        assert rig.write(n).ok
    for n in range(3, 250):
        rig.store.write(n, 0, key(n), key(2), memoryview(block(n)))
        assert rig.results()[0].ok
        assert rig.folder.taken <= 1 << 20
        if n % 20 == 0:
            assert all(rig.read(m).ok for m in range(3))
    assert rig.store.counts.reclaimed > 5
    assert rig.store.counts.moved > 3
    rig.store.index.check()
    rig.reopen(capacity=1 << 20)
    assert [rig.read(m).ok for m in range(3)] == [True] * 3
    assert len(rig.listed()) > 30


def test_a_block_too_large_for_a_segment_is_refused() -> None:
    rig = Rig(capacity=1 << 20)
    rig.store.write(1, 0, key(1), None, memoryview(bytes(200_000)))
    assert rig.results()[0].error == "too large"


def test_clearing_forgets_what_is_there_and_what_is_under_way() -> None:
    rig = Rig(4)
    rig.store.write(7, 0, key(7), None, memoryview(block(7)))
    rig.store.step(0.0)
    rig.store.clear()
    rig.results(2, steps=50)
    assert rig.listed() == []
    assert not rig.read(7).ok
    assert rig.write(0).ok
    rig.reopen()
    assert rig.listed() == [key(0)]


def test_two_processes_share_a_folder() -> None:
    rig = Rig(capacity=4 << 20)
    other = RecordStore(FakeDisk(rig.folder, rig.clock, 2), rig.clock, StorePlan(FINGERPRINT, 4 << 20), "b" * 8)
    for n in range(60):
        assert rig.write(n).ok
    rig.clock.advance(2)
    for _ in range(100):
        other.step(0.01)
    news = [name for event in other.events if isinstance(event, Presence) for _, name, _ in event.added]
    other.events.clear()
    assert news[:20] == [key(n) for n in range(20)], "sealed segments of the other are announced"
    into = bytearray(NUM_BYTES)
    other.read(1, 0, key(5), memoryview(into))
    while not other.events:
        other.step(0.01)
    assert other.events == [TicketResult(1, True, None, other.events[0].seconds)]
    assert into == block(5)
    assert other.close()


def test_a_clear_elsewhere_is_noticed() -> None:
    rig = Rig(4)
    rig.reopen()
    other = RecordStore(FakeDisk(rig.folder, rig.clock, 2), rig.clock, StorePlan(FINGERPRINT, 2 << 20), "b" * 8)
    other.clear()
    rig.clock.advance(2)
    rig.results()
    assert sorted(rig.removed) == sorted(key(n) for n in range(4))
    assert rig.listed() == []


def test_a_plan_that_cannot_work_is_refused() -> None:
    with pytest.raises(KvTierError, match="16 bytes"):
        StorePlan(b"short", 1 << 30)
    with pytest.raises(KvTierError, match="give more"):
        StorePlan(FINGERPRINT, 1000)
