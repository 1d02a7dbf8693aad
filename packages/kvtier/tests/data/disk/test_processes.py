"""Real processes on one folder: killed at any moment, beside each other, and in each other's place.

The oracle: which blocks a process writes depends on its seed alone, and what a block contains on its key alone.
"""

from __future__ import annotations

import itertools
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lamella.kvtier.data.disk.checksum import native
from lamella.kvtier.data.disk.store import DiskStore
from lamella.kvtier.data.disk.verify import verify_folder
from lamella.kvtier.jobs import Presence
from lamella.kvtier.testing.disk_process import CAPACITY, MAX_OPEN, block_of, blocks, open_store, results

ENGINES = ["auto", "threads", "python"] if native is not None else ["python"]
Written = dict[tuple[int, bytes], "bytes | None"]
"""(group, key) -> parent of what processes were given to write."""


class Writer:
    """A process that writes until it is killed."""

    def __init__(self, folder: Path, seed: int, engine: str, *count: str) -> None:
        program = [sys.executable, "-m", "lamella.kvtier.testing.disk_process", str(folder), str(seed), engine, *count]
        self.seed = seed
        self.process = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "opened\n"
        self.told = ""

    def wait(self, count: int) -> None:
        """Until it has been told that so many blocks are written."""
        assert self.process.stdout is not None
        for _ in range(count):
            self.told += self.process.stdout.readline()

    def acknowledged(self, kill: bool = True) -> set[tuple[int, bytes]]:
        """End it, or wait for its end; what it has been told to be written."""
        if kill:
            self.process.send_signal(signal.SIGKILL)
        assert self.process.stdout is not None
        lines = (self.told + self.process.stdout.read()).split("\n")
        self.process.stdout.close()
        assert self.process.wait() == (-signal.SIGKILL if kill else 0)
        words = [line.split() for line in lines[:-1]]  # the last one may be torn
        return {(int(group), bytes.fromhex(name)) for word, group, name in (w for w in words if w[0] == "ok")}

    def given(self, num_acknowledged: int) -> Written:
        """All that it can have written."""
        stream = itertools.islice(blocks(self.seed), num_acknowledged + MAX_OPEN)
        return {(group, name): parent for group, name, parent in stream}


def read_all(store: DiskStore, records: list[tuple[int, bytes]]) -> None:
    """Every record is there and is what its key says."""
    into = [bytearray(len(block_of(group, name))) for group, name in records]
    for ticket, (group, name) in enumerate(records):
        store.read(ticket, group, name, memoryview(into[ticket]))
    read = results(store, len(records)) if records else {}
    for ticket, (group, name) in enumerate(records):
        assert read[ticket].ok, f"a listed record is damaged: {read[ticket].error}"
        assert into[ticket] == block_of(group, name), "a record is not what its key says"


def check_folder(folder: Path, engine: str, acknowledged: set[tuple[int, bytes]], given: Written) -> int:
    """Open a folder whose processes are gone; number of blocks found. All that was acknowledged is there, unless older
    segments had to go; nothing else, and nothing damaged."""
    store = open_store(str(folder), engine)
    content = list(store.content())
    taken = sum(path.stat().st_size for path in folder.iterdir())
    assert taken <= CAPACITY, "more space than allowed"
    for group, name, parent in content:
        assert (group, name) in given, "a record that nobody wrote"
        assert parent == given[group, name], "a record behind another block than its own"
    read_all(store, [(group, name) for group, name, _ in content])
    held = {(int.from_bytes(name[:4], "little"), name[4:]) for name in store._store.index.records}
    if taken < CAPACITY * 5 // 8:
        assert acknowledged <= held, "what was acknowledged did not survive"
    store.close()
    assert verify_folder(folder).ok
    return len(content)


def kill_and_reopen(folder: Path, seed: int, engine: str, given: Written) -> int:
    """One process, killed at a random moment; given: what earlier ones may have left, and grows."""
    writer = Writer(folder, seed, engine)
    time.sleep(random.Random(seed).random() * 0.12)
    acknowledged = writer.acknowledged()
    given.update(writer.given(len(acknowledged)))
    return check_folder(folder, engine, acknowledged, given)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_process_killed_at_any_moment_leaves_nothing_wrong(engine: str, tmp_path: Path) -> None:
    given: list[Written] = [{}, {}]
    total = sum(kill_and_reopen(tmp_path / f"kv{seed % 2}", seed, engine, given[seed % 2]) for seed in range(5))
    assert total > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_hundred_kills(tmp_path: Path) -> None:
    given: list[Written] = [{} for _ in range(5)]
    for seed in range(200):
        kill_and_reopen(tmp_path / f"kv{seed % 5}", seed, ENGINES[seed % len(ENGINES)], given[seed % 5])


def kill_two(folder: Path, seed: int, engine: str) -> None:
    """Two processes write into one folder; one is killed, later the other."""
    rng = random.Random(seed)
    one, two = Writer(folder, 2 * seed, engine), Writer(folder, 2 * seed + 1, engine)
    time.sleep(rng.random() * 0.1)
    first = one.acknowledged()
    time.sleep(rng.random() * 0.15)  # the other may take over meanwhile, and be killed in the midst of it
    second = two.acknowledged()
    check_folder(folder, engine, first | second, {**one.given(len(first)), **two.given(len(second))})


@pytest.mark.parametrize("engine", ENGINES)
def test_of_two_processes_both_are_killed(engine: str, tmp_path: Path) -> None:
    for seed in range(2):
        kill_two(tmp_path / f"kv{seed}", seed, engine)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fifty_pairs_are_killed(tmp_path: Path) -> None:
    for seed in range(50):
        kill_two(tmp_path / f"kv{seed}", seed, ENGINES[seed % len(ENGINES)])


@pytest.mark.parametrize("engine", ENGINES)
def test_the_segment_of_a_dead_writer_is_taken_over(engine: str, tmp_path: Path) -> None:
    """By a store that is open all the while, without a restart."""
    folder = tmp_path / "kv"
    store = open_store(str(folder), engine)
    writer = Writer(folder, 3, ENGINES[-1])
    writer.wait(40)  # more than one segment, and less than the folder may hold
    acknowledged = writer.acknowledged()
    added = set(await_added(store, acknowledged))
    given = writer.given(len(acknowledged))
    assert added <= given.keys(), "a record that nobody wrote"
    read_all(store, sorted(added))
    end = time.monotonic() + 30
    while own := [path.name for path in folder.glob("*.open")]:
        # the last one may hold nothing that was acknowledged, and so be taken over after all that was
        assert time.monotonic() < end, f"{own} still open, though nobody writes"
        store.wait(0.1)
        store.poll()
    store.close()
    # records that were written and not yet acknowledged may have been found since
    assert len(added) <= check_folder(folder, engine, acknowledged, given) <= len(given)


def test_two_processes_read_each_others_blocks(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    store = open_store(str(folder), ENGINES[0])
    writer = Writer(folder, 1, ENGINES[-1], "60")
    written = writer.acknowledged(kill=False)
    assert written == set(writer.given(60 - MAX_OPEN))
    assert set(await_added(store, written)) == written
    read_all(store, sorted(written))
    store.close()


def await_added(store: DiskStore, wanted: set[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """What others' segments have brought, as soon as all that is wanted is among it. Not twice."""
    added: list[tuple[int, bytes]] = []
    end = time.monotonic() + 20
    while not wanted <= set(added):
        assert time.monotonic() < end, f"{len(wanted - set(added))} of {len(wanted)} records never came"
        store.wait(0.1)
        for event in store.poll():
            if isinstance(event, Presence):
                added += [(group, name) for group, name, _ in event.added]
    assert len(set(added)) == len(added)
    return added
