"""`lamella serve` as it is installed: the command, its core process and a checkpoint, asked by the official client."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import openai
import psutil
import pytest

from lamella.runner_v2.testing.tiny_models import write_folder

MODEL = "tiny"
MAX_LEN = 4096


class Server(NamedTuple):
    process: subprocess.Popen[str]
    log: Path
    url: str

    @property
    def cores(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def gauge(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics").text
        found = re.search(rf"^lamella:{name}{{.*}} (\S+)$", text, re.MULTILINE)
        assert found is not None, name
        return float(found[1])


def start(folder: Path, log: Path) -> subprocess.Popen[str]:
    words = ["serve", str(folder), "--port", "0", "--served-model-name", MODEL, "--max-model-len", str(MAX_LEN)]
    words += ["--max-num-seqs", "4", "--threads", "1", "--kv-cache-memory", "64MiB"]
    with log.open("w") as stderr:
        return subprocess.Popen([sys.executable, "-m", "lamella.engine.cli.main", *words], stderr=stderr, text=True)


def wait_for(pattern: str, process: subprocess.Popen[str], log: Path) -> str:
    deadline = time.monotonic() + 60
    while (found := re.search(pattern, log.read_text())) is None:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)
    return found[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny"), "llama", max_position_embeddings=MAX_LEN).path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    log = folder / "log"
    process = start(folder, log)
    try:
        yield Server(process, log, wait_for(r"serving tiny on (http://\S+)", process, log))
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def test_completions_streamed_and_whole_are_the_same(client: openai.OpenAI) -> None:
    whole = client.completions.create(
        model=MODEL, prompt="the cat", max_tokens=12, temperature=0, logprobs=2, extra_body={"ignore_eos": True}
    )
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12
    choice = whole.choices[0]
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.top_logprobs is not None
    assert len(choice.logprobs.token_logprobs) == 12
    # random weights write bytes that are no text, whose tokens cannot be joined: compare places
    assert choice.logprobs.text_offset == sorted(choice.logprobs.text_offset or [])
    assert len(choice.logprobs.tokens or []) == 12
    for value, best in zip(choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True):
        assert value is not None
        assert value <= 0
        assert value == pytest.approx(max(best.values())), "greedy takes the best"
    stream = client.completions.create(
        model=MODEL,
        prompt="the cat",
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    *chunks, last = stream
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    assert chunks[-1].choices[0].finish_reason == "length"
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 12


def test_a_chat_with_several_choices(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "tell me something"}]
    fields = {"model": MODEL, "messages": messages, "max_tokens": 10, "temperature": 0.9, "seed": 5, "n": 3}
    whole = client.chat.completions.create(**fields)
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len(set(texts)) > 1, "each choice has noise of its own"
    assert client.chat.completions.create(**fields).choices[2].message.content == texts[2], "and a seed repeats it"
    streamed = ["", "", ""]
    ends: dict[int, str] = {}
    for chunk in client.chat.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert streamed == texts
    assert ends == {choice.index: choice.finish_reason for choice in whole.choices}


def test_a_stop_string_cuts_the_text(client: openai.OpenAI) -> None:
    fields = {"model": MODEL, "prompt": "once upon", "temperature": 0, "extra_body": {"ignore_eos": True}}
    text = client.completions.create(**fields, max_tokens=30).choices[0].text
    stop = text[len(text) // 2 :][:3]
    choice = client.completions.create(**fields, max_tokens=30, stop=[stop]).choices[0]
    assert choice.text == text[: text.index(stop)]
    assert choice.finish_reason == "stop"


def test_a_mistake_is_the_clients_and_hurts_nobody(client: openai.OpenAI) -> None:
    barred = {"allowed_token_ids": [50, 51], "bad_words": [], "stop_token_ids": [50, 51], "min_tokens": 2}
    with pytest.raises(openai.BadRequestError, match="allowed_token_ids"):
        client.completions.create(model=MODEL, prompt="a", max_tokens=4, extra_body=barred)
    with pytest.raises(openai.BadRequestError, match=f"{MAX_LEN}"):
        client.completions.create(model=MODEL, prompt=[5] * (MAX_LEN + 1), max_tokens=4)
    assert client.completions.create(model=MODEL, prompt="a", max_tokens=1).usage is not None


def test_a_reader_that_leaves_ends_its_request(client: openai.OpenAI, server: Server) -> None:
    generated = server.gauge("generation_tokens_total")
    stream = client.completions.create(
        model=MODEL, prompt="x", max_tokens=MAX_LEN - 100, n=2, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    deadline = time.monotonic() + 10
    while server.gauge("num_requests_running") != 2:
        assert time.monotonic() < deadline
    stream.close()
    while server.gauge("num_requests_running") or server.gauge("kv_cache_usage_perc"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert server.gauge("generation_tokens_total") - generated < 2 * (MAX_LEN - 100), "it did not run to its end"


def test_a_signal_ends_everything(server: Server) -> None:
    assert httpx.get(f"{server.url}/health").status_code == 200
    cores = server.cores
    assert len(cores) == 1
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(20) == 0
    assert not any(core.is_running() for core in cores)
    assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize("delay_s", [0.0, 0.2])
def test_a_signal_while_loading_ends_everything(folder: Path, delay_s: float) -> None:
    process = start(folder, folder / "log")
    try:
        parent = psutil.Process(process.pid)
        while not (cores := parent.children()):
            assert process.poll() is None
            time.sleep(0.005)
        time.sleep(delay_s)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        psutil.wait_procs(cores, timeout=5)
        assert not any(core.is_running() for core in cores)
        assert "Traceback" not in (folder / "log").read_text()
    finally:
        process.kill()
        process.wait()


def test_a_core_killed_while_loading_is_told(folder: Path) -> None:
    process = start(folder, folder / "log")
    try:
        parent = psutil.Process(process.pid)
        while not (cores := parent.children()):
            assert process.poll() is None
            time.sleep(0.005)
        cores[0].kill()
        assert process.wait(20) == 1
        assert (
            "lamella: the engine core ended before it was ready: the process ended by signal 9"
            in (folder / "log").read_text()
        )
    finally:
        process.kill()
        process.wait()
