"""What commands read of a server's metrics, and what they say of it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from lamella.engine.cli.main import main
from lamella.engine.cli.metrics_page import MetricsPage
from lamella.engine.cli.top import render
from lamella.engine.testing.scripted_core import ScriptedCore
from lamella.engine.testing.server_thread import ServerThread, serve
from lamella.engine.wire import TierFigures
from lamella.kvtier import TicketResult
from lamella.kvtier.data.disk.store import DiskStore

TIERS = {
    "host": TierFigures(
        num_blocks=50,
        capacity=200,
        queue_depth=3,
        lookups=10,
        queried_tokens=1000,
        hit_tokens=250,
        bytes_in=5 << 20,
        bytes_out=2 << 20,
        evictions=7,
        refused={"no room": 2},
        failures={"late": 1, "checksum": 4},
        loads=16,
        load_seconds=0.032,
        prefill_tokens_saved=240,
        seconds_saved=3.0,
        seconds_spent=0.5,
    ),
    "disk": TierFigures(num_blocks=9, seconds_saved=1.0, seconds_spent=4.0),
}


@pytest.fixture
def core() -> ScriptedCore:
    made = ScriptedCore()
    made.restored_len = 2
    made._stats.tiers = TIERS
    made._stats.late_loads = 6
    return made


@pytest.fixture
def server(core: ScriptedCore) -> Iterator[ServerThread]:
    with serve(core) as running:
        with httpx.Client(base_url=running.url) as http:
            for _ in range(3):
                http.post("/v1/completions", json={"prompt": "say:abc", "max_tokens": 50}).raise_for_status()
        yield running


def test_every_figure_of_a_tier_is_scraped(server: ServerThread) -> None:
    page = MetricsPage.fetch(server.url)
    for tier, figures in TIERS.items():
        for name in figures.__struct_fields__:
            value = getattr(figures, name)
            if isinstance(value, dict):
                label = "reason" if name == "refused" else "kind"
                assert page.labelled(f"kv_tier_{name}_total", label, tier=tier) == value
            else:
                gauge = name in ("num_blocks", "capacity", "queue_depth")
                assert page.value(f"kv_tier_{name}{'' if gauge else '_total'}", tier=tier) == value, name
    assert page.value("kv_late_loads_total") == 6
    assert page.value("prompt_tokens_restored_total") == 3 * 2
    assert page.value("kv_restore_seconds_count") == 3


def test_without_tiers_nothing_is_said_of_them() -> None:
    with serve(ScriptedCore()) as running:
        page = MetricsPage.fetch(running.url)
    assert not page.has("kv_tier_num_blocks")
    assert page.value("kv_tier_num_blocks") == 0


def test_quantiles_are_taken_within_a_bucket() -> None:
    lines = ['lamella:x_bucket{le="1.0"} 0', 'lamella:x_bucket{le="2.0"} 8', 'lamella:x_bucket{le="4.0"} 9']
    page = MetricsPage("# TYPE lamella:x histogram\n" + "\n".join([*lines, 'lamella:x_bucket{le="+Inf"} 10']) + "\n")
    assert page.quantile("x", 0.4) == pytest.approx(1.5)
    assert page.quantile("x", 0.9) == pytest.approx(4.0)
    assert page.quantile("x", 0.99) == math.inf
    assert page.quantile("y", 0.5) is None


def test_report(server: ServerThread, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tiers", "report", "--base-url", server.url, "--json", str(tmp_path / "t.json")]) == 0
    rows = {row["name"]: row["value"] for row in json.loads((tmp_path / "t.json").read_text())["rows"]}
    assert rows["host: full"] == 25
    assert rows["host: hit rate"] == 25
    assert rows["host: a block's load"] == pytest.approx(2)
    assert rows["host: failures, checksum"] == 4
    assert rows["host: saved - spent"] == 2.5
    assert rows["disk: saved - spent"] == -3
    said = capsys.readouterr().out
    assert "host: pays; it saved 3.0 s of prefill for 0.5 s of waiting" in said
    assert "disk: does not pay so far; it saved 1.0 s of prefill, but was waited for 4.0 s" in said


def test_report_draws(server: ServerThread, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main(["tiers", "report", "--base-url", server.url, "--plot", str(tmp_path / "t.png")]) == 0
    assert (tmp_path / "t.png").stat().st_size > 1000


def test_report_of_a_server_without_tiers(capsys: pytest.CaptureFixture[str]) -> None:
    with serve(ScriptedCore()) as running:
        assert main(["tiers", "report", "--base-url", running.url]) == 1
    assert "start it with --kv-tier" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "said"),
    [("http://127.0.0.1:9", "no server to look at under http://127.0.0.1:9"), ("nonsense", "no server to look at")],
)
def test_no_server(url: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["top", "--count", "1"], ["tiers", "report"]):
        assert main([*command, "--base-url", url]) == 1
        assert said in capsys.readouterr().err


def test_a_key_is_asked_for_and_sent(capsys: pytest.CaptureFixture[str]) -> None:
    with serve(ScriptedCore(), api_keys=("key",)) as running:
        assert main(["top", "--count", "1", "--base-url", running.url]) == 1
        assert "give --api-key" in capsys.readouterr().err
        assert main(["top", "--count", "1", "--base-url", running.url, "--api-key", "key"]) == 0


def test_top_shows_totals_then_rates(server: ServerThread, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--count", "2", "--interval", "0.05", "--base-url", server.url]) == 0
    first, second = capsys.readouterr().out.strip().split("\n\n")
    assert "12 in all generated" in first
    assert "0.0/s generated" in second
    assert (
        "host        50 blocks, 250 in all tokens hit, 5.0 MiB in, 2.0 MiB out, 3 queued, 7 evicted, 5 failed" in first
    )
    page = MetricsPage.fetch(server.url)
    assert "100.0/s" not in render(page, page, 2.0)


def test_verify_says_what_is_sound_and_what_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "kv"
    store = DiskStore(folder, fingerprint=bytes(16), capacity_bytes=8 << 20)
    for n in range(3):
        store.write(n, 0, bytes([n]) * 32, None, memoryview(bytearray([n]) * 5000))
    ended = 0
    while ended < 3:
        store.wait(5.0)
        ended += sum(isinstance(event, TicketResult) for event in store.poll())
    store.close()
    assert main(["tiers", "verify", str(folder)]) == 0
    assert "records    3 whole" in capsys.readouterr().out
    (segment,) = [file for file in folder.iterdir() if file.suffix == ".kv"]
    content = bytearray(segment.read_bytes())
    place = content.index(bytes([1]) * 1000)
    content[place] ^= 1
    segment.write_bytes(content)
    assert main(["tiers", "verify", str(folder)]) == 1
    said = capsys.readouterr().out
    assert "records    2 whole" in said
    assert "the folder is damaged" in said
    assert main(["tiers", "verify", str(tmp_path / "none")]) == 1
    assert "cannot be read" in capsys.readouterr().err


def test_bench_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--seconds", "0.1", "--max-bytes", "8MiB", "--block-bytes", "64KiB", "--json", str(tmp_path / "b.json"))
    assert main(["tiers", "bench", str(tmp_path), *words]) == 0
    rows = {row["name"]: row for row in json.loads((tmp_path / "b.json").read_text())["rows"]}
    assert set(rows) == {f"{what}{end}" for what in ("write", "read") for end in ("", " p50", " p99")}
    assert rows["read"]["value"] > 0
    assert "engine:" in capsys.readouterr().out
    assert [file.name for file in tmp_path.iterdir()] == ["b.json"]


def test_unknown_tiers_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tiers", "mend"]) == 1
    assert "mend" in capsys.readouterr().err
