"""What the files of control groups say, in both of their layouts."""

from __future__ import annotations

from pathlib import Path

import pytest

from lamella.runner_v2.cgroup import Limits, read_limits

GIB = 1 << 30


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


def test_without_groups_there_is_no_limit(root: Path) -> None:
    assert read_limits(root) == Limits(None, None, None)
    inside(root, "0::/\n")
    assert read_limits(root) == Limits(None, None, None)
    write(root, "", cpu_max="max 100000", memory_max="max", memory_current="5")
    assert read_limits(root) == Limits(None, None, None)


def test_a_container_that_sees_its_own_group_as_the_root(root: Path) -> None:
    inside(root, "0::/\n")
    write(root, "", cpu_max="150000 100000", memory_max=str(4 * GIB), memory_current=str(3 * GIB))
    write(root, "", memory_stat=f"anon 7\ninactive_file {GIB}\nactive_file {GIB // 2}")
    assert read_limits(root) == Limits(1.5, 4 * GIB, 2 * GIB + GIB // 2)


def test_the_narrowest_of_a_group_and_those_above_holds(root: Path) -> None:
    inside(root, "0::/a.slice/b.scope\n")
    write(root, "a.slice/b.scope", cpu_max="400000 100000", memory_max=str(4 * GIB), memory_current="0")
    write(root, "a.slice", cpu_max="300000 100000", memory_max=str(8 * GIB), memory_current=str(7 * GIB))
    assert read_limits(root) == Limits(3.0, 4 * GIB, GIB)


@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
def test_the_older_layout(root: Path, mount: str) -> None:
    inside(root, "4:memory:/box\n2:cpu,cpuacct:/box\n1:name=systemd:/x\n0::/\n")
    write(root, f"{mount}/box", cpu_cfs_quota_us="200000", cpu_cfs_period_us="100000")
    write(root, "memory/box", memory_limit_in_bytes=str(2 * GIB), memory_usage_in_bytes=str(GIB))
    write(root, "memory/box", memory_stat="inactive_file 1\ntotal_inactive_file 100\ntotal_active_file 20")
    assert read_limits(root) == Limits(2.0, 2 * GIB, GIB + 120)
    write(root, f"{mount}/box", cpu_cfs_quota_us="-1")
    write(root, "memory/box", memory_limit_in_bytes="9223372036854771712")
    assert read_limits(root) == Limits(None, None, None)


def test_what_cannot_be_understood_limits_nothing(root: Path) -> None:
    inside(root, "nonsense\n0::/../outside\n0::/here\n")
    write(root, "here", cpu_max="", memory_max="lots", memory_current="1")
    assert read_limits(root) == Limits(None, None, None)
    write(root, "here", cpu_max="100000 0")
    assert read_limits(root).cpus is None
