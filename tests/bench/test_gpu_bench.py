"""The bench of the engine on a GPU, run on a CPU with tiny models: every kind of row, and rows that fail."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.py"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


gpu = load("gpu")
gpu_engine = load("gpu_engine")


def test_every_kind_of_row_is_measured_and_written(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    out.write_text(json.dumps({"failed_tests": [], "rows": [{"name": "a kernel", "value": 1.0}]}))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--tiny", "--json", str(out)], capture_output=True, text=True, timeout=240
    )
    written = json.loads(out.read_text())
    rows = {row["name"]: row for row in written["rows"]}
    assert set(rows) == {job.name for job in gpu.TINY_JOBS} | {"a kernel"}, done.stdout + done.stderr
    errors = {name: row["error"] for name, row in rows.items() if "error" in row}
    assert errors == {}
    assert done.returncode == 1, "some targets cannot be met"
    assert written["machine"].startswith("CPU")
    for job in gpu.TINY_JOBS:
        row = rows[job.name]
        assert row["value"] > 0
        if job.kind == "decode":
            assert row["ok"] is (job.target > 0)
            assert 0 < row["host_ms"] <= row["value"] * 1.01
        if job.kind == "start":
            assert row["import_torch_s"] > 0
            assert row["files_compiled"] == 0
        if job.kind == "hit":
            assert row["cached_len"] >= 96


def test_rows_that_fail_do_not_take_others_along(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = [
        gpu.Job("tiny-llama", "decode", {"batch": 5, "context": 8, "steps": 4}, "ms"),  # only four run at once
        gpu.Job("tiny-llama", "hit", {"length": 100_000}, "ms"),  # longer than the context
        gpu.Job("tiny-llama", "start", {}, "s"),  # no kind of an engine's: ends the process
        gpu.Job("tiny-llama", "ttft", {"length": 16}, "ms"),
    ]
    results = gpu.Results(tmp_path / "rows.json")
    limits = gpu.Limits(time.monotonic() + 120, 30)
    gpu.measure_model("tiny-llama", jobs, {**gpu.TINY_OPTIONS, "device": "cpu"}, results, limits, tmp_path)
    rows = {row["name"]: row for row in json.loads((tmp_path / "rows.json").read_text())["rows"]}
    errors = [rows[job.name].get("error", "") for job in jobs]
    assert "something held them up" in errors[0]
    assert "RequestError" in errors[1] or "EngineError" in errors[1]
    assert "the process ended in this row: exit code 1" in errors[2]
    assert errors[3] == ""
    assert rows[jobs[3].name]["value"] > 0
    assert "KeyError" in capsys.readouterr().out, "what the process said last"


def test_an_engine_that_does_not_start_fails_its_rows(tmp_path: Path) -> None:
    jobs = [gpu.Job("tiny-llama", "ttft", {"length": 16}, "ms", target=1.0)]
    results = gpu.Results(None)
    limits = gpu.Limits(time.monotonic() + 60, 30)
    options = {**gpu.TINY_OPTIONS, "device": "cpu", "kv_cache_memory": 16}
    gpu.measure_model("tiny-llama", jobs, options, results, limits, tmp_path)
    (row,) = results.rows
    assert "the engine did not start" in row["error"]
    assert row["ok"] is False


def test_a_process_that_is_silent_is_ended(tmp_path: Path) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    out.touch()
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    lines = list(gpu.follow(command, out, log, gpu.Limits(time.monotonic() + 60, 0.2)))
    assert [line["ended"][:10] for line in lines] == ["silent for"]
    lines = list(gpu.follow(command, out, log, gpu.Limits(time.monotonic() + 0.3, 60)))
    assert lines == [{"ended": "the time is over"}]


def row_of(job: Any, **figures: Any) -> dict[str, Any]:
    row: dict[str, Any] = gpu.judged(job, figures)
    return row


def test_ratios_above_one_are_faster_than_the_peer() -> None:
    step, speed = gpu.JOBS[0], next(job for job in gpu.JOBS if job.kind == "prefill")
    fast = row_of(step, value=3.5, host_ms=0.4)
    assert (fast["ratio"], fast["ok"], fast["host_ms"], fast["floor"]) == (4.93 / 3.5, True, 0.4, 3.28)
    assert row_of(step, value=3.9)["ok"] is False
    assert row_of(speed, value=44_000.0)["ok"] is True
    assert row_of(speed, value=20_450.0)["ratio"] == 0.5
    assert row_of(speed, error="x")["ok"] is False


def test_a_failed_row_leaves_an_older_figure(tmp_path: Path) -> None:
    job = gpu.JOBS[0]
    gpu.Results(tmp_path / "rows.json").add(job, {"value": 3.0})
    gpu.Results(tmp_path / "rows.json").add(job, {"error": "x"})
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert row["value"] == 3.0
    gpu.Results(tmp_path / "rows.json").add(job, {"value": 4.0})
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert row["value"] == 4.0


def test_names_are_unlike() -> None:
    for jobs in (gpu.JOBS, gpu.TINY_JOBS):
        assert len({job.name for job in jobs}) == len(jobs)


def test_nodes_are_those_of_the_size_that_is_replayed() -> None:
    bench = object.__new__(gpu_engine.Bench)

    class Fields:
        """Anything with these attributes."""

        def __init__(self, **fields: Any) -> None:
            self.__dict__.update(fields)

    nodes = {"logits": {1: 10, 4: 40, 8: 80}, "sample": {1: 1, 4: 2, 8: 3}}
    runner = Fields(_graphs=Fields(num_nodes=nodes.__getitem__))
    bench.core = Fields(_executor=Fields(_worker=Fields(runner=runner)))
    assert bench._graph_nodes(1) == {"graph_nodes": 11, "graph_rows": 1}
    assert bench._graph_nodes(3) == {"graph_nodes": 42, "graph_rows": 4}
    assert bench._graph_nodes(8) == {"graph_nodes": 83, "graph_rows": 8}
    assert bench._graph_nodes(9) == {}
    nodes["logits"] = {}
    assert bench._graph_nodes(1) == {}


def test_the_share_of_a_busy_device() -> None:
    assert gpu_engine.covered([(0, 2), (1, 3), (5, 6)]) == 4
    # three kernels a step of 10 us, of which one is known only to one step; a step more than asked for was seen
    events = [(t, t + 3.0, "layer") for step in range(13) for t in (10.0 * step, 10.0 * step + 3)]
    events += [(10.0 * step + 6, 10.0 * step + 8, "sample") for step in range(13)]
    figures = gpu_engine.traced_figures([*events, (0.0, 1.0, "once")], 1e-5, 12)
    assert figures["kernels_per_step"] == pytest.approx(40 / 13)
    assert figures["gpu_busy"] == pytest.approx(0.8)
    assert figures["gpu_ms"] == pytest.approx(0.008)
    assert gpu_engine.traced_figures([], 1.0, 12) == {"trace": "the profiler saw no kernel"}
