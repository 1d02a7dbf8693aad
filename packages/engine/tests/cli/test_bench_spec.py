"""bench spec: what it compares, what it prints and writes, and what it refuses before anything is loaded."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from lamella.engine.cli.bench_spec import METHODS, WORKLOAD, read_workload, with_drafts
from lamella.engine.cli.main import main
from lamella.specdec import parse_speculation

SMALL = ("--threads", "1", "--max-num-seqs", "2", "--max-num-batched-tokens", "64", "--max-model-len", "256")


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    file = tmp_path / "work.jsonl"
    lines = [
        {"prompt": [5, 6, 7, 8] * 6, "group": "loops", "max_tokens": 12},
        {"prompt": [9, 10, 11, 9, 10, 11, 9, 10], "group": "loops"},
        {"prompt": [30, 40, 50], "group": "other", "name": "short"},
    ]
    file.write_text("\n\n".join(json.dumps(line) for line in lines))
    return file


@pytest.mark.parametrize("more", [(), ("--apart",)], ids=["in turns", "apart"])
def test_methods_beside_none(
    tiny: str, workload: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    files = ["--json", str(tmp_path / "s.json")]
    if importlib.util.find_spec("matplotlib") is not None:
        files += ["--plot", str(tmp_path / "s.html")]
    all_drafts = {"method": "suffix", "num_speculative_tokens": 4, "enable_adaptive_verification": False}
    words = ("--workload", str(workload), "--methods", "none,ngram", "--config", f"all={json.dumps(all_drafts)}")
    words += ("--rounds", "2", "--output-len", "30", "--num-speculative-tokens", "3", "--target", "loops=0.001")
    assert main(["bench", "spec", tiny, *words, *SMALL, *files, *more]) == 0
    rows = {row["name"]: row for row in json.loads((tmp_path / "s.json").read_text())["rows"]}
    for group in ("loops", "other"):
        base = rows[f"decode, {group}, none"]["value"]
        assert base > 0
        for method in ("ngram", "all"):
            row = rows[f"decode, {group}, {method}"]
            assert row["ratio"] == pytest.approx(row["value"] / base)
            assert row["peer"] == "none"
            assert row["ok"] is (True if group == "loops" else None)
            assert rows[f"answers that differ, {group}, {method}"]["value"] == 0
            assert 1.0 <= rows[f"acceptance length, {group}, {method}"]["value"] <= 5
            assert 0 <= rows[f"drafts accepted, {group}, {method}"]["value"] <= 100
    table = capsys.readouterr().out
    assert all(name in table for name in rows)
    if len(files) > 2:
        assert "<svg" in (tmp_path / "s.html").read_text()


def test_the_workload_that_comes_along() -> None:
    items = read_workload(WORKLOAD)
    assert {item.group for item in items} == {"repeats", "plain"}
    assert all(item.name for item in items)
    for name, method in METHODS.items():
        parsed = parse_speculation(with_drafts(method, 16))
        assert parsed.num_speculative_tokens == 16
        assert parsed.methods == {"both": ("suffix", "ngram")}.get(name, (name,))


def test_synthetic_acceptance(tiny: str, workload: Path, tmp_path: Path) -> None:
    words = ("--workload", str(workload), "--methods", "arbitrary,both", "--rounds", "1", "--output-len", "61")
    words += ("--num-speculative-tokens", "3", "--synthetic-acceptance-length", "4", "--json", str(tmp_path / "s.json"))
    fixed = {"method": "ngram", "num_speculative_tokens": 2, "enable_adaptive_verification": False}
    assert main(["bench", "spec", tiny, *words, "--config", f"true={json.dumps(fixed)}", *SMALL]) == 0
    rows = {row["name"]: row for row in json.loads((tmp_path / "s.json").read_text())["rows"]}
    assert rows["drafts accepted, other, arbitrary (synthetic)"]["value"] == pytest.approx(100.0)
    assert rows["acceptance length, other, arbitrary (synthetic)"]["value"] > 1.0
    assert not any(name.startswith("answers that differ") and "synthetic" in name for name in rows)
    assert rows["answers that differ, other, true"]["value"] == 0
    assert rows["drafting, loops, true"]["value"] > 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no prompts"),
        ('{"prompt": "a"}\n{"prompt"', "line 2: "),
        ('{"prompt": "a", "grup": "x"}', "line 1: .*grup"),
        ('{"group": "x"}', "line 1: give either prompt or messages"),
        ('{"prompt": "a", "messages": []}', "line 1: give either prompt or messages"),
        ('{"prompt": "a", "max_tokens": 1}', "line 1: max_tokens is 1"),
    ],
)
def test_workloads_that_cannot_be_used(
    tiny: str, tmp_path: Path, text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "w.jsonl").write_text(text)
    assert main(["bench", "spec", tiny, "--workload", str(tmp_path / "w.jsonl")]) == 1
    assert re.search(said, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--workload", "/nowhere.jsonl"], "cannot read the workload /nowhere.jsonl"),
        (["--methods", "ngram,eagle"], "--methods knows ngram, suffix, both, arbitrary; got 'eagle'"),
        (["--methods", "none"], "nothing to compare"),
        (["--synthetic-acceptance-rates", "1,x"], "--synthetic-acceptance-rates takes numbers between commas"),
        (["--config", "none={}"], "--config takes NAME=JSON with a name of its own"),
        (["--config", "ngram={}"], "--config takes NAME=JSON with a name of its own"),
        (["--config", "x={"], "--config x: not valid JSON"),
        (["--config", "x=[1]"], "--config x: a JSON object is needed"),
        (["--target", "plain"], "--target takes GROUP=X with a number X"),
        (["--target", "plane=1"], "the workload has the groups repeats, plain"),
    ],
)
def test_what_is_refused(tiny: str, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "spec", tiny, *words]) == 1
    assert said in capsys.readouterr().err


def test_a_config_that_the_engine_refuses_is_named(
    tiny: str, workload: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--workload", str(workload), "--config", 'x={"method":"suffix","surprise":1}', "--rounds", "1")
    assert main(["bench", "spec", tiny, *words, *SMALL]) == 1
    assert "unknown key 'surprise'" in capsys.readouterr().err
