"""A real core process with a scripted core in it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import psutil
import pytest
import zmq

from lamella.engine.client import DeltaStream, EngineClient
from lamella.engine.errors import EngineDeadError, StartError
from lamella.engine.links.process import LAST_WORDS_S, ProcessLink
from lamella.engine.request import Request, SamplingParams
from lamella.engine.testing.scripted_core import FACTORY
from lamella.engine.wire import Dead, encoder


def request(request_id: str, text: bytes = b"say:abc", max_tokens: int = 100) -> Request:
    return Request(request_id, list(text), SamplingParams(max_tokens=max_tokens), max_tokens, [257])


@contextlib.asynccontextmanager
async def started(**config: Any) -> AsyncIterator[tuple[EngineClient, ProcessLink]]:
    link = ProcessLink(FACTORY, config)
    client = EngineClient(link)
    try:
        await client.start()
        yield client, link
    finally:
        await client.close()
        assert not link._endpoint.folder.exists()


async def to_the_end(stream: DeltaStream) -> None:
    while await stream.take():
        pass


def exists(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_requests_and_calls_go_through_the_process() -> None:
    async def main() -> None:
        lines: list[str] = []
        link = ProcessLink(FACTORY, {})
        client = EngineClient(link, progress=lines.append)
        info = await client.start()
        assert (info.max_model_len, lines) == (512, ["reading the script"])
        streams = [client.submit(request(f"r{i}", b"say:text %d" % i)) for i in range(20)]
        for i, stream in enumerate(streams):
            ids = [token_id async for delta in stream for token_id in delta.token_ids]
            assert bytes(ids[:-1]) == b"text %d" % i
            assert ids[-1] == 257
        assert client.stats.generation_tokens == sum(len(b"text %d" % i) + 1 for i in range(20))
        assert await client.call("echo", {"a": [1, 2.5, None]}) == {"a": [1, 2.5, None]}
        await client.close()
        assert link._process.returncode == 0
        assert not link._endpoint.folder.exists()

    asyncio.run(main())


def test_a_message_that_cannot_be_read_disturbs_no_other() -> None:
    async def main() -> None:
        async with started() as (client, link):
            await client.call("echo", {})
            for frame in (b"", b"garbage", msgspec.msgpack.encode(["add", ["r", [1], {"max_tokens": 2.5}, 1, []]])):
                link._push.send(frame)
            ids = [token_id async for delta in client.submit(request("a")) for token_id in delta.token_ids]
            assert bytes(ids[:-1]) == b"abc"

    asyncio.run(main())


def test_a_killed_core_fails_its_requests_within_a_second() -> None:
    async def main() -> None:
        async with started(step_s=0.01) as (client, link):
            stream = client.submit(request("a", max_tokens=400))
            await stream.take()
            os.kill(link.pid, signal.SIGKILL)
            killed_s = time.monotonic()
            with pytest.raises(EngineDeadError, match="ended by signal 9"):
                await to_the_end(stream)
            assert time.monotonic() - killed_s < 1.0
            assert client.dead == "the process ended by signal 9 (killed, as the system does when memory runs out)"

    asyncio.run(main())


def test_a_core_that_crashes_says_why() -> None:
    async def main() -> None:
        async with started(crash_after=2) as (client, link):
            stream = client.submit(request("a"))
            with pytest.raises(EngineDeadError, match="RuntimeError: the script says crash"):
                await to_the_end(stream)
            assert await asyncio.to_thread(link._process.wait, 5) == 1

    asyncio.run(main())


def test_the_reason_is_heard_though_it_comes_behind_the_end() -> None:
    """The exit of a process and its last message take different roads."""

    async def main() -> None:
        async with started() as (client, link):
            sender = link._context.socket(zmq.PUSH)
            sender.connect(link._endpoint.to_client)

            def speak() -> None:
                sender.send(encoder.encode(Dead("the disk is full")))
                sender.close(linger=1000)

            exited = link._exited

            def late(code: int) -> None:
                exited(code)
                asyncio.get_running_loop().call_later(LAST_WORDS_S / 5, speak)

            link._exited = late  # type: ignore[method-assign]
            os.kill(link.pid, signal.SIGKILL)
            assert await asyncio.wait_for(client.wait_dead(), 5) == "the disk is full"

    asyncio.run(main())


def test_a_core_that_cannot_start_gives_one_line() -> None:
    async def main() -> None:
        with pytest.raises(StartError, match=r"^the file is truncated$"):
            async with started(fail="the file is truncated"):
                pass
        with pytest.raises(StartError, match="TypeError: .*unexpected keyword argument 'nonsense'"):
            async with started(nonsense=1):
                pass

    asyncio.run(main())


def test_sigterm_lets_running_requests_finish_and_refuses_others() -> None:
    async def main() -> None:
        async with started(step_s=0.02) as (client, link):
            stream = client.submit(request("a", b"say:abcdefghij"))
            await stream.take()
            os.kill(link.pid, signal.SIGTERM)
            os.kill(link.pid, signal.SIGINT)  # a terminal's Ctrl-C reaches the core too, and is not its business
            late = client.submit(request("late"))
            ids = [token_id async for delta in stream for token_id in delta.token_ids]
            assert bytes(ids[:-1]).endswith(b"ij")
            (refused,) = [delta async for delta in late]
            assert (refused.finish_reason, refused.error) == ("abort", "the engine shuts down")
            assert await asyncio.wait_for(client.wait_dead(), 5) == "the process ended with code 0"

    asyncio.run(main())


def test_the_core_ends_when_its_client_is_killed() -> None:
    program = (
        "import sys, time\n"
        "from lamella.engine.links.process import ProcessLink\n"
        f"link = ProcessLink({FACTORY!r}, {{}})\n"
        "print(link.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    core_pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 15
    while exists(core_pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not exists(core_pid)


def test_a_core_that_hangs_tells_where_and_is_ended(capfd: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        link = ProcessLink(FACTORY, {"hang_after": 2})
        client = EngineClient(link, step_timeout_s=0.3)
        await client.start()
        stream = client.submit(request("a"))
        with pytest.raises(EngineDeadError, match="it hangs"):
            await to_the_end(stream)
        begun_s = time.monotonic()
        await client.close()
        assert time.monotonic() - begun_s < 3
        assert link._process.returncode == -signal.SIGKILL

    asyncio.run(main())
    stacks = capfd.readouterr().err
    assert "scripted_core.py" in stacks
    assert "in run_once" in stacks
    assert "core-output" in stacks or "outbox.py" in stacks, "of all threads"


def test_a_core_that_was_stopped_is_ended() -> None:
    async def main() -> None:
        link = ProcessLink(FACTORY, {"step_s": 0.01})
        client = EngineClient(link, step_timeout_s=0.3)
        await client.start()
        stream = client.submit(request("a", max_tokens=400))
        await stream.take()
        os.kill(link.pid, signal.SIGSTOP)
        with pytest.raises(EngineDeadError, match="it hangs"):
            await to_the_end(stream)
        await client.close()
        assert link._process.returncode == -signal.SIGKILL

    asyncio.run(main())


def test_a_client_that_does_not_read_misses_nothing() -> None:
    async def main() -> None:
        async with started(tokens_per_step=200) as (client, _link):
            text = b"say:" + bytes(range(97, 123)) * 4
            params = SamplingParams(max_tokens=100_000, ignore_eos=True)
            stream = client.submit(Request("a", list(text), params, 100_000, [257]))
            time.sleep(0.5)  # hundreds of messages come meanwhile
            ids = [token_id async for delta in stream for token_id in delta.token_ids]
            assert bytes(ids[:104]) == text[4:]
            assert len(ids) == 100_000
            assert client.stats.steps == 500

    asyncio.run(main())


def test_closing_kills_a_core_that_does_not_end() -> None:
    async def main() -> None:
        link = ProcessLink(FACTORY, {"step_s": 60.0})
        client = EngineClient(link)
        await client.start()
        client.submit(request("a"))
        await asyncio.sleep(0.1)
        await client.close(timeout_s=0.2)
        assert link._process.returncode == -signal.SIGKILL

    asyncio.run(main())


@pytest.mark.parametrize("state", ["never opened", "open", "loop closed"])
def test_a_road_that_was_abandoned_leaves_neither_process_nor_sockets(state: str) -> None:
    link = ProcessLink(FACTORY, {})
    core = psutil.Process(link.pid)

    async def main() -> None:
        if state != "never opened":
            await EngineClient(link).start()
        if state != "loop closed":
            link.abandon()
            await asyncio.sleep(0.05)

    asyncio.run(main())
    link.abandon()
    assert link._context.closed  # else its collection would wait for its sockets
    assert not link._endpoint.folder.exists()
    psutil.wait_procs([core], timeout=10)
    assert not exists(core.pid)
    link.close(1.0)
