from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from lamella.engine.client import EngineClient
from lamella.engine.errors import EngineDeadError, StartError
from lamella.engine.links.thread import MAX_MESSAGES, ThreadLink
from lamella.engine.request import Request, SamplingParams
from lamella.engine.testing.scripted_core import ScriptedCore


def request(request_id: str) -> Request:
    return Request(request_id, list(b"say:abc"), SamplingParams(max_tokens=9), 9, [257])


def test_a_core_on_a_thread_answers_and_is_closed() -> None:
    async def main() -> None:
        core = ScriptedCore()
        lines: list[str] = []

        def build(progress: Callable[[str], None]) -> ScriptedCore:
            progress("building")
            return core

        client = EngineClient(ThreadLink(build), progress=lines.append)
        await client.start()
        ids = [token_id async for delta in client.submit(request("r")) for token_id in delta.token_ids]
        assert ids == [*b"abc", 257]
        assert await client.call("held") == 0
        await client.close()
        assert core.closed
        assert lines == ["building"]

    asyncio.run(main())


def test_a_loop_that_does_not_listen_holds_the_core_up() -> None:
    async def main() -> None:
        core = ScriptedCore()
        client = EngineClient(ThreadLink(lambda _progress: core))
        await client.start()
        stream = client.submit(Request("r", list(b"say:"), SamplingParams(max_tokens=5000), 5000, []))
        await stream.take()
        for _ in range(3):
            before = core.steps
            time.sleep(0.05)  # the loop, which is this thread, listens to nothing
            assert core.steps - before <= MAX_MESSAGES + 1
            ids = [token_id for delta in await stream.take() for token_id in delta.token_ids]
            assert ids
        stream.close()
        client.submit(Request("s", list(b"say:"), SamplingParams(max_tokens=5000), 5000, []))
        time.sleep(0.05)
        await client.close()
        assert core.closed

    asyncio.run(main())


def test_a_crash_reaches_the_reader() -> None:
    async def main() -> None:
        client = EngineClient(ThreadLink(lambda _progress: ScriptedCore(crash_after=2)))
        await client.start()
        stream = client.submit(request("r"))
        assert await stream.take()
        with pytest.raises(EngineDeadError, match="the script says crash"):
            await stream.take()
        await client.close()

    asyncio.run(main())


def test_a_core_that_cannot_be_built() -> None:
    def build(_progress: Callable[[str], None]) -> ScriptedCore:
        raise StartError("no such model")

    async def main() -> None:
        client = EngineClient(ThreadLink(build))
        with pytest.raises(StartError, match="no such model"):
            await client.start()
        await client.close()

    asyncio.run(main())
