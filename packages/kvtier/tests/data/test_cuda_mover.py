"""The order and the addresses of CudaDeviceMover's copies, with streams and events that only take notes.

Nothing here runs on a device: what the notes cannot show is whether real streams overlap.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lamella.kvtier import CopyJob, Location, TicketResult
from lamella.kvtier.data import cuda_mover
from lamella.kvtier.data.cuda_mover import CudaDeviceMover
from lamella.kvtier.data.host_buffer import HostBuffer
from lamella.kvtier.data.pinning import SlabPinner
from lamella.kvtier.data.queue import EventQueue

KEY = b"k" * 32


class Notes:
    """What happened on which stream."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, ...]] = []
        self.current = "compute"
        self.num_streams = 0


class FakeStream:
    def __init__(self, notes: Notes, name: str) -> None:
        self.notes = notes
        self.name = name

    def wait_event(self, event: FakeEvent) -> None:
        self.notes.lines.append((self.name, "waits", event.recorded_on))


class FakeEvent:
    done = True

    def __init__(self) -> None:
        self.recorded_on = "nothing"

    def record(self, stream: FakeStream) -> None:
        self.recorded_on = stream.name

    def query(self) -> bool:
        return FakeEvent.done


class FakeTorch:
    """torch, but for its cuda."""

    def __init__(self, notes: Notes) -> None:
        names = iter(("loads", "stores"))
        compute = FakeStream(notes, "compute")

        @contextlib.contextmanager
        def stream(wanted: FakeStream) -> Iterator[None]:
            before, notes.current = notes.current, wanted.name
            yield
            notes.current = before

        self.cuda = SimpleNamespace(
            Stream=lambda device: FakeStream(notes, next(names)),
            Event=FakeEvent,
            stream=stream,
            current_stream=lambda device: compute,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class Copier:
    """Stands for a kernel."""

    def __init__(self, notes: Notes) -> None:
        self.notes = notes
        self.num_calls = 0

    def copy(self, source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
        self.num_calls += 1
        for a, b in pairs.tolist():
            target[b] = source[a]


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("with_copier", [True, False])
def test_blocks_go_both_ways(monkeypatch: pytest.MonkeyPatch, pinned: bool, with_copier: bool) -> None:
    notes = Notes()
    monkeypatch.setattr(cuda_mover, "torch", FakeTorch(notes))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(cuda_mover, "SlabPinner", lambda buffer: SlabPinner(buffer, lambda *_: 1 - pinned, lambda _: 0))
    copier = Copier(notes) if with_copier else None
    wide, narrow = (12, 2, 4, 6), (9, 1, 4, 10)
    caches = [tuple(torch.rand(shape) for _ in range(2)) for shape in (wide, narrow, wide)]
    sizes = [2 * 2 * 2 * 4 * 6 * 4, 2 * 4 * 10 * 4]
    buffer = HostBuffer(sizes, [6, 5], num_ranks=2)
    events = EventQueue()
    mover = CudaDeviceMover(buffer, [[0, 2], [1]], caches, events, rank=1, copier=copier)
    assert mover._pinner.wait(5.0)
    for group in (0, 1):
        buffer.region(group)[:] = b"\x07" * len(buffer.region(group))

    def block(layers: list[int], number: int) -> bytes:
        return b"".join(bytes(t[number].view(torch.uint8).flatten().tolist()) for n in layers for t in caches[n])

    def run(jobs: list[CopyJob]) -> None:
        mover.submit(jobs)
        ended: list[TicketResult] = []
        end = time.monotonic() + 10.0
        while len(ended) < len(jobs) and time.monotonic() < end:
            events.wait(1.0)
            ended += events.take()  # type: ignore[arg-type]
        assert [result.error for result in ended] == [None] * len(jobs)

    mover.after_step(0)
    where = [(0, 5, 3), (0, 11, 0), (1, 8, 4)]
    want = [block([0, 2] if group == 0 else [1], number) for group, number, _ in where]
    run([CopyJob(n, KEY, Location("device", g, b), Location("host", g, s), 1, 0) for n, (g, b, s) in enumerate(where)])
    assert ("stores", "waits", "compute") in notes.lines
    for (group, _, slot), content in zip(where, want):
        assert bytes(buffer.rank_view(group, slot, 1)) == content
        assert bytes(buffer.rank_view(group, slot, 0)) == b"\x07" * sizes[group]  # the other rank's
    notes.lines.clear()
    monkeypatch.setattr(FakeEvent, "done", False)  # what was enqueued has not ended
    back = [
        CopyJob(n, KEY, Location("host", g, s), Location("device", g, b - 3), 1) for n, (g, b, s) in enumerate(where)
    ]
    mover.submit(back)
    mover.before_step(1)
    for layer in range(3):
        mover.wait_layer(layer)
    assert [block([0, 2] if group == 0 else [1], number - 3) for group, number, _ in where] == want
    assert notes.lines.count(("compute", "waits", "loads")) == 3
    monkeypatch.setattr(FakeEvent, "done", True)
    mover.after_step(1)
    if copier is not None:
        assert copier.num_calls == (12 if pinned else 0)
    mover.close()
