"""What tools/gpu.py makes of reports and rows; the rest of it needs a device."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_tool", ROOT / "tools" / "gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_file_is_green_if_all_its_tests_are(tool: ModuleType, tmp_path: Path) -> None:
    report = tmp_path / "tests.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="tests.test_a" name="x"/>'
        '<testcase classname="tests.test_b" name="y"/>'
        '<testcase classname="tests.test_b" name="z"><failure/></testcase>'
        '<testcase classname="tests.test_c" name="w"><skipped/></testcase>'
        '<testcase classname="" name="packages.test_d"><error/></testcase></testsuite></testsuites>'
    )
    green, failures = tool.read_report(report, tmp_path / "log")
    assert green == {"test_a.py"}
    assert failures == ["test_b.py::z", "test_d.py::packages.test_d"]


def test_no_test_is_a_failure(tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log").write_text("nothing was collected\n")
    assert tool.read_report(tmp_path / "none.xml", tmp_path / "log") == (set(), ["no test ran"])
    assert "nothing was collected" in capsys.readouterr().out


def test_rows_are_merged_by_name(tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAMELLA_COMMIT", "new")
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"rows": [{"name": "a", "commit": "old"}, {"name": "b", "commit": "old"}]}))
    tool.write([{"name": "b"}, {"name": "c"}], [], path)
    rows = json.loads(path.read_text())["rows"]
    assert [(row["name"], row["commit"]) for row in rows] == [("a", "old"), ("b", "new"), ("c", "new")]


def test_rows_of_kernels_and_engine_share_a_table(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    kernel = {"name": "norm", "value": 2.0, "unit": "µs", "peer": 3.0, "ratio": 1.5, "target": 2.2, "ok": True}
    tool.table([{**kernel, "roof": 0.5}, {**kernel, "name": "prefill", "unit": "tokens/s", "value": 43_210.0}])
    out = capsys.readouterr().out
    assert "50%" in out
    assert "43,210" in out


def test_a_library_that_is_not_there_is_named(tool: ModuleType, tmp_path: Path) -> None:
    assert tool.build("90a", tmp_path, tmp_path / "none.so") is False
