""".ci/run on a Python that takes packages, on one that does not, and with a part that fails; none of it really runs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

PYTHON = """#!/usr/bin/env bash
echo "$(basename "$(dirname "$(dirname "$0")")"): $*" >>"$CALLS"
case "$*" in
  "-m pip install"*)
    if [[ -n ${PIP_SAYS:-} && $0 != */hatch/bin/* ]]; then echo "$PIP_SAYS" >&2; exit 1; fi ;;
  "-m venv"*)
    mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  *"run test"*)
    echo "== 3 passed in 1.25s ==" ;;
  *"run $FAILING"*)
    exit 1 ;;
esac
"""


@pytest.fixture
def ci(root, tmp_path):
    """ci(pip_says, failing) runs it; the process, and what the stand-in for Python was called with."""
    bin_folder = tmp_path / "system" / "bin"
    bin_folder.mkdir(parents=True)
    (bin_folder / "python3").write_text(PYTHON)
    (bin_folder / "python3").chmod(0o755)
    (tmp_path / "tree" / ".ci").mkdir(parents=True)
    shutil.copy(root / ".ci" / "run", tmp_path / "tree" / ".ci" / "run")

    def run(pip_says: str = "", failing: str = "nothing") -> tuple[subprocess.CompletedProcess[str], list[str]]:
        calls: Path = tmp_path / "calls"
        calls.unlink(missing_ok=True)
        settings = {"PIP_SAYS": pip_says, "FAILING": failing, "CALLS": str(calls)}
        found = {"PATH": f"{bin_folder}:{os.environ['PATH']}", "XDG_CACHE_HOME": str(tmp_path / "cache")}
        done = subprocess.run(
            [tmp_path / "tree" / ".ci" / "run"],
            env={**os.environ, **settings, **found},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done, calls.read_text().splitlines()

    return run


PARTS = ["run test", "run check", "run cuda-build:check", "run alone --fast"]


def test_hatch_is_installed_where_that_is_allowed(ci):
    done, calls = ci()
    assert done.returncode == 0
    assert calls == ["system: -m pip install --quiet hatch", *(f"system: -m hatch {part}" for part in PARTS)]
    assert done.stdout.splitlines()[-1] == "== 3 passed in 1.25s =="


def test_a_python_that_takes_no_packages_gets_an_environment_outside_the_tree(ci, tmp_path):
    done, calls = ci("error: externally-managed-environment\n\n× This environment is externally managed")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "cache" / "lamella" / "hatch"
    assert calls == [
        "system: -m pip install --quiet hatch",
        f"system: -m venv {folder}",
        "hatch: -m pip install --quiet hatch",
        *(f"hatch: -m hatch {part}" for part in PARTS),
    ]
    assert done.stderr == ""


def test_any_other_trouble_with_pip_is_told_and_ends_it(ci):
    done, calls = ci("ERROR: Could not find a version that satisfies the requirement hatch")
    assert done.returncode == 1
    assert "Could not find a version" in done.stderr
    assert len(calls) == 1


def test_every_part_runs_and_the_failed_ones_are_named(ci):
    done, calls = ci(failing="check")
    assert done.returncode == 1
    assert [call.split("hatch ")[1] for call in calls[1:]] == PARTS
    assert done.stdout.splitlines()[-1] == "ci: failed: check"
