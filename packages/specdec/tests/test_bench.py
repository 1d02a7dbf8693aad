"""Each bench runs, on a small load, and writes the rows that every bench writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lamella.specdec.drafters.ngram import native

BENCHES = Path(__file__).parent.parent / "bench"


@pytest.mark.skipif(native is None, reason="built without the native module: nothing to measure")
@pytest.mark.parametrize(
    ("name", "load", "num_rows"),
    [
        ("ngram", ["--contexts", "300"], 3),
        ("suffix", ["--context", "300", "--outputs", "60", "--output-len", "20"], 8),
    ],
)
def test_the_bench_writes_its_rows(tmp_path, name, load, num_rows):
    command = [sys.executable, str(BENCHES / f"{name}.py"), *load, "--json", str(tmp_path / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    assert set(report) == {"machine", "commit", "date", "rows"}
    assert len(report["rows"]) == num_rows
    for row in report["rows"]:
        assert set(row) == {"name", "value", "unit", "peer", "ratio", "target", "ok"}
        assert row["value"] > 0
