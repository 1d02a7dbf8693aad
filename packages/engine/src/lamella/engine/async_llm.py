"""`AsyncLLM`: the engine in a process of its own, for programs that run on asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections.abc import AsyncGenerator, Mapping
from types import TracebackType
from typing import Any, NamedTuple

from lamella.engine.client import CLOSED, EngineClient
from lamella.engine.compose.core_config import CORE_FACTORY
from lamella.engine.compose.front import core_config, load_front
from lamella.engine.config.schema import EngineOptions, engine_options
from lamella.engine.errors import EngineError
from lamella.engine.generation import Generation
from lamella.engine.intake import Intake
from lamella.engine.links.process import ProcessLink
from lamella.engine.outputs import RequestOutput, request_output
from lamella.engine.prompts import Asked, Messages, Prompt, ask, check_streams, listed_params, render
from lamella.engine.request import SamplingParams
from lamella.engine.text.chat_template import ChatTemplate
from lamella.engine.text.output import Piece
from lamella.engine.wire import CoreInfo, Stats


class AsyncLLM:
    """A model that answers many callers of one event loop at once.

        async with AsyncLLM("smollm2") as llm:
            output = await llm.generate("Once upon a time")
            async for piece in llm.stream("Once upon a time"): ...

    Cancelling the awaiting task, or leaving the loop over a stream and closing it, ends the request in the engine.
    An engine that was dropped without close() ends by itself.
    """

    def __init__(self, model: str, **options: Any) -> None:
        """Take the options; `start()`, or entering the context, loads the model. Raises StartError for options that no
        engine could have."""
        self._options: EngineOptions = engine_options(model=model, **options)
        self._starting = asyncio.Lock()
        self._client: EngineClient | None = None
        self._loaded: _Loaded | None = None
        self._closed = False

    async def start(self) -> None:
        """Load the model in a process of its own, and wait for it; it is fetched first if it is not there. The loop
        goes on meanwhile. Raises StartError with the reason if it cannot be loaded; the engine is then closed.

        Safe to repeat.
        """
        async with self._starting:
            if self._loaded is not None:
                return
            try:
                self._loaded = await self._load()
            except BaseException:
                await self.close()
                raise

    async def _load(self) -> _Loaded:
        if self._closed:
            raise EngineError(CLOSED)
        front = await asyncio.to_thread(load_front, self._options, progress=False)
        if self._closed:
            raise EngineError(CLOSED)
        config = await asyncio.to_thread(core_config, self._options, front.source, progress=False)
        link = ProcessLink(CORE_FACTORY, config.to_wire(), log_level="WARNING")
        # a process outlives the objects that stand for it: one that nobody holds any more must not keep its memory
        weakref.finalize(self, link.abandon)
        self._client = EngineClient(link)
        info = await self._client.start()
        intake = Intake.of_engine(front.tokenizer, info)
        return _Loaded(self._client, front.template, intake)

    async def close(self) -> None:
        """End the engine's process; what still runs fails."""
        self._closed = True
        if self._client is not None:
            await self._client.close()

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def info(self) -> CoreInfo:
        """Values fixed at start."""
        return self._engine.client.info

    @property
    def stats(self) -> Stats:
        """Counters and gauges, as of the engine's last message."""
        return self._engine.client.stats

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """The model's own sampling defaults, which apply where no SamplingParams are given."""
        return dict(self.info.report["sampling defaults"])

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, priority: int = 0
    ) -> RequestOutput:
        """Continue a prompt and return the whole output."""
        running = self._running(self._ask(prompt, sampling_params, priority))
        async for _ in self._pieces(running):
            pass
        return running.output()

    async def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
    ) -> RequestOutput:
        """Answer a conversation."""
        prompt = render(
            self._engine.template,
            self._engine.intake.tokenizer,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=chat_template_kwargs,
        )
        return await self.generate(prompt, sampling_params, priority=priority)

    async def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, priority: int = 0
    ) -> AsyncGenerator[str, None]:
        """Continue a prompt; the pieces of text as they come. For n = 1."""
        asked = self._ask(prompt, sampling_params, priority)
        check_streams(asked)
        async with contextlib.aclosing(self._pieces(self._running(asked))) as pieces:
            async for piece in pieces:
                if piece.text:
                    yield piece.text

    async def stream_chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[str, None]:
        """Answer a conversation; the pieces of text as they come. For n = 1."""
        prompt = render(
            self._engine.template,
            self._engine.intake.tokenizer,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=chat_template_kwargs,
        )
        async with contextlib.aclosing(self.stream(prompt, sampling_params, priority=priority)) as pieces:
            async for piece in pieces:
                yield piece

    async def outputs(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        """The output so far each time something was added; the last one is complete."""
        running = self._running(self._ask(prompt, sampling_params, priority))
        async with contextlib.aclosing(self._pieces(running)) as pieces:
            async for _ in pieces:
                yield running.output()

    @property
    def _engine(self) -> _Loaded:
        if self._loaded is None:
            raise EngineError("the engine has not started yet: await start(), or use `async with`")
        return self._loaded

    def _ask(self, prompt: Prompt, params: SamplingParams | None, priority: int) -> Asked:
        intake = self._engine.intake
        (params,) = listed_params(params, 1, self.sampling_defaults)
        return ask(intake, prompt, params, max_logprobs=self._options.max_logprobs, priority=priority)

    def _running(self, asked: Asked) -> _Running:
        request, text = asked
        return _Running(Generation(request, self._engine.intake.tokenizer, request.arrival_s), text)

    async def _pieces(self, running: _Running) -> AsyncGenerator[Piece, None]:
        """Run a request; what each step adds. Leaving early ends it in the engine."""
        generation = running.generation
        stream = self._engine.client.submit(generation.request)
        try:
            while not generation.finished:
                deltas = await stream.take()
                if not deltas:
                    break
                now = time.monotonic()
                for delta in deltas:
                    piece = generation.push(delta, now)
                    if piece is None:
                        continue
                    if piece.still_runs:
                        stream.stop(delta.request_id, delta.index)
                    yield piece
        finally:
            stream.close()


class _Loaded(NamedTuple):
    """What there is once the model is loaded."""

    client: EngineClient
    template: ChatTemplate
    intake: Intake


class _Running(NamedTuple):
    """A request with the text it came from."""

    generation: Generation
    text: str | None

    def output(self) -> RequestOutput:
        return request_output(self.generation, self.text)
