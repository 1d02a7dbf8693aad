"""The native module against its Python references."""

from __future__ import annotations

import array
import errno
import os
import random
import struct
import time
from pathlib import Path

import pytest

from lamella.kvtier import Extras, KeyChain, Media, keys
from lamella.kvtier.data.disk.checksum import reference_crc32c

_C = pytest.importorskip("lamella.kvtier._C")


@pytest.mark.parametrize("function", [_C.crc32c, _C.crc32c_table, reference_crc32c])
def test_crc32c_is_the_one_of_rfc_3720(function) -> None:
    assert function(b"") == 0
    assert function(b"123456789") == 0xE3069283
    assert function(bytes(32)) == 0x8A9136AA
    assert function(b"\xff" * 32) == 0x62A8AB43
    assert function(bytes(range(32))) == 0x46DD794E


def test_crc32c_agrees_on_every_length_and_offset() -> None:
    rng = random.Random(1)
    data = rng.randbytes(3 * 8192 + 3 * 256 + 50)
    for length in [*range(40), 255, 256, 257, 767, 768, 769, 8191, 24575, 24576, 24577, len(data) - 8]:
        for start in (0, 1, 7):
            part = memoryview(data)[start : start + length]
            expected = reference_crc32c(part) if length < 1000 else _C.crc32c_table(part)
            assert _C.crc32c(part) == expected
            assert _C.crc32c(part[length // 3 :], _C.crc32c(part[: length // 3])) == expected


@pytest.mark.parametrize("size", [1, 2, 11, 15, 16, 17, 23, 24, 32, 48, 55, 56, 64, 300])
@pytest.mark.parametrize("kind", [list, tuple, lambda ids: array.array("I", ids)])
def test_native_chains_equal_the_reference(size: int, kind, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(size)
    ids = [rng.choice((0, 2**32 - 1, rng.randrange(2**32))) for _ in range(40 * size + size // 2)]
    native = KeyChain(size, Extras(salt="s"))
    native.extend(kind(ids[: 7 * size + 1]))
    native.extend(kind(ids))
    monkeypatch.setattr(keys, "native", None)
    assert native.keys == KeyChain(size, Extras(salt="s")).extend(kind(ids))
    assert len(native.keys) == 40
    portable: list[bytes] = []
    _C.chain_keys(native.parent(0), kind(ids), 0, size, 40, portable, portable=True)
    assert portable == native.keys


def test_chains_with_media_take_the_reference() -> None:
    ids = list(range(400))
    plain, media = KeyChain(4), KeyChain(4, Extras(media=(Media(b"x", 200, 4),)))
    assert plain.extend(ids)[:50] == media.extend(ids)[:50]
    assert plain.keys[50] != media.keys[50]


@pytest.mark.parametrize("bad", [-1, 2**32, 2**70])
def test_ids_out_of_range_are_refused_like_by_the_reference(bad: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [1] * 30 + [bad] + [1] * 33
    chain = KeyChain(4)
    with pytest.raises(struct.error):
        chain.extend(ids)
    monkeypatch.setattr(keys, "native", None)
    with pytest.raises(struct.error):
        KeyChain(4).extend(ids)


def test_ids_that_only_index_as_integers_are_taken() -> None:
    class Id:
        def __index__(self) -> int:
            return 7

    assert KeyChain(4).extend([Id()] * 64) == KeyChain(4).extend([7] * 64)


def test_keys_of_a_long_prompt(record_property) -> None:
    ids = array.array("I", random.Random(0).choices(range(150_000), k=1_600_000))
    best = 1.0
    for _ in range(5):
        chain = KeyChain(16)
        start = time.perf_counter()
        chain.extend(ids)
        best = min(best, time.perf_counter() - start)
    record_property("figure", f"keys of 100,000 blocks of 16 tokens: {best * 1e3:.1f} ms")


@pytest.fixture(params=["io_uring", "threads"])
def engine(request: pytest.FixtureRequest):
    try:
        made = _C.IoEngine(request.param, 4, 4)
    except OSError as problem:
        pytest.skip(f"{request.param}: {problem}")
    yield made
    made.close()


def test_an_engine_transfers_more_ops_than_fit_at_once(engine, tmp_path: Path) -> None:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    data = random.Random(0).randbytes(100 * 1000)
    engine.submit([(n, fd, True, n * 1000, (data[n * 1000 : n * 1000 + 300], data[n * 1000 + 300 : n * 1000 + 1000]))
                   for n in range(100)])  # fmt: skip
    done = {}
    while len(done) < 100:
        done.update(engine.wait(1, 5.0))
    assert done == dict.fromkeys(range(100), 1000)
    into = bytearray(len(data))
    view = memoryview(into)
    engine.submit([(n, fd, False, n * 1000, (view[n * 1000 : n * 1000 + 1000],)) for n in range(100)])
    done = {}
    while len(done) < 100:
        done.update(engine.wait(100 - len(done), 5.0))
    assert into == data
    os.close(fd)


def test_an_engine_tells_short_reads_and_errors(engine, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"0123456789")
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    into = bytearray(100)
    engine.submit([(1, fd, False, 4, (into,)), (2, fd, False, 10, (bytearray(5),)), (3, fd, True, 0, (b"x",)),
                   (4, 9999, False, 0, (bytearray(5),))])  # fmt: skip
    done = {}
    while len(done) < 4:
        done.update(engine.wait(1, 5.0))
    assert done == {1: 6, 2: 0, 3: -errno.EBADF, 4: -errno.EBADF}
    assert into[:6] == b"456789"
    os.close(fd)


def test_waiting_ends_at_the_timeout_and_when_woken(engine) -> None:
    start = time.monotonic()
    assert engine.wait(1, 0.05) == []
    assert time.monotonic() - start >= 0.04
    engine.wake()
    start = time.monotonic()
    assert engine.wait(1, 5.0) == []
    assert time.monotonic() - start < 4


def test_buffers_are_held_until_the_op_is_done(engine, tmp_path: Path) -> None:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    into = bytearray(b"x" * 4096)
    engine.submit([(1, fd, True, 0, (into,))])
    while not engine.wait(1, 1.0):
        pass
    into.append(0)  # would raise while exported
    os.close(fd)


def test_a_file_that_refuses_direct_transfers_is_buffered(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    file = _C.AlignedFile(folder, "file", True, True, True)
    assert file.alignment in ((512, 4096) if file.direct else (1,))
    assert oct(os.stat(tmp_path / "file").st_mode & 0o777) == "0o600"
    assert file.preallocate(1 << 20) == 0
    assert file.truncate(4096) == 0
    file.close()
    with pytest.raises(FileExistsError):
        _C.AlignedFile(folder, "file", True, True, True)
    with pytest.raises(FileNotFoundError):
        _C.AlignedFile(folder, "none", False, False, True)
    plain = _C.AlignedFile(folder, "file", False, False, False)
    assert not plain.direct
    assert plain.alignment == 1
    plain.drop_cache()
    plain.close()
    os.close(folder)
