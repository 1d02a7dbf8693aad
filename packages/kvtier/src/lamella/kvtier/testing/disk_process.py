"""A process that writes to a disk store until it is killed, and says on its standard output what was acknowledged.

    python -m lamella.kvtier.testing.disk_process FOLDER SEED ENGINE [COUNT]

Each line: "ok GROUP KEY"; with COUNT, that many blocks are written, the store is closed and "closed" printed. Which
blocks it writes, in which order, depends on the seed alone: blocks() knows them, too.
"""

from __future__ import annotations

import hashlib
import random
import sys
import time
from collections.abc import Iterator

from lamella.kvtier.data.disk.store import DiskStore
from lamella.kvtier.jobs import TicketResult

FINGERPRINT = b"disk_process    "
CAPACITY = 8 << 20
MAX_OPEN = 32


def block_of(group: int, key: bytes) -> bytes:
    """The content that belongs to a key: 20,000 bytes, or 12 KiB."""
    seed = hashlib.blake2b(key + bytes([group])).digest()
    num_bytes = 20_000 if group == 0 else 12_288
    return (seed * (num_bytes // len(seed) + 1))[:num_bytes]


def results(store: DiskStore, count: int) -> dict[int, TicketResult]:
    """So many ends of jobs, by ticket. AssertionError with the store's stats after half a minute."""
    found: dict[int, TicketResult] = {}
    end = time.monotonic() + 30
    while len(found) < count:
        assert time.monotonic() < end, store.stats()
        store.wait(1.0)
        found.update({event.ticket: event for event in store.poll() if isinstance(event, TicketResult)})
    return found


def blocks(seed: int) -> Iterator[tuple[int, bytes, bytes | None]]:
    """(group, key, parent) of everything that a process with this seed would write, without end."""
    rng = random.Random(seed)
    keys: tuple[list[bytes], list[bytes]] = ([], [])
    while True:
        group, key = rng.randrange(2), rng.randbytes(32)
        parent = rng.choice(keys[group][-8:]) if keys[group] and rng.random() < 0.8 else None
        keys[group].append(key)
        yield group, key, parent


def open_store(folder: str, engine: str) -> DiskStore:
    return DiskStore(
        folder, fingerprint=FINGERPRINT, capacity_bytes=CAPACITY, engine=engine, rescan_s=0.05, segment_bytes=512 << 10
    )


def main() -> None:
    folder, seed, engine = sys.argv[1:4]
    count = int(sys.argv[4]) if len(sys.argv) > 4 else 1 << 60
    stream = blocks(int(seed))
    store = open_store(folder, engine)
    print("opened", flush=True)
    given: dict[int, tuple[int, bytes, bytes]] = {}
    ticket = 0
    while ticket < count or given:
        while len(given) < MAX_OPEN and ticket < count:
            group, key, parent = next(stream)
            data = block_of(group, key)
            given[ticket] = (group, key, data)
            store.write(ticket, group, key, parent, memoryview(data))
            ticket += 1
        store.wait(1.0)
        for event in store.poll():
            if isinstance(event, TicketResult):
                group, key, _ = given.pop(event.ticket)
                if event.ok:
                    print("ok", group, key.hex(), flush=True)
    store.close()
    print("closed", flush=True)


if __name__ == "__main__":
    main()
