"""One server over a scripted core for the tests that leave it as it is."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from lamella.engine.testing.scripted_core import ScriptedCore
from lamella.engine.testing.server_thread import ServerThread, serve


@pytest.fixture(scope="module")
def core() -> ScriptedCore:
    return ScriptedCore()


@pytest.fixture(scope="module")
def server(core: ScriptedCore) -> Iterator[ServerThread]:
    with serve(core) as running:
        yield running
        assert running.client is not None
        assert running.client.num_open == 0


@pytest.fixture(scope="module")
def http(server: ServerThread) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client


@pytest.fixture(scope="module")
def client(server: ServerThread) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=20) as made:
        yield made
