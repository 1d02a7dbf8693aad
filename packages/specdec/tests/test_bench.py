"""The bench runs, on a small context, and writes the rows that every bench writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lamella.specdec.drafters.ngram import native

BENCH = Path(__file__).parent.parent / "bench" / "ngram.py"


@pytest.mark.skipif(native is None, reason="built without the native module: nothing to measure")
def test_the_bench_writes_its_rows(tmp_path):
    command = [sys.executable, str(BENCH), "--contexts", "300", "--json", str(tmp_path / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    assert set(report) == {"machine", "commit", "date", "rows"}
    assert len(report["rows"]) == 3
    for row in report["rows"]:
        assert set(row) == {"name", "value", "unit", "peer", "ratio", "target", "ok"}
        assert row["value"] > 0
