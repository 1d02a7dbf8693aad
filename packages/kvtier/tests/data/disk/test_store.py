"""DiskStore on a real folder: threads, permissions, compression."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from lamella.kvtier import KvTierError
from lamella.kvtier.data.disk import checkpoint, compression
from lamella.kvtier.data.disk.checksum import native
from lamella.kvtier.data.disk.header import PAGE
from lamella.kvtier.data.disk.index import Record, name_of
from lamella.kvtier.data.disk.measure import measure_folder, probe_reads
from lamella.kvtier.data.disk.segment import SegmentName
from lamella.kvtier.data.disk.store import DiskStore
from lamella.kvtier.data.disk.verify import verify_folder
from lamella.kvtier.jobs import Presence
from lamella.kvtier.testing.disk_process import results

FINGERPRINT = b"f" * 16
ENGINES = ["auto", "threads", "python"] if native is not None else ["python"]


def key(n: int) -> bytes:
    return hashlib.blake2b(n.to_bytes(4, "little"), digest_size=32).digest()


def make(folder: Path, **options) -> DiskStore:
    options = {"fingerprint": FINGERPRINT, "capacity_bytes": 64 << 20, **options}
    return DiskStore(folder / "kv", **options)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("num_bytes", [1, 4096, 100_000])
def test_blocks_survive_a_restart(engine: str, num_bytes: int, tmp_path: Path) -> None:
    rng = random.Random(0)
    blocks = [rng.randbytes(num_bytes) for _ in range(50)]
    with_store = make(tmp_path, engine=engine)
    for n, data in enumerate(blocks):
        with_store.write(n, 1, key(n), key(n - 1) if n else None, memoryview(data))
    assert all(result.ok for result in results(with_store, 50).values())
    assert [name for _, name, _ in with_store.content()] == [key(n) for n in range(50)]
    with_store.close()
    store = make(tmp_path, engine=engine)
    assert list(store.content()) == [(1, key(n), key(n - 1) if n else None) for n in range(50)]
    memory = memoryview(bytearray(50 * num_bytes))
    for n in range(50):
        store.read(n, 1, key(n), memory[n * num_bytes : (n + 1) * num_bytes])
    assert all(result.ok for result in results(store, 50).values())
    assert memory == b"".join(blocks)
    stats = store.stats()
    assert (stats["reads"], stats["num_blocks"], stats["faults"]) == (50, 50, {})
    store.close()
    report = verify_folder(tmp_path / "kv")
    assert report.ok
    assert (report.records, report.num_bytes, report.unfinished) == (50, 50 * num_bytes, 0)
    assert report.fingerprints == {FINGERPRINT.hex(): 50}


def test_files_are_private(tmp_path: Path) -> None:
    store = make(tmp_path)
    store.write(1, 0, key(1), None, memoryview(b"x" * 5000))
    results(store, 1)
    store.close()
    assert oct((tmp_path / "kv").stat().st_mode & 0o777) == "0o700"
    modes = {oct(path.stat().st_mode & 0o777) for path in (tmp_path / "kv").iterdir()}
    assert modes == {"0o600"}


def test_a_closed_store_refuses_and_says_so(tmp_path: Path) -> None:
    store = make(tmp_path)
    store.close()
    store.close()
    store.read(1, 0, key(1), memoryview(bytearray(10)))
    store.write(2, 0, key(1), None, memoryview(bytearray(10)))
    assert [event.error for event in store.poll()] == ["closed", "closed"]
    assert list(store.content()) == []


def test_mistakes_are_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(KvTierError, match="io_urin"):
        make(tmp_path, engine="io_urin")
    with pytest.raises(KvTierError, match="none or zstd"):
        make(tmp_path, compress="lz4")
    (tmp_path / "kv").write_bytes(b"")
    with pytest.raises(KvTierError, match="cannot be used"):
        make(tmp_path)
    store = DiskStore(tmp_path / "other", fingerprint=FINGERPRINT, capacity_bytes=1 << 30)
    with pytest.raises(ValueError, match="32 bytes"):
        store.read(1, 0, b"short", memoryview(bytearray(10)))
    store.close()


def test_a_folder_deleted_under_a_store_ends_as_misses(tmp_path: Path) -> None:
    store = make(tmp_path, rescan_s=0.05)
    store.write(1, 0, key(1), None, memoryview(b"x" * 5000))
    assert results(store, 1)[1].ok
    shutil.rmtree(tmp_path / "kv")
    end = time.monotonic() + 20
    removed: list[bytes] = []
    store.write(2, 0, key(2), None, memoryview(b"x" * 50_000))
    while time.monotonic() < end and store.stats()["num_blocks"] > 1:
        store.wait(0.1)
        removed += [name for event in store.poll() if isinstance(event, Presence) for _, name in event.removed]
    store.read(3, 0, key(3), memoryview(bytearray(5000)))
    while 3 not in (found := results(store, 1)):
        pass
    assert not found[3].ok
    store.close()
    assert not (tmp_path / "kv").exists(), "it is not made again behind the user's back"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_write_permission_is_read(tmp_path: Path) -> None:
    store = make(tmp_path)
    store.write(1, 0, key(1), None, memoryview(b"x" * 5000))
    results(store, 1)
    store.close()
    (tmp_path / "kv").chmod(0o500)
    store = make(tmp_path)
    store.read(1, 0, key(1), memoryview(bytearray(5000)))
    assert results(store, 1)[1].ok
    store.close()
    (tmp_path / "kv").chmod(0o700)


def test_a_tiny_file_system_that_is_full(tmp_path: Path) -> None:
    place = tmp_path / "tiny"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"mounting is refused: {mounted.stderr.strip()}")
    try:
        store = make(place, capacity_bytes=64 << 20, segment_bytes=256 << 10)
        data = os.urandom(60_000)
        for n in range(60):
            store.write(n, 0, key(n), None, memoryview(data))
        found = results(store, 60)
        kept = [n for n in range(60) if found[n].ok]
        assert 10 < len(kept) < 60
        assert {found[n].error for n in range(60) if not found[n].ok} <= {"no space", "failed"}
        into = [bytearray(60_000) for _ in kept]
        for n, view in zip(kept, into):
            store.read(n, 0, key(n), memoryview(view))
        assert all(result.ok for result in results(store, len(kept)).values())
        assert all(view == data for view in into)
        store.close()
        assert verify_folder(place / "kv").ok
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_compression_shrinks_and_gives_the_same_bytes(tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    data = [b"lamella " * 5000, os.urandom(40_000)]
    store = make(tmp_path, compress="zstd")
    for n in range(2):
        store.write(n, 0, key(n), None, memoryview(data[n]))
    results(store, 2)
    store.close()
    store = make(tmp_path)  # what was compressed is read whatever is written now
    into = [bytearray(40_000) for _ in range(2)]
    for n in range(2):
        store.read(n, 0, key(n), memoryview(into[n]))
    assert all(result.ok for result in results(store, 2).values())
    assert into == data
    store.close()
    assert verify_folder(tmp_path / "kv").file_bytes < 70_000


def test_compression_without_its_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(compression.importlib, "import_module", missing)
    with pytest.raises(KvTierError, match=r"kvtier\[zstd\]"):
        make(tmp_path, compress="zstd")


def test_damage_is_found_offline(tmp_path: Path) -> None:
    store = make(tmp_path)
    for n in range(3):
        store.write(n, 0, key(n), None, memoryview(b"x" * 5000))
    results(store, 3)
    store.close()
    segment = next((tmp_path / "kv").glob("*.kv"))
    data = bytearray(segment.read_bytes())
    data[PAGE + 17] ^= 1
    data[2 * 3 * PAGE + 40] ^= 1
    segment.write_bytes(data)
    report = verify_folder(tmp_path / "kv")
    assert report.faults == {"checksum": 1, "header": 1}
    assert report.records == 1
    assert not report.ok
    with pytest.raises(KvTierError, match="cannot be read"):
        verify_folder(tmp_path / "none")


@pytest.mark.parametrize("num_bytes", [5000, 1 << 20])
def test_a_probe_tells_speed_and_latency_and_leaves_nothing_behind(num_bytes: int, tmp_path: Path) -> None:
    probe = probe_reads(tmp_path, num_bytes, seconds=0.02, max_bytes=4 << 20)
    assert probe is not None
    assert probe.bytes_per_s > 1e6
    assert 0 <= probe.latency_s < 1
    assert list(tmp_path.iterdir()) == []
    assert probe_reads(tmp_path / "none", num_bytes) is None


def test_measuring_leaves_nothing_behind(tmp_path: Path) -> None:
    speed = measure_folder(tmp_path, 64 << 10, depth=4, seconds=0.3, max_bytes=16 << 20)
    assert speed.write.bytes_per_s > 0
    assert speed.read.p99_s >= speed.read.p50_s > 0
    assert speed.peer in ("fio", "raw loop")
    assert speed.read_ratio is not None
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_of_many_records_opens_quickly(tmp_path: Path, record_property) -> None:
    """A synthetic one of 50,000 records in a segment of holes; the bench has a million."""
    folder = tmp_path / "kv"
    folder.mkdir(mode=0o700)
    segment = SegmentName(1, FINGERPRINT[:4].hex(), "a" * 8, True).file
    count = 50_000
    with open(folder / segment, "wb") as file:
        file.truncate(count * 2 * PAGE)
    names = [name_of(0, key(n)) for n in range(count)]
    records = [
        (names[n], Record(0, n * 2 * PAGE, PAGE, PAGE, 0, names[n - 1] if n % 100 else None)) for n in range(count)
    ]
    data = checkpoint.encode(FINGERPRINT, [(segment, count * 2 * PAGE)], records, set())
    (folder / f"index-{FINGERPRINT[:4].hex()}.ckpt").write_bytes(data)
    start = time.perf_counter()
    store = make(tmp_path, capacity_bytes=1 << 40)
    record_property("figure", f"restart of {count} records: {time.perf_counter() - start:.2f} s")
    assert sum(1 for _ in store.content()) == count
    store.read(1, 0, names[5][4:], memoryview(bytearray(PAGE)))
    assert results(store, 1)[1].error == "magic"
    store.close()
