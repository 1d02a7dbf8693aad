from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from lamella.engine.client import EngineClient, merge
from lamella.engine.errors import EngineDeadError, EngineError, OverloadedError, RequestError, StartError
from lamella.engine.metrics.counters import ServerCounters
from lamella.engine.request import Delta, Request, SamplingParams
from lamella.engine.testing.fake_link import FakeLink
from lamella.engine.testing.scripted_core import ScriptedCore
from lamella.engine.wire import Abort, Add, Batch, ToCore, encoder

PROMPT = list(b"say:abcdefgh")


def request(request_id: str = "r1", *, n: int = 1, max_tokens: int = 100) -> Request:
    return Request(request_id, PROMPT, SamplingParams(n=n, max_tokens=max_tokens), max_tokens, [257])


def run(scenario: Callable[[EngineClient, FakeLink, ScriptedCore], Awaitable[None]], **options: object) -> None:
    """Run a scenario with a started client over a core that steps by hand."""

    async def main() -> None:
        core = ScriptedCore()
        link = FakeLink(core, automatic=False)
        client = EngineClient(link, **options)  # type: ignore[arg-type]
        await client.start()
        await scenario(client, link, core)
        await client.close()
        assert core.closed

    asyncio.run(main())


def test_starting_again_changes_nothing() -> None:
    async def main() -> None:
        link = FakeLink(ScriptedCore())
        client = EngineClient(link)
        first, *others = await asyncio.gather(client.start(), client.start(), client.start())
        assert all(info is first for info in others)
        assert await client.start() is first
        assert [delta.token_ids for delta in await client.submit(request(max_tokens=1)).take()] == [[97]]
        await client.close()

    asyncio.run(main())


def test_one_waiter_that_gives_up_leaves_the_start_to_the_others() -> None:
    async def main() -> None:
        link = FakeLink(ScriptedCore(), automatic=False)
        client = EngineClient(link)
        waiters = [asyncio.create_task(client.start()) for _ in range(2)]
        await asyncio.sleep(0)
        waiters[0].cancel()
        assert (await asyncio.wait_for(waiters[1], 5)).vocab_size > 0
        await client.close()

    asyncio.run(main())


def test_another_loop_is_told() -> None:
    client = EngineClient(FakeLink(ScriptedCore()))
    asyncio.run(client.start())

    async def use() -> None:
        for act in (client.start, lambda: client.call("ping")):
            with pytest.raises(EngineError, match="started on another event loop"):
                await act()
        with pytest.raises(EngineError, match="started on another event loop"):
            client.submit(request())
        assert client.num_open == 0
        await client.close()

    asyncio.run(use())


def test_a_lagging_reader_gets_one_merged_delta_per_sequence() -> None:
    async def scenario(client: EngineClient, link: FakeLink, core: ScriptedCore) -> None:
        stream = client.submit(request(n=2, max_tokens=3))
        for _ in range(2):
            link.step()
        deltas = await stream.take()
        assert [(d.index, d.token_ids, d.finish_reason) for d in deltas] == [(0, [97, 98], None), (1, [97, 98], None)]
        assert deltas[0].queued_s == 0.001, "what came with the first delta stays"
        link.step()
        assert [(d.token_ids, d.finish_reason) for d in await stream.take()] == [([99], "length")] * 2
        assert await stream.take() == []
        assert client.num_open == client.num_requests == 0

    run(scenario)


def test_merging_keeps_logprobs_aligned_with_tokens() -> None:
    async def scenario(client: EngineClient, link: FakeLink, core: ScriptedCore) -> None:
        params = SamplingParams(max_tokens=3, logprobs=1, prompt_logprobs=0)
        stream = client.submit(Request("r", PROMPT, params, 3, [257]))
        for _ in range(3):
            link.step()
        (delta,) = await stream.take()
        assert delta.logprobs is not None
        assert [entry.token_ids[0] for entry in delta.logprobs] == delta.token_ids == [97, 98, 99]
        assert delta.prompt_logprobs is not None
        assert len(delta.prompt_logprobs) == len(PROMPT)

    run(scenario)


def test_a_batch_without_deltas_brings_its_stats() -> None:
    async def scenario(client: EngineClient, link: FakeLink, core: ScriptedCore) -> None:
        seen: list[Batch] = []
        counters = ServerCounters(512)
        client.observers += [seen.append, counters.on_batch]
        stream = client.submit(request(max_tokens=2))
        link.step()
        await stream.take()
        stream.close()
        link.step()
        assert (seen[0].deltas != [], seen[1].deltas) == (True, [])
        assert client.stats == counters.stats == seen[1].stats
        assert (client.stats.num_running, client.stats.kv_usage) == (0, 0.0)

    run(scenario)


def test_a_waiting_reader_wakes_when_a_step_ends() -> None:
    async def scenario(client: EngineClient, link: FakeLink, core: ScriptedCore) -> None:
        stream = client.submit(request(max_tokens=2))
        asyncio.get_running_loop().call_later(0.01, link.step)
        assert (await stream.take())[0].token_ids == [97]
        link.step()
        assert [delta.token_ids async for delta in stream] == [[98]]

    run(scenario)


def test_a_reader_may_set_a_time_limit() -> None:
    async def scenario(client: EngineClient, link: FakeLink, core: ScriptedCore) -> None:
        stream = client.submit(request(max_tokens=2))
        with pytest.raises(TimeoutError):
            await stream.take(0.005)
        link.step()
        assert (await stream.take(0.0))[0].token_ids == [97], "what waits is given at once"
        asyncio.get_running_loop().call_later(0.01, link.step)
        assert (await stream.take(5.0))[0].token_ids == [98]
        assert await stream.take(0.0) == []

    run(scenario)


def test_stopping_one_sequence_leaves_the_others_running() -> None:
    async def scenario(client: EngineClient, link: FakeLink, core: ScriptedCore) -> None:
        stream = client.submit(request(n=3, max_tokens=2))
        link.step()
        await stream.take()
        stream.stop("r1", 1)
        assert core.aborted == ["r1#1"]
        assert core.num_held == client.num_open == 2
        link.step()
        assert [delta.index for delta in await stream.take()] == [0, 2]
        assert await stream.take() == []

    run(scenario)


def test_stopping_an_ended_sequence_aborts_nothing() -> None:
    async def scenario(client: EngineClient, link: FakeLink, core: ScriptedCore) -> None:
        stream = client.submit(request(max_tokens=1))
        link.step()
        stream.stop("r1", 0)
        assert core.aborted == []
        assert await stream.take() == []

    run(scenario)


def test_closing_a_stream_aborts_what_runs_and_wakes_the_reader() -> None:
    async def scenario(client: EngineClient, link: FakeLink, core: ScriptedCore) -> None:
        stream = client.submit(request("a"), request("b", n=2))
        other = client.submit(request("c", max_tokens=1))
        reader = asyncio.ensure_future(stream.take())
        await asyncio.sleep(0)
        stream.close()
        assert await reader == []
        assert [m for m in link.sent if isinstance(m, Abort)] == [Abort(["a", "b"])]
        stream.close()
        assert len([m for m in link.sent if isinstance(m, Abort)]) == 1
        link.step()
        assert [d.request_id for d in await other.take()] == ["c"]
        assert core.num_held == client.num_open == 0

    run(scenario)


def test_abort_by_id_ends_that_request_only() -> None:
    async def scenario(client: EngineClient, link: FakeLink, core: ScriptedCore) -> None:
        stream = client.submit(request("a"), request("b", max_tokens=1))
        client.abort(["a", "unknown"])
        link.step()
        assert [d.request_id for d in await stream.take()] == ["b"]
        assert await stream.take() == []

    run(scenario)


def test_late_deltas_of_an_aborted_request_are_dropped() -> None:
    async def scenario(client: EngineClient, link: FakeLink, core: ScriptedCore) -> None:
        stream = client.submit(request())
        stream.close()
        stream.put(Delta("r1", 0, [97]))
        assert await stream.take() == []

    run(scenario)


def test_a_full_queue_refuses_all_or_nothing() -> None:
    async def scenario(client: EngineClient, link: FakeLink, core: ScriptedCore) -> None:
        # eight sequences run at once, two requests may wait, whatever their n
        client.submit(request("seven", n=7))
        client.submit(request("first", n=5))
        with pytest.raises(OverloadedError, match="1 request waits behind 1 that may run, 2 may wait") as refused:
            client.submit(request("x"), request("y"))
        assert 1 <= refused.value.retry_after_s <= 60
        second = client.submit(request("second"))
        with pytest.raises(OverloadedError, match="2 requests wait behind 1 that may run, 2 may wait"):
            client.admit(1)
        second.close()
        client.submit(request("third", n=3))
        assert [m.request.request_id for m in link.sent if isinstance(m, Add)] == ["seven", "first", "second", "third"]

    run(scenario, max_queued=2)


def test_an_idle_engine_takes_any_number() -> None:
    async def scenario(client: EngineClient, link: FakeLink, core: ScriptedCore) -> None:
        many = client.submit(*(request(str(number)) for number in range(12)))
        with pytest.raises(OverloadedError, match="4 requests wait behind 8 that may run, 0 may wait"):
            client.submit(request("one"))
        many.close()
        client.submit(request("one"))
        client.submit(request("seven", n=7))
        with pytest.raises(OverloadedError, match="0 requests wait behind 2 that may run"):
            client.submit(request("ninth"))

    run(scenario, max_queued=0)


def test_an_id_in_use_is_refused() -> None:
    async def scenario(client: EngineClient, link: FakeLink, core: ScriptedCore) -> None:
        client.submit(request("a"))
        with pytest.raises(RequestError, match="'a' is in use"):
            client.submit(request("b"), request("a"))
        assert client.num_requests == 1

    run(scenario)


@pytest.mark.parametrize("silently", [True, False])
def test_a_dead_core_fails_streams_and_calls_at_once(silently: bool) -> None:
    async def scenario(client: EngineClient, link: FakeLink, core: ScriptedCore) -> None:
        stream = client.submit(request())
        waiting = client.submit(request("w"))
        link.step()
        await waiting.take()
        reader = asyncio.ensure_future(waiting.take())
        await asyncio.sleep(0)
        link.die("out of memory", silently=silently)
        with pytest.raises(EngineDeadError, match="out of memory"):
            await reader
        assert [d.token_ids for d in await stream.take()] == [[97]], "what came before is not lost"
        with pytest.raises(EngineDeadError, match="out of memory"):
            await stream.take()
        with pytest.raises(EngineDeadError):
            client.submit(request("late"))
        with pytest.raises(EngineDeadError):
            await client.call("ping")
        assert await client.wait_dead() == client.dead == "out of memory"
        assert client.num_open == 0

    run(scenario)


def test_a_call_in_flight_fails_with_the_core() -> None:
    class SilentLink(FakeLink):
        def send(self, message: object) -> None:
            del message

    async def main() -> None:
        link = SilentLink(ScriptedCore())
        client = EngineClient(link)
        await client.start()
        call = asyncio.ensure_future(client.call("held"))
        await asyncio.sleep(0)
        link.die()
        with pytest.raises(EngineDeadError):
            await call

    asyncio.run(main())


def test_a_core_that_cannot_start_gives_its_reason() -> None:
    class BrokenLink(FakeLink):
        def open(self, loop: object, receive: object, lost: Callable[[str], None]) -> None:
            asyncio.get_running_loop().call_soon(lost, "the file is truncated")

    async def main() -> None:
        client = EngineClient(BrokenLink(ScriptedCore()))
        with pytest.raises(StartError, match="the file is truncated"):
            await client.start()
        with pytest.raises(EngineError, match="not started"):
            _ = client.info

    asyncio.run(main())


def test_calls_are_answered_and_batches_observed() -> None:
    async def scenario(client: EngineClient, link: FakeLink, core: ScriptedCore) -> None:
        seen: list[int] = []
        client.observers.append(lambda batch: seen.append(len(batch.deltas)))
        client.submit(request(n=3))
        link.step()
        assert seen == [3]
        assert client.stats.num_running == 3
        assert await client.call("held") == 3
        assert await client.call("echo", {"x": [1, "y"]}) == {"x": [1, "y"]}

    run(scenario)


def test_closing_fails_what_waits() -> None:
    async def main() -> None:
        link = FakeLink(ScriptedCore(), automatic=False)
        client = EngineClient(link)
        await client.start()
        stream = client.submit(request())
        link.send = lambda message: None  # type: ignore[method-assign]  # a core too busy to answer
        call = asyncio.ensure_future(client.call("held"))
        reader = asyncio.ensure_future(stream.take())
        await asyncio.sleep(0)
        await client.close()
        for waiting in (call, reader):
            with pytest.raises(EngineError, match="closed"):
                await asyncio.wait_for(waiting, 5.0)
        with pytest.raises(EngineError, match="closed"):
            client.submit(request())
        with pytest.raises(EngineError, match="closed"):
            await client.call("held")
        assert client.num_open == 0

    asyncio.run(main())


def test_closing_ends_a_start_that_waits() -> None:
    async def main() -> None:
        link = FakeLink(ScriptedCore(), automatic=False)
        link.open = lambda loop, receive, lost: None  # type: ignore[method-assign]  # loads for ever
        client = EngineClient(link)
        start = asyncio.ensure_future(client.start())
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(EngineError, match="closed"):
            await asyncio.wait_for(start, 5.0)
        with pytest.raises(EngineError, match="closed"):
            await client.start()

    asyncio.run(main())


def test_a_request_that_cannot_be_sent_leaves_nothing_open() -> None:
    async def scenario(client: EngineClient, link: FakeLink, core: ScriptedCore) -> None:
        send = link.send

        def encoding(message: ToCore) -> None:
            encoder.encode(message)
            send(message)

        link.send = encoding  # type: ignore[method-assign]
        unsendable = request("b", n=2)
        unsendable.cache_salt = object()  # type: ignore[assignment]
        with pytest.raises(TypeError, match="object"):
            client.submit(request("a"), unsendable, request("c"))
        assert client.num_open == client.num_requests == core.num_held == 0
        with pytest.raises(TypeError, match="object"):
            await client.call("echo", {"a": object()})
        stream = client.submit(request("a", max_tokens=1))
        link.step()
        assert (await stream.take())[0].finish_reason == "length"

    run(scenario)


def test_a_core_that_works_and_says_nothing_is_given_up() -> None:
    async def scenario(client: EngineClient, link: FakeLink, core: ScriptedCore) -> None:
        stream = client.submit(request(max_tokens=9))
        with pytest.raises(EngineDeadError, match=r"the engine core ended: it hangs: no step in 0\.05 s, though 1 req"):
            await stream.take()
        assert link.num_dumps == 1
        assert client.num_lost == 1
        with pytest.raises(EngineDeadError, match="it hangs"):
            client.submit(request("late"))
        with pytest.raises(EngineDeadError, match="it hangs"):
            await client.call("held")

    run(scenario, step_timeout_s=0.05)


def test_a_call_that_is_not_answered_counts_as_work() -> None:
    async def scenario(client: EngineClient, link: FakeLink, core: ScriptedCore) -> None:
        link.send = lambda message: None  # type: ignore[method-assign]
        with pytest.raises(EngineDeadError, match="it hangs"):
            await client.call("held")

    run(scenario, step_timeout_s=0.05)


def test_requests_that_are_given_up_do_not_hide_a_core_that_hangs() -> None:
    async def scenario(client: EngineClient, link: FakeLink, core: ScriptedCore) -> None:
        for number in range(1000):
            if client.dead is not None:
                break
            stream = client.submit(request(f"r{number}"))
            await asyncio.sleep(0.01)
            stream.close()
        assert "it hangs" in (client.dead or "")

    run(scenario, step_timeout_s=0.05)


def test_a_core_that_idles_or_speaks_is_left_alone() -> None:
    async def scenario(client: EngineClient, link: FakeLink, core: ScriptedCore) -> None:
        await asyncio.sleep(0.3)
        stream = client.submit(request(max_tokens=30))
        for _ in range(30):
            await asyncio.sleep(0.01)
            link.step()
        assert sum([len(delta.token_ids) async for delta in stream]) == 9
        assert (client.dead, link.num_dumps) == (None, 0)

    run(scenario, step_timeout_s=0.2)


def test_a_client_that_stood_still_does_not_blame_its_core() -> None:
    async def scenario(client: EngineClient, link: FakeLink, core: ScriptedCore) -> None:
        client.submit(request(max_tokens=30))
        for _ in range(3):
            time.sleep(0.3)  # the process was stopped
            await asyncio.sleep(0)
            link.step()
        assert client.dead is None

    run(scenario, step_timeout_s=0.2)


def test_merged_deltas_tell_of_the_drafts_of_both() -> None:
    first = Delta("r", 0, [1, 2], accepted_drafts=1, rejected_drafts=2, draft_rule="typical")
    merge(first, Delta("r", 0, [3], accepted_drafts=0, rejected_drafts=3))
    assert (first.token_ids, first.accepted_drafts, first.rejected_drafts) == ([1, 2, 3], 1, 5)
    assert first.draft_rule == "typical"
