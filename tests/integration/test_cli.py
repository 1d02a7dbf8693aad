"""The command line as a person uses it: in processes of its own, judged by output and exit code."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import save_file

from lamella.runner_v2.testing.tiny_models import write_folder

GOLDEN = [7042, 30, 198, 198, 504]  # " Paris.\n\nThe": the first five are the same on every path


def lamella(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lamella.engine.cli.main", *words],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def fails(result: subprocess.CompletedProcess[str], *parts: str) -> None:
    """One clear line on standard error, nothing on standard output, an exit code that is not 0."""
    assert result.returncode not in (0, None), result
    assert result.stdout == ""
    assert "Traceback" not in result.stderr, result.stderr
    last = [line for line in result.stderr.splitlines() if line.startswith("lamella: ")]
    assert len(last) == 1, result.stderr
    for part in parts:
        assert part in result.stderr


def test_run_prints_one_json_object(smollm2_path: Path) -> None:
    result = lamella(
        "run",
        str(smollm2_path),
        "--prompt",
        "The capital of France is",
        "--max-tokens",
        "8",
        "--temperature",
        "0",
        "--json",
    )
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert answer["prompt_token_ids"] == [504, 3575, 282, 4649, 314]
    assert answer["output_token_ids"][:5] == GOLDEN
    assert answer["text"].startswith(" Paris.")
    assert answer["ttft_s"] > 0
    assert answer["tokens_per_s"] > 1


def test_run_streams_text(smollm2_path: Path) -> None:
    result = lamella("run", str(smollm2_path), "--message", "Say hello.", "--max-tokens", "8", "--temperature", "0")
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.strip()) > 3
    assert "tokens/s" in result.stderr


def test_run_reads_standard_input(smollm2_path: Path) -> None:
    words = ("run", str(smollm2_path), "--prompt", "-", "--max-tokens", "2", "--temperature", "0", "--json")
    result = lamella(*words, stdin="The capital of France is")
    assert json.loads(result.stdout)["output_token_ids"] == GOLDEN[:2]


def test_inspect_gives_reasons(smollm2_path: Path) -> None:
    result = lamella("inspect", str(smollm2_path), "--max-num-seqs", "4", "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert {"model", "options", "ops", "KV groups", "memory"} <= set(report)
    text = lamella("inspect", str(smollm2_path), "--max-num-seqs", "4").stdout
    assert "max_num_batched_tokens" in text
    assert "prompt tokens/s" in text


@pytest.mark.parametrize("command", ["", "run", "chat", "serve", "pull", "inspect", "demo", "bench"])
def test_help_explains(command: str) -> None:
    result = lamella(*([command] if command else []), "--help")
    assert result.returncode == 0
    assert len(result.stdout) > 300
    assert "lamella" in result.stdout


@pytest.mark.parametrize("what", ["latency", "throughput", "serve"])
def test_help_of_each_bench(what: str) -> None:
    result = lamella("bench", what, "--help")
    assert result.returncode == 0
    assert "--json FILE" in result.stdout


def test_bench_writes_json_and_plot(smollm2_path: Path, tmp_path: Path) -> None:
    result = lamella(
        *("bench", "latency", str(smollm2_path), "--input-len", "8", "--output-len", "4", "--batch-size", "2"),
        *("--num-iters", "2", "--num-iters-warmup", "1", "--max-num-seqs", "2"),
        *("--json", str(tmp_path / "b.json"), "--plot", str(tmp_path / "b.png")),
    )
    assert result.returncode == 0, result.stderr
    data = json.loads((tmp_path / "b.json").read_text())
    assert set(data) == {"machine", "commit", "date", "rows"}
    assert all(row["value"] > 0 for row in data["rows"])
    assert (tmp_path / "b.png").stat().st_size > 1000


def test_chat_keeps_the_conversation(smollm2_path: Path) -> None:
    result = lamella(
        *("chat", str(smollm2_path), "--max-tokens", "8", "--temperature", "0"),
        stdin="Hello\n/stats\n/bogus\n/clear\n/exit\n",
    )
    assert result.returncode == 0, result.stderr
    assert "unknown command /bogus" in result.stderr
    assert "tokens/s" in result.stderr


class TestBadInput:
    def test_unknown_words(self) -> None:
        fails(lamella("walk"), "unknown command 'walk'", "run")
        fails(lamella("run", "smollm2", "--prompt", "x", "--max-token", "3"), "--max-token")
        fails(lamella("serve", "smollm2", "--calculate-kv-scales"), "--calculate-kv-scales does not exist", "no scales")
        fails(lamella("serve", "smollm2", "--override-attention-dtype", "fp8"), "--kv-cache-dtype")
        fails(lamella("run", "smollm2"), "--prompt TEXT or --message TEXT")

    def test_models_that_are_not_there(self, tmp_path: Path) -> None:
        fails(lamella("run", str(tmp_path / "none.gguf"), "--prompt", "x"), "none.gguf")
        fails(lamella("run", str(tmp_path), "--prompt", "x"), "config.json")
        fails(lamella("run", "smollm3", "--prompt", "x"), "smollm3", "smollm2")

    def test_broken_files(self, tmp_path: Path, smollm2_path: Path) -> None:
        bad = tmp_path / "bad.gguf"
        bad.write_bytes(b"GGML" + bytes(100))
        fails(lamella("run", str(bad), "--prompt", "x"), "bad.gguf")
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(smollm2_path.read_bytes()[:5_000_000])
        fails(lamella("run", str(cut), "--prompt", "x"), "cut.gguf")

    def test_requests_that_cannot_be_served(self, smollm2_path: Path) -> None:
        model = str(smollm2_path)
        fails(lamella("run", model, "--prompt", "x", "--max-tokens", "-3"), "max_tokens", "-3")
        fails(lamella("run", model, "--prompt", "word " * 100, "--max-model-len", "32"), "32")
        fails(lamella("run", model, "--prompt", ""), "prompt")
        fails(lamella("run", model, "--prompt", "x", "--temperature", "nan"), "temperature")
        fails(lamella("run", model, "--prompt", "x", "--max-model-len", "100000"), "100000", "8192")

    def test_input_that_is_no_text(self, smollm2_path: Path) -> None:
        for words in (("run", "--prompt", "-"), ("run", "--message", "-"), ("chat",)):
            result = subprocess.run(
                [sys.executable, "-m", "lamella.engine.cli.main", words[0], str(smollm2_path), *words[1:]],
                input=b"abc \xff\xfe\n",
                capture_output=True,
                timeout=120,
                check=False,
            )
            assert result.returncode == 1
            assert b"Traceback" not in result.stderr
            assert b"lamella: standard input is not valid utf-8" in result.stderr

    def test_a_model_that_gives_no_numbers(self, tmp_path: Path) -> None:
        model = write_folder(tmp_path / "nan", "llama")
        save_file({name: t * float("nan") for name, t in model.state.items()}, tmp_path / "nan" / "model.safetensors")
        result = lamella("run", str(tmp_path / "nan"), "--prompt", "x", "--max-num-batched-tokens", "64")
        assert result.returncode == 1
        assert "lamella: the answer broke off: " in result.stderr
        assert "Traceback" not in result.stderr

    def test_numbers_of_benches(self, tmp_path: Path) -> None:
        latency, throughput, serve = (("bench", what) for what in ("latency", "throughput", "serve"))
        fails(lamella(*latency, "smollm2", "--batch-size", "0"), "--batch-size", "at least 1, got 0")
        fails(lamella(*throughput, "smollm2", "--spread", "nan"), "--spread", "nan")
        fails(lamella(*latency, "smollm2", "--json", str(tmp_path)), "--json", "is a folder")
        fails(lamella(*serve, "--base-url", "http://h:99999"), "http://h:99999")
        fails(lamella("bench"), "required: what")

    def test_port_in_use(self, smollm2_path: Path) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            fails(lamella("serve", str(smollm2_path), "--port", str(port)), str(port), "in use")


class TestStandardStreams:
    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no disk that is always full")
    def test_a_full_disk_is_told(self, smollm2_path: Path) -> None:
        words = [sys.executable, "-m", "lamella.engine.cli.main", "pull", str(smollm2_path)]
        with open("/dev/full", "w") as full:
            result = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
        assert result.returncode == 1
        assert result.stderr == "lamella: [Errno 28] No space left on device\n"

    def test_a_reader_that_leaves_is_no_fault_to_talk_about(self) -> None:
        words = [sys.executable, "-m", "lamella.engine.cli.main", "--help"]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
        process.wait(60)

    def test_closed_ones_are_nobodys(self, tmp_path: Path) -> None:
        """As under some supervisors: neither lost output nor files that take the messages meant for them."""
        write_folder(tmp_path / "tiny", "llama")
        lamella_run = f'"{sys.executable}" -m lamella.engine.cli.main run "{tmp_path}/tiny" --prompt x --max-tokens 2'
        for closed in ("2>&-", "<&- 2>&-", ">&- 2>&-", "<&- >&- 2>&-"):
            result = subprocess.run(
                ["sh", "-c", f"{lamella_run} --json {closed}"], stdout=subprocess.PIPE, timeout=60, check=False
            )
            assert result.returncode == 0, closed
            if ">&- 2" not in closed:
                assert len(json.loads(result.stdout)["output_token_ids"]) == 2
