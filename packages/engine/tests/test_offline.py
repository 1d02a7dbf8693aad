"""`LLM` and `AsyncLLM` on generated checkpoints: the same engine through both faces."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from lamella.engine import LLM, AsyncLLM, SamplingParams, async_llm
from lamella.engine.compose.front import load_front
from lamella.engine.errors import EngineDeadError, EngineError, RequestError, StartError

OPTIONS = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 64, "threads": 1}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPTS = ["hello there", "one two three", "a"]


@pytest.fixture(scope="module")
def llm(tiny_llama: str) -> Iterator[LLM]:
    with LLM(tiny_llama, **OPTIONS) as engine:
        yield engine


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.prompt for output in outputs] == PROMPTS
    for output in outputs:
        (completion,) = output.outputs
        assert output.finished
        assert completion.finish_reason == "length"
        assert len(completion.token_ids) == 6
        assert completion.text == llm.tokenizer.decode(completion.token_ids)
        assert output.ttft_s > 0
        alone = llm.generate(output.prompt or "", GREEDY)[0]
        assert alone.outputs[0].token_ids == completion.token_ids


def test_prompts_have_several_forms(llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPTS[0])
    by_text = llm.generate(PROMPTS[0], GREEDY)[0]
    for form in (ids, {"prompt": PROMPTS[0]}, {"prompt_token_ids": ids, "cache_salt": "s"}, [ids]):
        assert llm.generate(form, GREEDY)[0].outputs[0].token_ids == by_text.outputs[0].token_ids


def test_stream_is_the_output_in_pieces(llm: LLM) -> None:
    whole = llm.generate(PROMPTS[1], GREEDY)[0].outputs[0].text
    stream = llm.stream(PROMPTS[1], GREEDY)
    assert "".join(stream) == whole == stream.output.outputs[0].text
    assert stream.finished


def test_streams_share_the_steps_of_the_engine(llm: LLM) -> None:
    expected = [llm.generate(prompt, GREEDY)[0].outputs[0].text for prompt in PROMPTS[:2]]
    first, second = (llm.stream(prompt, GREEDY) for prompt in PROMPTS[:2])
    assert "".join(second) == expected[1]
    assert "".join(first) == expected[0]


def test_a_stream_that_is_closed_leaves_nothing_behind(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True))
    next(iter(stream))
    stream.close()
    llm.generate("x", GREEDY)
    assert llm.stats().kv_usage == 0.0
    assert not stream.finished


def test_a_stream_that_nobody_holds_is_closed(llm: LLM) -> None:
    """Left by an exception or a break, it must not go on taking its share of every step."""
    for _ in llm.stream(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True)):
        break
    llm.generate("x", GREEDY)
    assert (llm.stats().num_running, llm.stats().kv_usage) == (0, 0.0)


def test_a_second_thread_is_told_and_does_no_harm(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].token_ids
    told: list[str] = []

    def other() -> None:
        with pytest.raises(EngineError, match="another thread uses this LLM") as raised:
            llm.generate(PROMPTS[1], GREEDY)
        told.append(str(raised.value))

    def start_other() -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    before_step(monkeypatch, llm, 2, start_other)
    assert llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].token_ids == expected
    assert told
    monkeypatch.undo()
    assert llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].token_ids == expected
    assert (llm.stats().num_running, llm.stats().num_waiting, llm.stats().kv_usage) == (0, 0, 0.0)


def test_generating_as_finished_gives_the_shortest_first(llm: LLM) -> None:
    lengths = [20, 3, 9]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths]
    assert [len(o.outputs[0].token_ids) for o in llm.generate_as_finished(PROMPTS, params)] == sorted(lengths)


def test_chat_renders_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    output = llm.chat(messages, GREEDY)[0]
    assert "hi" in llm.tokenizer.decode(output.prompt_token_ids, False)
    both = llm.chat([messages, messages], GREEDY)
    assert [o.outputs[0].token_ids for o in both] == [output.outputs[0].token_ids] * 2


def test_logprobs_of_prompt_and_output(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    output = llm.generate(PROMPTS[1], params)[0]
    completion = output.outputs[0]
    assert completion.logprobs is not None
    assert completion.cumulative_logprob == pytest.approx(sum(e.chosen.logprob for e in completion.logprobs))
    assert all(len(entry.top) >= 2 for entry in completion.logprobs)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


def test_without_a_limit_logprobs_are_those_of_all_tokens(tiny_llama: str) -> None:
    with LLM(tiny_llama, **OPTIONS, max_logprobs=-1) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=-1, prompt_logprobs=-1)
        (output,) = llm.generate(PROMPTS[1], params)
        assert output.outputs[0].logprobs is not None
        assert output.prompt_logprobs is not None
        entries = [entry for entry in (*output.outputs[0].logprobs, *output.prompt_logprobs) if entry is not None]
        assert {len(entry.top) for entry in entries} == {llm.info.vocab_size}


def test_a_seed_of_minus_one_is_none(llm: LLM) -> None:
    params = SamplingParams(seed=-1, temperature=5.0, max_tokens=16, ignore_eos=True)
    assert len({tuple(output.outputs[0].token_ids) for output in llm.generate(["x"] * 4, params)}) == 4


def test_requests_that_cannot_be_served_are_refused_before_any_runs(llm: LLM) -> None:
    steps = llm.stats().steps
    for prompts, params, message in (
        ([*PROMPTS, ""], GREEDY, "no tokens"),
        ([[0, 10**6]], GREEDY, "token id 1000000"),
        (["x " * 200], GREEDY, "128"),
        (["x"], SamplingParams(temperature=-1.0), "temperature"),
        (["x"], SamplingParams(logprobs=21), "logprobs must be in \\[0, 20\\], got 21"),
        (["x"], SamplingParams(logprobs=-1), "logprobs -1 \\(all\\) is not allowed here, the limit is 20"),
        ([{"text": "x"}], GREEDY, "'prompt'"),
        ([3.5], GREEDY, "float"),
        (None, GREEDY, "not NoneType"),
        (5, GREEDY, "not int"),
        (b"x", GREEDY, "not bytes"),
        ({"prompt": 5}, GREEDY, "prompt must be a text, not int"),
        ({"prompt_token_ids": "x"}, GREEDY, "prompt_token_ids must be a list of token ids, not str"),
        ("\udcff", GREEDY, "unpaired surrogate"),
        ({"prompt": "x", "cache_salt": "\udcff"}, GREEDY, "cache_salt is not valid Unicode: .*U\\+DCFF at position 0"),
        (["x"], SamplingParams(stop=["a", "b\udcff"]), "stop is not valid Unicode: .*U\\+DCFF at position 1"),
        (["x"], SamplingParams(bad_words=["\udcff"]), "bad_words is not valid Unicode"),
        (["x"], SamplingParams(repetition_penalty=1e-9), "repetition_penalty"),
    ):
        with pytest.raises(RequestError, match=message):
            llm.generate(prompts, params)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="3 prompts but 2"):
        llm.generate(PROMPTS, [GREEDY, GREEDY])
    for messages, message in ((None, "not NoneType"), ("hi", "not str"), ({"role": "user"}, "not dict"), ([5], "int")):
        with pytest.raises(RequestError, match=message):
            llm.chat(messages, GREEDY)  # type: ignore[arg-type]
    assert llm.stats().steps == steps
    assert llm.generate("x", GREEDY)[0].finished


def test_the_engines_seed_makes_sampling_repeatable(tiny_llama: str) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    with (
        LLM(tiny_llama, seed=5, **OPTIONS) as one,
        LLM(tiny_llama, seed=5, **OPTIONS) as two,
        LLM(tiny_llama, **OPTIONS) as free,
    ):
        first = [o.outputs[0].token_ids for o in one.generate(PROMPTS, params)]
        assert [o.outputs[0].token_ids for o in two.generate(PROMPTS, params)] == first
        assert [o.outputs[0].token_ids for o in free.generate(PROMPTS, params)] != first
    assert len({tuple(ids) for ids in first}) == len(first)


def test_engines_that_share_threads_are_told_of(tiny_llama: str, caplog: pytest.LogCaptureFixture) -> None:
    counts = {**OPTIONS, "threads": 3}, {**OPTIONS, "threads": 3}, {**OPTIONS, "threads": 4}

    def warnings() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

    with LLM(tiny_llama, **counts[0]):
        caplog.clear()  # that of a test before may be open
        with LLM(tiny_llama, **counts[1]):
            assert not warnings()
        for _ in range(2):
            with LLM(tiny_llama, **counts[2]):
                (warning,) = [text for text in warnings() if "made for 3" in text]
                assert "with 4 threads" in warning
    LLM(tiny_llama, **OPTIONS).close()  # as the other tests want it


def test_options_are_checked_by_name(tiny_llama: str) -> None:
    with pytest.raises(StartError, match="did you mean 'max_num_seqs'"):
        LLM(tiny_llama, max_num_sequences=3)
    with pytest.raises(StartError, match="no method|method"):
        LLM(tiny_llama, **OPTIONS, speculative_config={"method": "telepathy", "num_speculative_tokens": 2})


def test_a_closed_engine_says_so(tiny_llama: str) -> None:
    llm = LLM(tiny_llama, **OPTIONS)
    stream = llm.stream("x", GREEDY)
    llm.close()
    llm.close()
    assert "".join(stream) == ""
    with pytest.raises(EngineError, match="closed"):
        llm.generate("x", GREEDY)


def before_step(monkeypatch: pytest.MonkeyPatch, llm: LLM, number: int, act: Callable[[], None]) -> None:
    """Have the worker do something at the beginning of its step of that number, counted from now."""
    worker: Any = llm._core._executor._worker  # type: ignore[attr-defined]
    run, numbers = worker.step, iter(range(1, 10**6))

    def step(step: Any) -> Any:
        if next(numbers) == number:
            act()
        return run(step)

    monkeypatch.setattr(worker, "step", step)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("number", [1, 3])
def test_an_interrupt_waits_for_the_end_of_its_step(llm: LLM, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]
    handler = signal.getsignal(signal.SIGINT)
    before_step(monkeypatch, llm, number, interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY)
    assert signal.getsignal(signal.SIGINT) is handler
    assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)] == expected
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0.0)


def test_an_interrupted_stream_can_go_on_and_loses_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [llm.generate(prompt, GREEDY)[0].outputs[0].text for prompt in PROMPTS[:2]]
    first, second = (llm.stream(prompt, GREEDY) for prompt in PROMPTS[:2])
    before_step(monkeypatch, llm, 3, interrupt)
    pieces: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        pieces.extend(first)
    text = first.output.outputs[0].text
    assert text == expected[0][: len(text)] != ""
    first.close()
    assert "".join(second) == expected[1]
    assert llm.chat([{"role": "user", "content": "hi"}], GREEDY)[0].finished


def test_an_interrupt_goes_to_the_handler_that_the_program_set(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: numbers.append(number))
    try:
        before_step(monkeypatch, llm, 2, interrupt)
        assert llm.generate("x", GREEDY)[0].finished
    finally:
        signal.signal(signal.SIGINT, before)
    assert numbers == [signal.SIGINT]


def test_another_thread_than_the_main_one_can_drive_the_engine(llm: LLM) -> None:
    outputs: list[Any] = []
    thread = threading.Thread(target=lambda: outputs.extend(llm.generate(PROMPTS, GREEDY)))
    thread.start()
    thread.join()
    assert [output.finished for output in outputs] == [True] * 3


def test_a_step_that_fails_ends_the_engine(tiny_llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("the memory is broken")

    with LLM(tiny_llama, **OPTIONS) as llm:
        other = llm.stream(PROMPTS[1], GREEDY)
        before_step(monkeypatch, llm, 2, fail)
        with pytest.raises(EngineDeadError, match="RuntimeError: the memory is broken"):
            llm.generate(PROMPTS[0], GREEDY)
        calls: list[Callable[[], Any]] = [
            lambda: llm.generate("x", GREEDY),
            lambda: llm.stream("x", GREEDY),
            lambda: list(llm.generate_as_finished(["x"], GREEDY)),
            lambda: list(other),
            llm.reset_prefix_cache,
        ]
        for call in calls:
            with pytest.raises(EngineDeadError, match="RuntimeError: the memory is broken"):
                call()


def test_a_broken_invariant_of_the_core_ends_the_engine(tiny_llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(tiny_llama, **OPTIONS) as llm:
        monkeypatch.setattr(llm._core._scheduler, "commit", lambda output: [][0])
        with pytest.raises(IndexError):
            llm.generate("x", GREEDY)
        with pytest.raises(EngineDeadError, match="IndexError: list index out of range"):
            llm.generate("x", GREEDY)


def test_outputs_come_as_finished_also_while_a_stream_makes_the_steps(llm: LLM) -> None:
    lengths = [9, 2, 5]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths]
    outputs = llm.generate_as_finished(PROMPTS, params)
    first = next(outputs)
    stream = llm.stream("x", SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    assert len(list(stream)) > 0
    steps = llm.stats().steps
    assert [len(o.outputs[0].token_ids) for o in (first, *outputs)] == sorted(lengths)
    assert llm.stats().steps == steps, "they had ended before"


def test_a_stream_has_one_answer(llm: LLM) -> None:
    with pytest.raises(RequestError, match="n is 2") as info:
        llm.stream("x", SamplingParams(n=2))
    assert info.value.param == "n"
    with pytest.raises(RequestError, match="n is 2"):
        llm.stream_chat([{"role": "user", "content": "hi"}], SamplingParams(n=2))


def test_priorities_are_one_for_each_prompt(llm: LLM) -> None:
    for call in (llm.generate, llm.generate_as_finished):
        with pytest.raises(RequestError, match="3 prompts but 2 priorities") as info:
            list(call(PROMPTS, GREEDY, priority=[0, 0]))
        assert info.value.param == "priority"
    with pytest.raises(RequestError, match="1 prompts but 2 priorities"):
        llm.chat([{"role": "user", "content": "hi"}], GREEDY, priority=[0, 0])


def test_priorities_need_their_policy(tiny_llama: str, llm: LLM) -> None:
    steps = llm.stats().steps
    with pytest.raises(RequestError, match="--scheduling-policy priority") as info:
        llm.generate(PROMPTS, GREEDY, priority=[0, 0, 1])
    assert info.value.param == "priority"
    assert llm.generate("x", GREEDY)[0].finished
    assert llm.stats().steps == steps + 6, "the other two were taken back"
    with LLM(tiny_llama, **{**OPTIONS, "max_num_seqs": 1}, scheduling_policy="priority") as engine:
        ended = [output.prompt for output in engine.generate_as_finished(PROMPTS, GREEDY, priority=[2, 0, 1])]
        assert ended == [PROMPTS[1], PROMPTS[2], PROMPTS[0]]


def test_parameters_of_a_wrong_type_are_refused_by_name(llm: LLM) -> None:
    for fields, param in (
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"n": True}, "n"),
        ({"stop": [b"x"]}, "stop"),
        ({"logit_bias": {"1": 2.0}}, "logit_bias"),
        ({"temperature": "hot"}, "temperature"),
    ):
        with pytest.raises(RequestError, match=param) as info:
            llm.generate("x", SamplingParams(**fields))
        assert info.value.param == param
    with pytest.raises(RequestError, match="not str"):
        llm.generate("x", {"max_tokens": 3})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="cache_salt must be a text, not int"):
        llm.generate({"prompt": "x", "cache_salt": 3}, GREEDY)
    with pytest.raises(RequestError, match="use_kv_tiers must be true or false, not str"):
        llm.generate({"prompt": "x", "use_kv_tiers": "yes"}, GREEDY)
    with pytest.raises(RequestError, match="priority"):
        llm.generate(["x"], GREEDY, priority=[1.5])  # type: ignore[list-item]


def test_one_text_is_one_stop(llm: LLM) -> None:
    text = llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))[0].outputs[0].text
    stop = text[4:7]
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, stop=stop)  # type: ignore[arg-type]
    completion = llm.generate(PROMPTS[0], params)[0].outputs[0]
    assert (completion.text, completion.stop_reason) == (text[: text.index(stop)], stop)


def test_async_answers_are_those_of_the_offline_engine(tiny_llama: str, llm: LLM) -> None:
    async def run() -> None:
        async with AsyncLLM(tiny_llama, **OPTIONS) as engine:
            outputs = await asyncio.gather(*(engine.generate(prompt, GREEDY) for prompt in PROMPTS))
            assert [o.outputs[0].token_ids for o in outputs] == [
                o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY)
            ]
            pieces = [piece async for piece in engine.stream(PROMPTS[0], GREEDY)]
            assert "".join(pieces) == outputs[0].outputs[0].text
            chat = await engine.chat([{"role": "user", "content": "hi"}], GREEDY)
            assert (
                chat.outputs[0].token_ids
                == llm.chat([{"role": "user", "content": "hi"}], GREEDY)[0].outputs[0].token_ids
            )
            with pytest.raises(RequestError, match="no tokens"):
                await engine.generate("", GREEDY)
            task = asyncio.create_task(
                engine.generate("long", SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True))
            )
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await engine.generate("after", GREEDY)
            assert engine.stats.num_running == 0

    asyncio.run(run())


def test_the_async_face_refuses_what_the_offline_one_does(tiny_llama: str) -> None:
    async def run() -> None:
        engine = AsyncLLM(tiny_llama, **OPTIONS)
        with pytest.raises(EngineError, match="not started"):
            await engine.generate("x", GREEDY)
        async with engine:
            with pytest.raises(RequestError, match="n is 2"):
                await anext(engine.stream("x", SamplingParams(n=2)))
            with pytest.raises(RequestError, match="n is 2"):
                await anext(engine.stream_chat([{"role": "user", "content": "hi"}], SamplingParams(n=2)))
            for params, param in ((SamplingParams(max_tokens=2.5), "max_tokens"), (SamplingParams(n="2"), "n")):  # type: ignore[arg-type]
                with pytest.raises(RequestError, match=param):
                    await engine.generate("x", params)
            with pytest.raises(RequestError, match="cache_salt"):
                await engine.generate({"prompt": "x", "cache_salt": 3}, GREEDY)
            assert (await engine.generate("x", GREEDY)).finished

    asyncio.run(run())


def test_both_faces_continue_a_final_message(tiny_llama: str, llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "one two"}]
    ways: list[dict[str, Any]] = [{"continue_final_message": True}, {"add_generation_prompt": False}, {}]

    async def run() -> None:
        async with AsyncLLM(tiny_llama, **OPTIONS) as engine:
            for options in ways:
                (expected,) = llm.chat(messages, GREEDY, **options)
                output = await engine.chat(messages, GREEDY, **options)
                assert output.prompt_token_ids == expected.prompt_token_ids
                text = expected.outputs[0].text
                assert "".join([piece async for piece in engine.stream_chat(messages, GREEDY, **options)]) == text
                assert "".join(llm.stream_chat(messages, GREEDY, **options)) == text

    asyncio.run(run())
    prompts = {tuple(llm.chat(messages, GREEDY, **options)[0].prompt_token_ids) for options in ways}
    assert len(prompts) == 3


def test_a_stream_that_is_left_and_closed_ends_its_request(tiny_llama: str) -> None:
    async def run() -> None:
        async with AsyncLLM(tiny_llama, **OPTIONS) as engine:
            long = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
            for stream in (engine.stream("x", long), engine.outputs("x", long)):
                await anext(stream)
                await stream.aclose()
                assert engine._engine.client.num_open == 0

    asyncio.run(run())


def link_of(engine: AsyncLLM) -> Any:
    assert engine._client is not None
    return engine._client._link


def test_async_start_tells_why_it_cannot(tiny_llama: str) -> None:
    async def run() -> None:
        engine = AsyncLLM(tiny_llama, **{**OPTIONS, "max_model_len": 100_000})
        with pytest.raises(StartError, match="100000"):
            await engine.start()
        link = link_of(engine)
        assert link._context.closed
        assert not link._endpoint.folder.exists()
        await engine.close()

    asyncio.run(run())


def test_a_start_that_is_cancelled_ends_the_engine(tiny_llama: str) -> None:
    async def run() -> None:
        engine = AsyncLLM(tiny_llama, **OPTIONS)
        task = asyncio.create_task(engine.start())
        while engine._client is None:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        link = link_of(engine)
        assert link._context.closed
        assert link._process.returncode is not None
        assert not link._endpoint.folder.exists()

    asyncio.run(run())


def cores() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [child for child in children if "compose.core" in " ".join(child.cmdline())]


def test_files_are_read_and_fetched_beside_the_loop(tiny_llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def load(*args: Any, **options: Any) -> Any:
        threads.append(threading.current_thread())
        return load_front(*args, **options)

    monkeypatch.setattr(async_llm, "load_front", load)

    async def run() -> None:
        engine = AsyncLLM(tiny_llama, **OPTIONS)
        assert not cores()
        await asyncio.gather(engine.start(), engine.start())
        assert len(cores()) == 1
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await engine.generate("x", GREEDY)

    asyncio.run(run())
    (thread,) = threads
    assert thread is not threading.current_thread()


@pytest.mark.parametrize("moment", ["before", "meanwhile"])
def test_an_engine_that_was_closed_does_not_start(tiny_llama: str, moment: str) -> None:
    async def run() -> None:
        engine = AsyncLLM(tiny_llama, **OPTIONS)
        task = asyncio.create_task(engine.start())
        if moment == "meanwhile":
            await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(EngineError, match="the engine was closed"):
            await task
        assert not cores()

    asyncio.run(run())


def test_an_engine_that_is_dropped_leaves_no_process(tiny_llama: str) -> None:
    async def run() -> psutil.Process:
        engine = AsyncLLM(tiny_llama, **OPTIONS)
        await engine.start()
        (core,) = cores()
        return core

    core = asyncio.run(run())
    gc.collect()
    _, alive = psutil.wait_procs([core], timeout=10)
    assert not alive
