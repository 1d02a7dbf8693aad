"""What every `Disk` must do, by each of them."""

from __future__ import annotations

import errno
import mmap
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from lamella.kvtier import KvTierError
from lamella.kvtier.data.disk.checksum import native
from lamella.kvtier.data.disk.posix_disk import PosixDisk
from lamella.kvtier.data.disk.python_disk import PythonDisk
from lamella.kvtier.protocols import Disk, DiskDone, DiskOp
from lamella.kvtier.testing.fake_clock import FakeClock
from lamella.kvtier.testing.fake_disk import FakeDisk, FakeFolder

PAGE = 4096
Open = Callable[[], Disk]


@pytest.fixture(params=["io_uring", "threads", "python", "fake"])
def open_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    if request.param == "fake":
        folder, clock = FakeFolder(), FakeClock()
        return lambda: FakeDisk(folder, clock, 1)
    if request.param == "python":
        return lambda: PythonDisk(str(tmp_path / "disk"))
    if native is None:
        pytest.skip("the native module is not built")

    def make() -> Disk:
        try:
            return PosixDisk(str(tmp_path / "disk"), request.param, 8)
        except KvTierError as problem:
            pytest.skip(str(problem))

    return make


def pages(num_bytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, num_bytes))


def finish(disk: Disk, count: int) -> dict[int, int]:
    done: list[DiskDone] = []
    for _ in range(1000):
        done += disk.poll(1, 0.1)
        if len(done) >= count:
            break
    assert len(done) == count
    return dict(done)


def test_what_is_written_is_read(open_disk: Open) -> None:
    disk = open_disk()
    disk.create("file", 64 * PAGE)
    rng = random.Random(0)
    sources = []
    for _ in range(16):
        head, body = pages(PAGE), pages(3 * PAGE)
        head[:], body[:] = rng.randbytes(PAGE), rng.randbytes(3 * PAGE)
        sources.append((head, body))
    disk.submit([DiskOp(n, True, "file", 4 * n * PAGE, parts) for n, parts in enumerate(sources)])
    assert finish(disk, 16) == dict.fromkeys(range(16), 4 * PAGE)
    into = [pages(4 * PAGE) for _ in range(16)]
    disk.submit([DiskOp(n, False, "file", 4 * n * PAGE, (view,)) for n, view in enumerate(into)])
    assert finish(disk, 16) == dict.fromkeys(range(16), 4 * PAGE)
    assert [bytes(view) for view in into] == [bytes(head) + bytes(body) for head, body in sources]
    disk.close()


def test_files_are_sealed_and_removed(open_disk: Open) -> None:
    disk = open_disk()
    disk.create("a", 8 * PAGE)
    with pytest.raises(FileExistsError):
        disk.create("a", PAGE)
    source = pages(2 * PAGE)
    disk.submit([DiskOp(1, True, "a", 0, (source,))])
    assert finish(disk, 1) == {1: 2 * PAGE}
    disk.seal("a", "b", PAGE)
    assert disk.names() == {"b": PAGE}
    assert disk.size("b") == PAGE
    into = pages(2 * PAGE)
    disk.submit([DiskOp(2, False, "b", 0, (into,)), DiskOp(3, False, "b", 4 * PAGE, (pages(PAGE),))])
    assert finish(disk, 2) == {2: PAGE, 3: 0}
    disk.remove("b")
    assert disk.names() == {}
    with pytest.raises(FileNotFoundError):
        disk.remove("b")
    with pytest.raises(FileNotFoundError):
        disk.size("b")
    disk.close()


def test_transfers_of_files_that_are_not_there_are_told(open_disk: Open) -> None:
    disk = open_disk()
    disk.submit([DiskOp(1, False, "none", 0, (pages(PAGE),))])
    assert finish(disk, 1) == {1: -errno.ENOENT}
    disk.close()


def test_an_open_file_outlives_its_name(open_disk: Open) -> None:
    disk = open_disk()
    disk.create("a", PAGE)
    source = pages(PAGE)
    source[:] = b"x" * PAGE
    disk.submit([DiskOp(1, True, "a", 0, (source,))])
    finish(disk, 1)
    into = pages(PAGE)
    disk.submit([DiskOp(2, False, "a", 0, (into,))])
    disk.remove("a")
    assert finish(disk, 1) == {2: PAGE}
    assert bytes(into) == b"x" * PAGE
    disk.close()


def test_small_files_are_replaced_whole(open_disk: Open) -> None:
    disk = open_disk()
    disk.put("small", b"one")
    disk.put("small", b"another")
    assert disk.get("small") == b"another"
    assert list(disk.names()) == ["small"]
    with pytest.raises(FileNotFoundError):
        disk.get("none")
    disk.close()


def test_a_lock_has_one_holder(open_disk: Open) -> None:
    first, second = open_disk(), open_disk()
    assert first.lock("lock")
    assert first.lock("lock")
    assert not second.lock("lock")
    first.unlock("lock")
    assert second.lock("lock")
    second.close()
    assert first.lock("lock")
    first.unlock("lock", remove=True)
    assert first.names() == {}
    first.close()


def test_polling_an_idle_disk_ends(open_disk: Open) -> None:
    disk = open_disk()
    assert disk.poll(1, 0.01) == []
    disk.wake()
    assert disk.poll(1, 10.0) == []
    disk.close()


@pytest.mark.parametrize("make", [PythonDisk, PosixDisk])
def test_folder_and_files_are_private(make: type[PythonDisk], tmp_path: Path) -> None:
    if native is None and make is PosixDisk:
        pytest.skip("the native module is not built")
    folder = tmp_path / "disk"
    folder.mkdir(mode=0o755)
    disk = make(str(folder))
    disk.create("a", PAGE)
    disk.put("b", b"x")
    disk.lock("c")
    assert oct(folder.stat().st_mode & 0o777) == "0o700"
    assert {name: oct(os.stat(folder / name).st_mode & 0o777) for name in "abc"} == dict.fromkeys("abc", "0o600")
    disk.close()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(KvTierError, match="cannot be used"):
        PythonDisk(str(tmp_path / "file" / "disk"))
