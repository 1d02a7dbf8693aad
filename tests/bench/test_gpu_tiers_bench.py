"""The bench of tiers below a GPU, run on a CPU with a tiny model: rows of each part, and a part that fails."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("gpu_tiers", FOLDER / "gpu_tiers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_parts_write_their_rows(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    out.write_text(json.dumps({"rows": [{"name": "another bench's", "value": 1.0}]}))
    command = [sys.executable, str(FOLDER / "gpu_tiers.py"), "--tiny", "--only", "restore,start", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    rows = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
    assert "another bench's" in rows
    assert [name for name, row in rows.items() if "error" in row] == [], done.stdout + done.stderr
    restored = rows["first token, 200 tokens restored from the host"]
    assert restored["value"] > 0
    assert restored["cold_ms"] > 0
    assert rows["start-up that ram=64MiB adds, to the first token"]["with_s"][0] > 0


def test_a_part_that_fails_is_a_row_and_the_others_follow(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    restore, _, start = bench.TINY_PARTS
    broken = bench.Part("restore", 60, {**restore.shape, "folder": str(tmp_path / "nothing")})
    silent = bench.Part("start", 1.0, start.shape)
    results = bench.Results(None)
    for part in (broken, silent):
        bench.run(part, results, bench.Limits(time.monotonic() + 100, 100), tmp_path)
    assert [row["name"] for row in results.rows] == ["part restore", "part start"]
    assert "exit code 1" in results.rows[0]["error"]
    assert "the time is over" in results.rows[1]["error"]
    assert "nothing" in capsys.readouterr().out
