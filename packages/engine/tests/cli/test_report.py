"""Bench reports: JSON shape, table, merging, plots."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lamella.engine.cli.report import Report, Row, merge_rows, plot_bars, plot_lines
from lamella.engine.errors import StartError

ROWS = [
    Row(name="decode", value=123.456, unit="tokens/s", peer="x", ratio=1.25, target=">= 1.0 x", ok=True),
    Row(name="start", value=0.0123, unit="s", ok=False),
]


def test_json_shape(tmp_path: Path) -> None:
    Report.of(ROWS).write(tmp_path / "r.json")
    data = json.loads((tmp_path / "r.json").read_text())
    assert set(data) == {"machine", "commit", "date", "rows"}
    assert data["rows"][0] == {
        "name": "decode",
        "value": 123.456,
        "unit": "tokens/s",
        "peer": "x",
        "ratio": 1.25,
        "target": ">= 1.0 x",
        "ok": True,
    }


def test_table_aligns() -> None:
    lines = Report.of(ROWS).table().splitlines()
    assert lines[0].startswith("name")
    assert "123" in lines[1]
    assert lines[2].rstrip().endswith("NO")


def test_merge_keeps_rows_not_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    Report.of(ROWS).write(path)
    merged = merge_rows(path, Report.of([Row(name="start", value=1.0, unit="s")]))
    assert [(r.name, r.value) for r in merged.rows] == [("decode", 123.456), ("start", 1.0)]
    assert len(merge_rows(tmp_path / "none.json", Report.of(ROWS)).rows) == 2


@pytest.mark.parametrize("suffix", ["png", "svg", "html"])
def test_plots(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"p.{suffix}"
    plot_lines(path, "t", [("a", [1, 2], [3, 4]), ("b", [1, 2], [4, 3])], x_label="x", y_label="y")
    assert path.stat().st_size > 1000
    plot_bars(path, "t", ROWS)
    assert path.stat().st_size > 1000


def test_unwritable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="cannot write"):
        Report.of(ROWS).write(tmp_path / "no" / "r.json")
    pytest.importorskip("matplotlib")
    with pytest.raises(StartError, match="cannot write the plot"):
        plot_bars(tmp_path / "p.unknown", "t", ROWS)
