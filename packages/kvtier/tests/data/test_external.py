from __future__ import annotations

import importlib.util
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lamella.kvtier import CopyJob, ExternalManagerError, Location, TicketResult
from lamella.kvtier.data.external import CallFailed, IsolatedManager, manager_maker
from lamella.kvtier.data.external_mover import ExternalMover
from lamella.kvtier.data.host_buffer import HostBuffer
from lamella.kvtier.data.queue import EventQueue
from lamella.kvtier.jobs import LookupJob, LookupResult, TierEvent
from lamella.kvtier.testing.contract import check_manager
from lamella.kvtier.testing.fake_clock import FakeClock

NAME = "kvtier_external_managers"
spec = importlib.util.spec_from_file_location(NAME, Path(__file__).with_name("external_managers.py"))
assert spec is not None
assert spec.loader is not None
managers = importlib.util.module_from_spec(spec)
sys.modules[NAME] = managers
spec.loader.exec_module(managers)

SIZE = 6000
FINGERPRINT = b"f" * 16


def key(n: int) -> bytes:
    return bytes([n]) * 32


class Bench:
    """One manager below a host buffer."""

    def __init__(self, make: Callable[[], Any], **options: Any) -> None:
        self.clock = FakeClock()
        self.buffer = HostBuffer([SIZE], [40])
        self.events = EventQueue()
        self.mover = ExternalMover("it", make, self.buffer, FINGERPRINT, self.events, now=self.clock.now, **options)
        self.ticket = 0

    def store(self, *numbers: int) -> list[TierEvent]:
        return self._run([(n, Location("host", 0, n), Location("external", 0, 0, "it")) for n in numbers])

    def load(self, *numbers: int) -> list[TierEvent]:
        return self._run([(n, Location("external", 0, 0, "it"), Location("host", 0, n + 20)) for n in numbers])

    def lookup(self, *numbers: int) -> int:
        self.ticket += 1
        self.mover.submit([LookupJob(self.ticket, "it", 0, tuple(map(key, numbers)))])
        (event,) = self.collect(1)
        assert isinstance(event, LookupResult)
        return event.num_present

    def collect(self, count: int) -> list[TierEvent]:
        got: list[TierEvent] = []
        end = time.monotonic() + 20.0
        while len(got) < count and time.monotonic() < end:
            self.events.wait(1.0)
            got += self.events.take()
        assert len(got) == count
        return sorted(got, key=lambda event: event.ticket)  # type: ignore[union-attr]

    def _run(self, copies: list[tuple[int, Location, Location]]) -> list[TierEvent]:
        jobs = []
        for n, source, target in copies:
            self.ticket += 1
            jobs.append(CopyJob(self.ticket, key(n), source, target, SIZE, parent=key(n - 1) if n else None))
        self.mover.submit(jobs)
        return self.collect(len(jobs))


def ok(events: list[TierEvent]) -> list[bool]:
    return [isinstance(event, TicketResult) and event.ok for event in events]


def fill(buffer: HostBuffer, *slots: int) -> None:
    for slot in slots:
        buffer.view(0, slot)[:] = bytes([slot + 100]) * SIZE


def test_a_right_manager_keeps_the_contract() -> None:
    check_manager(managers.Shelf)
    check_manager(managers.Shelf, seed=3)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (managers.Liar, "came back changed"),
        (managers.Half, "load"),
        (lambda: managers.Scripted({}, lambda: True, [9]), "lookup of nothing"),
    ],
)
def test_a_wrong_manager_does_not(wrong: Callable[[], Any], complaint: str) -> None:
    with pytest.raises((AssertionError, AttributeError), match=complaint):
        check_manager(wrong)


def test_blocks_go_out_and_come_back() -> None:
    bench = Bench(managers.Shelf)
    fill(bench.buffer, 1, 2, 3)
    assert ok(bench.store(1, 2, 3)) == [True] * 3
    assert bench.lookup(1, 2, 4) == 2
    assert ok(bench.load(1, 4, 3)) == [True, False, True]
    assert bytes(bench.buffer.view(0, 21)) == bytes(bench.buffer.view(0, 1))
    assert bytes(bench.buffer.view(0, 23)) == bytes(bench.buffer.view(0, 3))
    assert bytes(bench.buffer.view(0, 24)) == bytes(SIZE)
    stats = bench.mover.stats()
    assert (stats["bytes_in"], stats["bytes_out"], stats["breaker"]) == (2 * SIZE, 3 * SIZE, "closed")
    bench.mover.close()


@pytest.mark.parametrize("liar", [managers.Liar, managers.Swapper])
def test_wrong_bytes_are_a_miss_and_never_reach_a_slot(liar: type) -> None:
    records: dict[bytes, bytes] = {}
    bench = Bench(lambda: liar(records))
    fill(bench.buffer, 1, 2)
    bench.store(1, 2)
    events = bench.load(1, 2)
    assert ok(events) == [False, False]
    assert all("wrong bytes" in str(event.error) for event in events if isinstance(event, TicketResult))
    assert bytes(bench.buffer.view(0, 21)) == bytes(SIZE)
    assert bench.mover.failures["bytes"] == 2
    for n in range(2):
        bench.load(n)
    assert bench.mover.stats()["breaker"] == "open"  # a manager that lies is not asked for ever
    bench.mover.close()


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        (list, "answer"),
        (lambda: None, "answer"),
        (lambda: [True], "answer"),
        (lambda: ["yes", "yes"], "answer"),
        (lambda: [1, 1], "answer"),
        (lambda: [].pop(), "raised"),
        (managers.leave, "exited"),
    ],
)
def test_wrong_answers_to_load_fail_its_jobs_and_are_counted(wrong: Callable[[], Any], kind: str) -> None:
    records: dict[bytes, bytes] = {}
    bench = Bench(lambda: managers.Scripted(records, wrong, [1]))
    bench.store(1, 2)
    assert ok(bench.load(1, 2)) == [False, False]
    assert bench.mover.failures == {kind: 1}
    assert ok(bench.load(1, 2)) == [True, True]
    bench.mover.close()


@pytest.mark.parametrize("wrong", [-1, 3, True, None, "2", 1.0, [1]])
def test_wrong_answers_to_lookup_are_zero(wrong: object) -> None:
    records: dict[bytes, bytes] = {}
    bench = Bench(lambda: managers.Scripted(records, lambda: wrong, [1]))
    bench.store(1, 2)
    assert bench.lookup(1, 2) == 0
    assert bench.mover.failures == {"answer": 1}
    assert bench.lookup(1, 2) == 2
    bench.mover.close()


def test_the_breaker_opens_probes_and_closes() -> None:
    def broken() -> None:
        raise ConnectionError("refused")

    times = [4]
    records: dict[bytes, bytes] = {}
    bench = Bench(lambda: managers.Scripted(records, broken, times), max_failures=3, backoff_s=10.0)
    bench.store(1)
    for _ in range(3):
        assert bench.lookup(1) == 0
    assert bench.mover.stats()["breaker"] == "open"
    assert ok(bench.load(1)) == [False]
    assert ok(bench.store(2)) == [False]
    assert times == [1]  # it was not asked
    assert bench.mover.failures == {"raised": 3, "open": 2}
    bench.clock.advance(10.0)
    assert bench.lookup(1) == 0  # the probe fails
    bench.clock.advance(10.0)
    assert bench.lookup(1) == 0  # the back-off is 20 s now
    assert times == [0]
    bench.clock.advance(10.0)
    assert bench.lookup(1) == 1
    assert bench.mover.stats()["breaker"] == "closed"
    assert bench.mover.stats()["opened"] == 2
    bench.mover.close()


def test_a_manager_that_hangs_is_replaced_and_its_late_bytes_harm_nothing() -> None:
    gate, filled = threading.Event(), threading.Event()
    records: dict[bytes, bytes] = {}
    made: list[Any] = []

    def make() -> Any:
        made.append(managers.Late(records, gate, filled) if not made else managers.Shelf(records))
        return made[-1]

    bench = Bench(make, timeout_s=0.1)
    fill(bench.buffer, 1)
    bench.store(1)
    start = time.monotonic()
    assert ok(bench.load(1)) == [False]
    assert time.monotonic() - start < 2.0
    assert ok(bench.load(1)) == [True]
    assert len(made) == 2
    gate.set()
    assert filled.wait(5.0)
    assert bytes(bench.buffer.view(0, 21)) == bytes(bench.buffer.view(0, 1))
    assert bench.mover.failures == {"timeout": 1}
    assert bench.mover.stats()["restarts"] == 1
    bench.mover.close()


def test_a_manager_that_always_hangs_is_given_up() -> None:
    gate = threading.Event()
    bench = Bench(lambda: managers.Late({}, gate, gate), timeout_s=0.02, max_restarts=2, max_failures=99)
    for _ in range(5):
        assert ok(bench.load(1)) == [False]
    assert bench.mover.failures == {"timeout": 3, "open": 2}
    assert "hung too often" in str(bench.load(1)[0].error)  # type: ignore[union-attr]
    start = time.monotonic()
    bench.mover.close()
    assert time.monotonic() - start < 1.0
    gate.set()


def test_a_manager_that_cannot_be_made_fails_its_jobs() -> None:
    made: list[int] = []

    def make() -> Any:
        made.append(1)
        if len(made) == 1:
            raise ExternalManagerError("no such host")
        return managers.Shelf()

    bench = Bench(make)
    (event,) = bench.store(1)
    assert isinstance(event, TicketResult)
    assert "no such host" in str(event.error)
    assert ok(bench.store(1)) == [True]
    bench.mover.close()


def test_stores_beyond_the_bound_fail_at_once_and_close_ends_the_rest() -> None:
    gate = threading.Event()
    bench = Bench(lambda: managers.Late({}, gate, gate), max_stores=4)
    jobs = [CopyJob(0, key(1), Location("external", 0, 0, "it"), Location("host", 0, 1), SIZE)]
    bench.mover.submit(jobs)
    while not bench.mover._num_running:
        time.sleep(0.001)
    down = Location("external", 0, 0, "it")
    bench.mover.submit([CopyJob(n, key(n), Location("host", 0, n), down, SIZE) for n in range(1, 7)])
    refused = bench.collect(2)
    assert [(event.ticket, event.error) for event in refused if isinstance(event, TicketResult)] == [
        (5, "queue full"),
        (6, "queue full"),
    ]
    closing = threading.Thread(target=bench.mover.close)
    closing.start()
    assert ok(bench.collect(4)) == [False] * 4
    gate.set()
    closing.join(5.0)
    assert ok(bench.collect(1)) == [False]
    assert bench.mover.queue_depth == 0


def test_calls_are_limited_in_time_and_say_what_happened() -> None:
    times = [1]
    isolated = IsolatedManager(lambda: managers.Scripted({}, lambda: time.sleep(0.5), times), timeout_s=0.05)
    with pytest.raises(CallFailed, match="timeout: lookup took more than 0.05 s"):
        isolated.call("lookup", [])
    assert isolated.call("lookup", []) == 0
    with pytest.raises(CallFailed, match="raised: fly: AttributeError"):
        isolated.call("fly")
    isolated.close()


def test_a_module_path_is_loaded_with_its_options() -> None:
    made = manager_maker(f"{NAME}:Picky", {"url": "http://localhost", "depth": 4})()
    assert isinstance(made, managers.Picky)
    assert (made.url, made.depth) == ("http://localhost", 4)


@pytest.mark.parametrize(
    ("path", "options", "parts"),
    [
        ("no_such_module:Manager", {}, ["'no_such_module'", "cannot be imported", "PYTHONPATH"]),
        (f"{NAME}:Nobody", {}, ["no class 'Nobody'", "it has", "Shelf"]),
        (f"{NAME}:Half", {}, ["class 'Half' lacks load, store"]),
        (NAME, {}, ["name it as package.module:Class"]),
        (":Shelf", {}, ["name it as package.module:Class"]),
        (f"{NAME}:Picky", {"depth": 4}, ["cannot be made with {'depth': 4}", "TypeError", "mend the options"]),
    ],
)
def test_what_cannot_be_loaded_is_named(path: str, options: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ExternalManagerError) as caught:
        manager_maker(path, options)()
    for part in [*parts, repr(path)]:
        assert part in str(caught.value)


def test_close_gives_up_a_call_that_hangs() -> None:
    gate = threading.Event()
    bench = Bench(lambda: managers.Late({}, gate, gate), timeout_s=60.0)
    job = CopyJob(7, key(1), Location("external", 0, 0, "it"), Location("host", 0, 1), SIZE)
    bench.mover.submit([job])
    while not bench.mover.queue_depth or not bench.mover._num_running:
        time.sleep(0.001)
    start = time.monotonic()
    bench.mover.close(0.05)
    assert time.monotonic() - start < 1.0
    (event,) = bench.collect(1)
    assert isinstance(event, TicketResult)
    assert "closed: load was given up" in str(event.error)
    gate.set()
