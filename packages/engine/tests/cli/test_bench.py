"""The benches: what they measure, what they print and write, what they say of a server that refuses."""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lamella.engine.cli.bench_latency import quantile, random_prompts
from lamella.engine.cli.bench_serve import latencies
from lamella.engine.cli.load_client import Answer
from lamella.engine.cli.main import main
from lamella.engine.testing.scripted_core import ScriptedCore
from lamella.engine.testing.server_thread import ServerThread, serve

SMALL = ("--threads", "1", "--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--max-model-len", "256")

HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
"""An extra: without it the figures are tested all the same."""


def plot_into(file: Path) -> tuple[str, ...]:
    return ("--plot", str(file)) if HAS_MATPLOTLIB else ()


def rows_of(file: Path) -> dict[str, dict[str, Any]]:
    data = json.loads(file.read_text())
    assert set(data) == {"machine", "commit", "date", "rows"}
    return {row["name"]: row for row in data["rows"]}


def test_throughput_counts_every_token(smollm2_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--num-prompts", "5", "--input-len", "8", "--output-len", "6", *SMALL)
    files = ("--json", str(tmp_path / "t.json"), *plot_into(tmp_path / "t.html"))
    assert main(["bench", "throughput", str(smollm2_path), *words, *files]) == 0
    rows = rows_of(tmp_path / "t.json")
    elapsed = rows["elapsed"]["value"]
    assert rows["requests"]["value"] * elapsed == pytest.approx(5)
    assert rows["output tokens"]["value"] * elapsed == pytest.approx(5 * 6)
    assert rows["all tokens"]["value"] * elapsed == pytest.approx(5 * (8 + 6))
    table = capsys.readouterr().out
    assert [line.split("  ")[0] for line in table.splitlines()[1:]] == list(rows)
    if HAS_MATPLOTLIB:
        assert "<svg" in (tmp_path / "t.html").read_text()


def test_a_plot_that_cannot_be_drawn_is_refused_before_the_run(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find_spec(name, *rest)
    )
    assert main(["bench", "throughput", tiny, "--plot", str(tmp_path / "t.png")]) == 1
    said = capsys.readouterr()
    assert "pip install 'lamella-engine[plot]'" in said.err
    assert not said.out


def test_throughput_varies_lengths_when_asked(tiny: str, tmp_path: Path) -> None:
    words = ("--num-prompts", "8", "--input-len", "20", "--output-len", "10", "--spread", "0.5", *SMALL)
    assert main(["bench", "throughput", tiny, *words, "--json", str(tmp_path / "t.json")]) == 0
    rows = rows_of(tmp_path / "t.json")
    num_output = rows["output tokens"]["value"] * rows["elapsed"]["value"]
    assert 8 * 5 <= num_output <= 8 * 15
    assert num_output != pytest.approx(80)


@pytest.fixture
def core() -> ScriptedCore:
    """With a vocabulary as wide as the load's prompts need it."""
    made = ScriptedCore()
    made.info = msgspec.structs.replace(made.info, vocab_size=2048)
    return made


@pytest.fixture
def server(core: ScriptedCore) -> Iterator[ServerThread]:
    with serve(core, api_keys=("key",)) as running:
        yield running


def bench_serve(server: ServerThread, *words: str) -> int:
    return main(["bench", "serve", "--base-url", server.url, "--api-key", "key", *words])


@pytest.mark.parametrize("stream", [True, False])
def test_load_on_a_server(core: ScriptedCore, server: ServerThread, tmp_path: Path, stream: bool) -> None:
    core.step_s = 0.001
    core.script = lambda request, index: list(b"letters")  # text in each step
    words = ("--num-prompts", "12", "--max-concurrency", "3", "--input-len", "5", "--output-len", "7")
    files = ("--json", str(tmp_path / "s.json"), *plot_into(tmp_path / "s.png"))
    assert bench_serve(server, *words, *files, *(() if stream else ("--no-stream",))) == 0
    assert len(core.seen) == 12
    assert {(len(r.prompt_ids), r.max_tokens, r.params.ignore_eos, r.params.temperature) for r in core.seen} == {
        (5, 7, True, 0.0)
    }
    rows = rows_of(tmp_path / "s.json")
    assert rows["output tokens"]["value"] / rows["requests"]["value"] == pytest.approx(7)
    assert (rows["failed requests"]["value"], rows["failed requests"]["ok"]) == (0, True)
    assert rows["client CPU"]["value"] > 0
    kinds = {name.split()[0] for name in rows if "median" in name}
    assert kinds == ({"ttft", "tpot", "itl", "e2el"} if stream else {"e2el"})
    if stream:
        assert 0 < rows["ttft median"]["value"] < rows["e2el median"]["value"]
        assert 0.5 < rows["tpot median"]["value"] < 50
    assert rows["e2el median"]["value"] <= rows["e2el p99"]["value"]
    if HAS_MATPLOTLIB:
        assert (tmp_path / "s.png").stat().st_size > 1000


def test_the_same_seed_is_the_same_load(core: ScriptedCore, server: ServerThread) -> None:
    words = ("--num-prompts", "4", "--input-len", "6", "--output-len", "1", "--max-concurrency", "1")
    for seed in ("1", "1", "2"):
        assert bench_serve(server, *words, "--seed", seed) == 0
    prompts = [sorted(request.prompt_ids for request in core.seen[i : i + 4]) for i in (0, 4, 8)]
    assert prompts[0] == prompts[1] != prompts[2]


def test_arrivals_at_a_rate_last_as_long_as_they_must(core: ScriptedCore, server: ServerThread, tmp_path: Path) -> None:
    words = ("--num-prompts", "20", "--request-rate", "100", "--input-len", "1", "--output-len", "1")
    assert bench_serve(server, *words, "--json", str(tmp_path / "s.json")) == 0
    # 19 gaps of 10 ms on average
    assert 20 < rows_of(tmp_path / "s.json")["requests"]["value"] < 400


def test_what_the_server_refuses_is_told(
    core: ScriptedCore, server: ServerThread, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ("--num-prompts", "3", "--input-len", "4", "--output-len", "2")
    assert main(["bench", "serve", "--base-url", server.url, "--api-key", "wrong", *few]) == 1
    assert f"no server to measure at {server.url}" in capsys.readouterr().err
    assert bench_serve(server, *few, "--model", "another") == 1
    assert "all 3 requests failed: " in (err := capsys.readouterr().err)
    assert "'another' does not exist" in err
    core.fail_on = 300
    core.script = lambda request, index: [300] if len(core.seen) == 1 else [301]
    assert bench_serve(server, *few, "--max-concurrency", "1", "--json", str(tmp_path / "s.json")) == 1
    row = rows_of(tmp_path / "s.json")["failed requests"]
    assert (row["value"], row["ok"]) == (1, False), "some that fail do not hide the others"


def test_latencies_are_taken_where_there_are_any() -> None:
    whole = Answer(output_tokens=3, total_s=0.5)
    assert latencies([whole]) == {"e2el": [0.5]}
    one = Answer(output_tokens=3, total_s=0.1, chunk_times=[0.1])
    assert latencies([one]) == {"ttft": [0.1], "e2el": [0.1]}
    three = Answer(output_tokens=3, total_s=0.7, chunk_times=[0.2, 0.3, 0.6])
    found = latencies([whole, one, three])
    assert found["ttft"] == [0.1, 0.2]
    assert found["tpot"] == [pytest.approx(0.2)]
    assert found["itl"] == [pytest.approx(0.1), pytest.approx(0.3)]


def test_quantiles_are_interpolated() -> None:
    assert [quantile([4.0, 1.0, 3.0, 2.0], share) for share in (0.0, 0.5, 1.0)] == [1.0, 2.5, 4.0]
    assert quantile([7.0], 0.99) == 7.0


def test_random_prompts_leave_out_special_tokens() -> None:
    prompts = random_prompts(random.Random(0), 50, 20, 300)
    assert {len(prompt) for prompt in prompts} == {20}
    assert 150 <= min(map(min, prompts)) <= max(map(max, prompts)) < 300
