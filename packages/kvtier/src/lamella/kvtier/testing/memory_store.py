"""A disk store without a disk: records in a dictionary, with the faults and the pace that a test asks for."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator

from lamella.kvtier.jobs import Presence, TicketId, TicketResult
from lamella.kvtier.keys import Key


class MemoryStore:
    """Same methods as DiskStore. Operations wait in a queue and are done, in order, by poll() and wait()."""

    engine_name = "memory"

    def __init__(self, capacity_bytes: int = 1 << 40) -> None:
        self.capacity_bytes = capacity_bytes
        self.records: dict[tuple[int, Key], tuple[Key | None, bytes]] = {}
        self.fail_writes = False
        self.fail_reads = False
        self.gate: threading.Event | None = None
        """Nothing ends before it is set."""
        self.closed = False
        self._pending: deque[tuple[TicketId, Callable[[], str | None]]] = deque()
        self._events: list[TicketResult | Presence] = []

    def content(self) -> Iterator[tuple[int, Key, Key | None]]:
        """(group, key, parent) of every record."""
        for (group, key), (parent, _) in list(self.records.items()):
            yield group, key, parent

    def write(self, ticket: TicketId, group: int, key: Key, parent: Key | None, data: memoryview) -> None:
        """Keep the data, which must stay as it is until the ticket ends."""

        def act() -> str | None:
            if self.fail_writes:
                return "EIO"
            if self.num_bytes + len(data) > self.capacity_bytes:
                return "full"
            self.records[group, key] = (parent, bytes(data))
            return None

        self._pending.append((ticket, act))

    def read(self, ticket: TicketId, group: int, key: Key, into: memoryview) -> None:
        """Fill `into`, or end as failed."""

        def act() -> str | None:
            found = self.records.get((group, key))
            if self.fail_reads or found is None or len(found[1]) != len(into):
                return "missing"
            into[:] = found[1]
            return None

        self._pending.append((ticket, act))

    def delete(self, group: int, key: Key) -> None:
        """Forget one record."""
        if self.records.pop((group, key), None) is not None:
            self._events.append(Presence("disk", "", (), ((group, key),)))

    def clear(self) -> None:
        """Forget all records."""
        removed = tuple(self.records)
        self.records.clear()
        self._events.append(Presence("disk", "", (), removed))

    def poll(self) -> list[TicketResult | Presence]:
        """What ended since the last call."""
        self._work()
        events, self._events = self._events, []
        return events

    def wait(self, timeout_s: float) -> bool:
        """Whether poll() has something to say, after at most timeout_s."""
        if self.gate is not None:
            self.gate.wait(timeout_s)
        self._work()
        return bool(self._events)

    def close(self) -> None:
        self.closed = True

    def stats(self) -> dict[str, float]:
        return {"num_blocks": len(self.records), "num_bytes": self.num_bytes, "capacity_bytes": self.capacity_bytes}

    @property
    def num_bytes(self) -> int:
        return sum(len(data) for _, data in self.records.values())

    def _work(self) -> None:
        while self._pending and (self.gate is None or self.gate.is_set()):
            ticket, act = self._pending.popleft()
            error = act()
            self._events.append(TicketResult(ticket, error is None, error))
