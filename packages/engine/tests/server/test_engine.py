"""The server over the real core: scheduler, block manager and executor, with a runner that needs no model."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from lamella.engine.core import CoreOptions, EngineCore
from lamella.engine.executor.in_process import InProcess
from lamella.engine.testing.server_thread import MODEL, ServerThread, serve
from lamella.runner_v2.testing.fake_runner import FakeModel, FakeRunner


class SlowRunner(FakeRunner):
    """Takes a moment for each step, so that a test can meet a running request."""

    def step(self, step: object) -> object:  # type: ignore[override]
        time.sleep(0.002)
        return super().step(step)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def core() -> EngineCore:
    executor = InProcess(SlowRunner(FakeModel(vocab_size=259), max_num_rows=4))
    options = CoreOptions(max_model_len=256, max_num_seqs=4, max_num_batched_tokens=32, num_blocks=(200,))
    return EngineCore(executor, executor.open(), options)


@pytest.fixture(scope="module")
def server(core: EngineCore) -> Iterator[ServerThread]:
    with serve(core, max_logprobs=-1) as running:
        yield running


def idle(core: EngineCore) -> None:
    """Wait until nothing runs, and check that every block is back."""
    deadline = time.monotonic() + 5
    while core.has_work:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    core.check()


def test_many_clients_get_what_each_would_get_alone(core: EngineCore, server: ServerThread) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=30) as client:

            async def ask(i: int) -> str:
                answer = await client.completions.create(
                    model=MODEL, prompt=f"prompt {i % 4}", max_tokens=20 + i % 4, temperature=0
                )
                assert answer.usage is not None
                return answer.choices[0].text

            alone = [await ask(i) for i in range(4)]
            together = await asyncio.gather(*(ask(i) for i in range(64)))
            assert together == [alone[i % 4] for i in range(64)]
            assert len(set(alone)) == 4

    asyncio.run(main())
    idle(core)


def test_a_client_that_leaves_gives_its_blocks_back(core: EngineCore, server: ServerThread) -> None:
    for stream in (False, True):
        body = {"prompt": "x" * 100, "max_tokens": 150, "n": 2, "stream": stream, "ignore_eos": True}
        data = json.dumps(body).encode()
        with socket.create_connection((server.handle.host, server.handle.port)) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data) + data
            )
            deadline = time.monotonic() + 5
            while core.stats().num_running < 2:
                assert time.monotonic() < deadline
                time.sleep(0.002)
            steps = core.stats().steps
        idle(core)
        assert core.stats().steps - steps < 60, "it did not run to its end"


def test_the_cache_is_told_in_the_usage(core: EngineCore, server: ServerThread) -> None:
    with httpx.Client(base_url=server.url) as http:
        body = {"prompt": "the same long prompt twice", "max_tokens": 2}
        first, second = (http.post("/v1/completions", json=body).json()["usage"] for _ in range(2))
        assert first["prompt_tokens_details"]["cached_tokens"] == 0
        assert second["prompt_tokens_details"]["cached_tokens"] == 24
        assert "lamella:prefix_cache_hits_total" in http.get("/metrics").text
    idle(core)


def test_without_a_limit_logprobs_are_those_of_all_tokens(server: ServerThread) -> None:
    with httpx.Client(base_url=server.url, timeout=30) as http:

        def choice(path: str, body: dict[str, object]) -> Any:
            answer = http.post(f"/v1/{path}", json={"max_tokens": 2, "ignore_eos": True, **body})
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]

        chosen = choice("completions", {"prompt": "x", "logprobs": -1, "return_tokens_as_token_ids": True})
        assert [len(top) for top in chosen["logprobs"]["top_logprobs"]] == [259, 259]
        messages = [{"role": "user", "content": "x"}]
        chosen = choice("chat/completions", {"messages": messages, "logprobs": True, "top_logprobs": -1})
        assert [len(entry["top_logprobs"]) for entry in chosen["logprobs"]["content"]] == [259, 259]
        wrong = http.post("/v1/chat/completions", json={"messages": messages, "logprobs": True, "top_logprobs": -2})
        assert "top_logprobs must be in [-1, " in wrong.json()["error"]["message"]


def test_prompt_and_output_logprobs_line_up(core: EngineCore, server: ServerThread) -> None:
    with httpx.Client(base_url=server.url) as http:
        body = {"prompt": "score me", "max_tokens": 3, "echo": True, "logprobs": 2, "ignore_eos": True}
        choice = http.post("/v1/completions", json=body).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["text_offset"]) == len("score me") + 3
    assert logprobs["token_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    assert "".join(logprobs["tokens"][: len("score me")]) == "score me"
    idle(core)


def test_a_stop_string_ends_one_of_several(core: EngineCore, server: ServerThread) -> None:
    with httpx.Client(base_url=server.url) as http:
        body = {"prompt": "go", "max_tokens": 200, "n": 3, "seed": 1, "stop": ["a", "e", "\ufffd"], "ignore_eos": True}
        choices = http.post("/v1/completions", json=body, timeout=30).json()["choices"]
    assert {choice["finish_reason"] for choice in choices} <= {"stop", "length"}
    assert any(choice["stop_reason"] for choice in choices)
    assert not any(letter in choice["text"] for choice in choices for letter in "ae\ufffd")
    idle(core)


def test_a_request_that_forbids_every_token_is_a_mistake_of_its_client(core: EngineCore, server: ServerThread) -> None:
    with httpx.Client(base_url=server.url) as http:
        body = {"prompt": "x", "max_tokens": 4, "allowed_token_ids": [65], "stop_token_ids": [65], "min_tokens": 2}
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert all(name in error["message"] for name in ("allowed_token_ids", "bad_words", "min_tokens"))
        assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 4}).status_code == 200
    idle(core)
