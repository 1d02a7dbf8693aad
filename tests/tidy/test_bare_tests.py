"""The tests of a package with extras can be collected without any of them: those that need one leave themselves out."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

EXTRAS = {"kvtier": ["torch", "zstandard"], "specdec": ["torch"]}
"""Folder of a package → the modules that its extras alone bring."""

ABSENT = """
import sys
for name in sys.argv[2:]:
    sys.modules[name] = None
import pytest
sys.exit(pytest.main(["--collect-only", "-q", "--confcutdir", ".", "-m", "gpu or not gpu",
                      "-p", "no:cacheprovider", sys.argv[1]]))
"""


@pytest.mark.parametrize("folder", EXTRAS)
def test_the_tests_are_collected_without_the_extras(root, folder):
    done = subprocess.run(
        [sys.executable, "-c", ABSENT, "tests", *EXTRAS[folder]],
        cwd=root / "packages" / folder,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
