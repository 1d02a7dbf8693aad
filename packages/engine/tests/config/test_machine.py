"""What a container leaves of the machine is what counts."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from lamella.engine.config.machine import read_machine


def write(root: Path, group: str, **files: str) -> None:
    """Files of a group below sys/fs/cgroup; _ stands for the dot in a name."""
    folder = root / "sys/fs/cgroup" / group
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(text + "\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    return tmp_path


def inside(root: Path, text: str) -> None:
    (root / "proc/self/cgroup").write_text(text)


def test_a_machine_is_no_larger_than_its_container(root: Path) -> None:
    whole = read_machine(root)
    assert 1 <= whole.cores <= whole.logical_cores == os.cpu_count()
    assert 0 < whole.available_bytes <= whole.total_bytes == psutil.virtual_memory().total
    inside(root, "0::/\n")
    write(root, "", cpu_max="50000 100000", memory_max="1000000", memory_current="400000")
    small = read_machine(root)
    assert (small.cores, small.available_bytes, small.total_bytes) == (1, 600_000, 1_000_000)
    assert small.name.endswith(", 1 core")


def test_a_quota_is_rounded_down(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamella.engine.config.machine._usable_cores", lambda: 8)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 6)
    assert read_machine(root).cores == 6
    inside(root, "0::/\n")
    write(root, "", cpu_max="290000 100000")
    assert read_machine(root).cores == 2
