"""The example in the README runs as it stands and prints what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_example_runs_and_prints_what_it_says():
    text = README.read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    output = re.search(r"```text\n(.*?)```", text, re.DOTALL)
    assert code is not None
    assert output is not None
    assert len(code[1].splitlines()) <= 25
    # built without a compiler, the drafter warns once
    command = [sys.executable, "-W", "ignore::RuntimeWarning", "-c", code[1]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == output[1]
