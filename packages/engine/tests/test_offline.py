"""`LLM` and `AsyncLLM` on generated checkpoints: the same engine through both faces."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from lamella.engine import LLM, AsyncLLM, SamplingParams
from lamella.engine.errors import EngineError, RequestError, StartError
from lamella.runner_v2.testing.tiny_models import write_folder

OPTIONS = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 64, "threads": 1}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPTS = ["hello there", "one two three", "a"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("tiny")
    write_folder(path, "llama")
    return str(path)


@pytest.fixture(scope="module")
def llm(folder: str) -> Iterator[LLM]:
    with LLM(folder, **OPTIONS) as engine:
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


def test_requests_that_cannot_be_served_are_refused_before_any_runs(llm: LLM) -> None:
    steps = llm.stats().steps
    for prompts, params, message in (
        ([*PROMPTS, ""], GREEDY, "no tokens"),
        ([[0, 10**6]], GREEDY, "token id 1000000"),
        (["x " * 200], GREEDY, "128"),
        (["x"], SamplingParams(temperature=-1.0), "temperature"),
        (["x"], SamplingParams(logprobs=21), "logprobs"),
        ([{"text": "x"}], GREEDY, "'prompt'"),
        ([3.5], GREEDY, "float"),
    ):
        with pytest.raises(RequestError, match=message):
            llm.generate(prompts, params)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="3 prompts but 2"):
        llm.generate(PROMPTS, [GREEDY, GREEDY])
    assert llm.stats().steps == steps
    assert llm.generate("x", GREEDY)[0].finished


def test_the_engines_seed_makes_sampling_repeatable(folder: str) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    with LLM(folder, seed=5, **OPTIONS) as one, LLM(folder, seed=5, **OPTIONS) as two, LLM(folder, **OPTIONS) as free:
        first = [o.outputs[0].token_ids for o in one.generate(PROMPTS, params)]
        assert [o.outputs[0].token_ids for o in two.generate(PROMPTS, params)] == first
        assert [o.outputs[0].token_ids for o in free.generate(PROMPTS, params)] != first
    assert len({tuple(ids) for ids in first}) == len(first)


def test_options_are_checked_by_name(folder: str) -> None:
    with pytest.raises(StartError, match="did you mean 'max_num_seqs'"):
        LLM(folder, max_num_sequences=3)
    with pytest.raises(StartError, match="no method|method"):
        LLM(folder, **OPTIONS, speculative_config={"method": "telepathy", "num_speculative_tokens": 2})


def test_a_closed_engine_says_so(folder: str) -> None:
    llm = LLM(folder, **OPTIONS)
    stream = llm.stream("x", GREEDY)
    llm.close()
    llm.close()
    assert "".join(stream) == ""
    with pytest.raises(EngineError, match="closed"):
        llm.generate("x", GREEDY)


def test_async_answers_are_those_of_the_offline_engine(folder: str, llm: LLM) -> None:
    async def run() -> None:
        async with AsyncLLM(folder, **OPTIONS) as engine:
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


def test_async_start_tells_why_it_cannot(folder: str) -> None:
    async def run() -> None:
        engine = AsyncLLM(folder, **{**OPTIONS, "max_model_len": 100_000})
        with pytest.raises(StartError, match="100000"):
            await engine.start()
        await engine.close()

    asyncio.run(run())
