"""The tools that make models without a download: what they write is a model, what they serve answers."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from lamella.engine import LLM, SamplingParams
from lamella.runner_v2.testing.tiny_models import TINY_CONFIGS

TOOLS = Path(__file__).resolve().parent.parent.parent / "tools"
SMALL = {"threads": 1, "max_num_seqs": 1, "max_num_batched_tokens": 64, "max_model_len": 64}

Write = Callable[..., str]


@pytest.fixture
def write(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Write:
    """write(words…): tools/tiny_checkpoint.py with these words; what it printed."""
    spec = importlib.util.spec_from_file_location("tiny_checkpoint", TOOLS / "tiny_checkpoint.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)

    def call(*words: object) -> str:
        monkeypatch.setattr(sys, "argv", ["tiny_checkpoint.py", *map(str, words)])
        tool.main()
        return capsys.readouterr().out

    return call


def answer(path: Path) -> list[int]:
    with LLM(str(path), **SMALL) as llm:
        output = llm.generate("hello there", SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))[0]
    return output.outputs[0].token_ids


def test_folders_of_one_seed_are_one_model_however_they_are_cut(write: Write, tmp_path: Path) -> None:
    said = write("qwen3", tmp_path / "whole")
    assert re.fullmatch(rf"{tmp_path}/whole: qwen3, [\d,]+ weights\n", said)
    write("qwen3", tmp_path / "cut", "--shards", 3)
    assert len(list((tmp_path / "cut").glob("*.safetensors"))) == 3
    assert len(list((tmp_path / "whole").glob("*.safetensors"))) == 1
    write("qwen3", tmp_path / "other", "--seed", 5)
    assert answer(tmp_path / "whole") == answer(tmp_path / "cut")
    assert (tmp_path / "whole" / "model.safetensors").read_bytes() != (
        tmp_path / "other" / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize(("family", "weights"), [("llama", "q4_1"), ("qwen2", "q4_k")])
def test_gguf_files_are_models(write: Write, tmp_path: Path, family: str, weights: str) -> None:
    write(family, tmp_path / "tiny.gguf", "--format", weights)
    assert len(answer(tmp_path / "tiny.gguf")) == 4


def test_types_and_tokenizers_are_as_asked(write: Write, tmp_path: Path) -> None:
    write("llama", tmp_path / "full")
    write("llama", tmp_path / "half", "--dtype", "bfloat16", "--no-tokenizer")
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("full", "half")]
    assert 1.5 < sizes[0] / sizes[1] < 2.5
    assert (tmp_path / "full" / "tokenizer.json").exists()
    assert not (tmp_path / "half" / "tokenizer.json").exists()


@pytest.mark.parametrize("words", [["nonsense", "x"], ["llama", "x", "--format", "q9"], ["llama"]])
def test_mistakes_are_named(write: Write, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        write(*words)
    assert "error: " in capsys.readouterr().err


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """tools/serve_tiny.py with a family of its own choice, and where it answers."""
    words = ["--family", "qwen3", "--port", "0", "--threads", "1", "--max-num-seqs", "2", "--kv-cache-memory", "8MiB"]
    process = subprocess.Popen(
        [sys.executable, str(TOOLS / "serve_tiny.py"), *words],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        url = next(
            (found[1] for line in process.stderr if (found := re.search(r"serving tiny-qwen3 on (http\S+)", line))),
            None,
        )
        assert url is not None
        yield process, url
    finally:
        process.kill()
        process.communicate()


def test_a_tiny_server_answers_and_clears_up(served: tuple[subprocess.Popen[str], str], tmp_path: Path) -> None:
    process, url = served
    assert list(tmp_path.glob("*/config.json")), "the checkpoint lies in the folder for temporary files"
    assert [card["id"] for card in httpx.get(f"{url}/v1/models").json()["data"]] == ["tiny-qwen3"]
    body = {"model": "tiny-qwen3", "prompt": "hello", "max_tokens": 3, "ignore_eos": True}
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=30).json()
    assert reply["usage"]["completion_tokens"] == 3
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    assert not list(tmp_path.glob("*/config.json"))


def test_a_tiny_server_refuses_what_serve_refuses() -> None:
    done = subprocess.run(
        [sys.executable, str(TOOLS / "serve_tiny.py"), "--max-num-sequences", "3"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "unknown option '--max-num-sequences'" in done.stderr
    assert "did you mean '--max-num-seqs'" in done.stderr
    assert "Traceback" not in done.stderr


def test_every_family_can_be_served_tiny() -> None:
    text = subprocess.run(
        [sys.executable, str(TOOLS / "serve_tiny.py"), "--help"], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    for family in TINY_CONFIGS:
        assert family in text
