from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lamella.engine.links import endpoint
from lamella.engine.links.endpoint import Endpoint, sweep


def gone_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_folders_of_dead_processes_are_swept_and_no_others(tmp_path: Path) -> None:
    dead = tmp_path / f"lamella-{gone_pid()}-abc"
    alive = tmp_path / f"lamella-{os.getpid()}-abc"
    foreign = tmp_path / "lamella-notes-2"
    for folder in (dead, alive, foreign):
        folder.mkdir()
        (folder / "to_core").touch()
    link = tmp_path / f"lamella-{gone_pid()}-link"
    link.symlink_to(alive)
    assert sweep(tmp_path) == [dead]
    assert not dead.exists()
    assert alive.exists()
    assert foreign.exists()
    assert link.is_symlink()


def test_a_run_has_a_private_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint.tempfile, "tempdir", str(tmp_path))
    first, second = Endpoint(), Endpoint()
    assert first.folder != second.folder
    assert first.folder.stat().st_mode & 0o777 == 0o700
    assert first.to_core == f"ipc://{first.folder}/to_core"
    first.remove()
    first.remove()
    assert not first.folder.exists()
    second.remove()


def test_a_long_temporary_folder_does_not_make_the_path_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 80)
    deep.mkdir()
    monkeypatch.setattr(endpoint.tempfile, "tempdir", str(deep))
    made = Endpoint()
    assert len(f"{made.folder}/to_client") <= 103
    made.remove()
