"""`LLM`: the engine in this process, driven by the caller's thread.

    prompts ─► Intake ─► core.add            core.run_once ─► deltas ─► Generation ─► outputs

The core steps while a caller waits for output, and only then; several streams share its steps. Ctrl-C ends a wait
between two steps, never within one. What is raised out of a step ends the engine.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from tqdm import tqdm

from lamella.engine.compose.build import build_core
from lamella.engine.compose.front import core_config, load_front
from lamella.engine.config.schema import EngineOptions, engine_options
from lamella.engine.errors import EngineDeadError, EngineError, RequestError
from lamella.engine.generation import Generation
from lamella.engine.intake import Intake
from lamella.engine.interrupts import InterruptsHeld
from lamella.engine.outputs import RequestOutput, request_output
from lamella.engine.prompts import Asked, Messages, Prompt, ask, check_streams, listed_params, listed_prompts, render
from lamella.engine.request import SamplingParams
from lamella.engine.text.output import Piece
from lamella.engine.text.tokenizer import Tokenizer
from lamella.engine.wire import Batch, CoreInfo, Stats, sequence_id


class LLM:
    """A loaded model that answers in this process.

    LLM("smollm2", max_num_seqs=8): MODEL and any engine option as a keyword (see `lamella serve --help`).
    Not for use by several threads at once. Close it, or use it as a context manager, to give its memory back.
    Several in one process share its CPU threads: the `threads` of the last one loaded holds for all.
    """

    def __init__(self, model: str, **options: Any) -> None:
        """Load the model, pulling it if it is a known name. Raises StartError for what cannot work."""
        self._start(engine_options(model=model, **options), progress=False)

    @classmethod
    def from_options(cls, options: EngineOptions, *, progress: bool = False) -> LLM:
        """The same from an options object; progress prints what loading does on standard error."""
        llm = cls.__new__(cls)
        llm._start(options, progress=progress)
        return llm

    def _start(self, options: EngineOptions, *, progress: bool) -> None:
        self._options = options
        self._open: dict[str, _Running] = {}
        self._closed = False
        self._dead: str | None = None
        self._stepping = threading.Lock()
        """Not to wait for, but to notice a second thread: steps do not nest."""
        front = load_front(options, progress=progress)
        self._tokenizer = front.tokenizer
        self._template = front.template
        self._core = build_core(core_config(options, front.source, progress=progress), front.say)
        info = self._core.info
        self._intake = Intake.of_engine(self._tokenizer, info)

    @property
    def info(self) -> CoreInfo:
        """Values fixed at start; `info.report` is what `lamella inspect` prints."""
        return self._core.info

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """The model's own sampling defaults, which apply where no SamplingParams are given."""
        return dict(self.info.report["sampling defaults"])

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Continue each prompt; outputs in the order of the prompts.

        A request that cannot be served raises RequestError before anything runs. One that fails while it runs has
        finish_reason "error" and does not disturb the others. A step that fails as a whole ends the engine: it is
        raised, and everything from then on raises EngineDeadError.
        """
        running = self._submit_all(prompts, sampling_params, priority)
        with tqdm(total=len(running), disable=not use_tqdm, unit="request") as bar:
            for _ in self._finishing(running):
                bar.update()
        return [entry.output() for entry in running]

    def generate_as_finished(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
    ) -> Iterator[RequestOutput]:
        """As generate, but each output as soon as it is complete."""
        for entry in self._finishing(self._submit_all(prompts, sampling_params, priority)):
            yield entry.output()

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: Sequence[int] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation or several; each is a list of {"role": ..., "content": ...}."""
        several = bool(messages) and isinstance(messages, Sequence) and not isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = messages if several else [messages]
        prompts: list[Prompt] = [
            render(
                self._template,
                self._tokenizer,
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, priority=priority, use_tqdm=use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, priority: int = 0) -> TextStream:
        """Continue one prompt; iterate over the pieces of text. For n = 1."""
        (params,) = self._params(sampling_params, 1)
        asked = self._ask(prompt, params, priority)
        check_streams(asked)
        return TextStream(self, self._submit([asked])[0])

    def stream_chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
    ) -> TextStream:
        """Answer one conversation; iterate over the pieces of text. For n = 1."""
        prompt = render(
            self._template,
            self._tokenizer,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=chat_template_kwargs,
        )
        return self.stream(prompt, sampling_params, priority=priority)

    def stats(self) -> Stats:
        """Counters and gauges of the core."""
        stats = self._core.call("stats", {})
        assert isinstance(stats, Stats)
        return stats

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. Requests that run keep their blocks, and leave none in the cache."""
        self._check_alive()
        self._core.call("reset_prefix_cache", {})

    def close(self) -> None:
        """Give the memory back. What still runs is dropped."""
        if self._closed:
            return
        self._closed = True
        self._open.clear()
        self._core.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _params(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        return listed_params(params, count, self.sampling_defaults)

    def _ask(self, prompt: Prompt, params: SamplingParams, priority: int = 0) -> Asked:
        return ask(self._intake, prompt, params, max_logprobs=self._options.max_logprobs, priority=priority)

    def _submit_all(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
    ) -> list[_Running]:
        listed = listed_prompts(prompts)
        if priority is not None and not isinstance(priority, (list, tuple)):
            raise RequestError(f"priority is a list, one for each prompt, not {priority!r:.100}", "priority")
        priorities = priority if priority is not None else [0] * len(listed)
        if len(priorities) != len(listed):
            raise RequestError(f"{len(listed)} prompts but {len(priorities)} priorities", "priority")
        asked = [
            self._ask(prompt, p, order)
            for prompt, p, order in zip(listed, self._params(params, len(listed)), priorities, strict=True)
        ]
        return self._submit(asked)

    def _submit(self, asked: Sequence[Asked]) -> list[_Running]:
        """All or none."""
        self._check_alive()
        running: list[_Running] = []
        try:
            with InterruptsHeld():
                for request, text in asked:
                    entry = _Running(Generation(request, self._tokenizer, request.arrival_s), text)
                    self._core.submit(request)
                    self._open[request.request_id] = entry
                    running.append(entry)
        except BaseException:
            for entry in running:
                self._abort(entry)
            raise
        return running

    def _check_alive(self) -> None:
        if self._closed:
            raise EngineError("the engine was closed")
        if self._dead is not None:
            raise EngineDeadError(f"the engine ended: {self._dead}")

    def _finishing(self, running: Sequence[_Running]) -> Iterator[_Running]:
        """Step until all have ended; each as it ends. Leaving early aborts the rest."""
        ended: deque[_Running] = deque()
        for entry in running:
            entry.ended = ended
        try:
            for _ in running:
                while not ended:
                    self._step()
                yield ended.popleft()
        finally:
            for entry in running:
                self._abort(entry)

    def _step(self) -> None:
        """One round of the core; its deltas go to their generations."""
        self._check_alive()
        if not self._core.has_work:
            raise EngineError("nothing runs that could still answer: the engine lost a request")
        if not self._stepping.acquire(blocking=False):
            raise EngineError("another thread uses this LLM at this moment: let them take turns, or use AsyncLLM")
        try:
            with InterruptsHeld():
                try:
                    batch = self._core.run_once()
                except BaseException as error:  # the step may be half done: nothing can follow it
                    self._dead = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
                    raise
                if batch is not None:
                    self._deliver(batch)
        finally:
            self._stepping.release()

    def _deliver(self, batch: Batch) -> None:
        now = time.monotonic()
        for delta in batch.deltas:
            entry = self._open.get(delta.request_id)
            if entry is None:
                continue
            piece = entry.generation.push(delta, now)
            if piece is None:
                continue
            if piece.still_runs:
                self._core.abort([sequence_id(delta.request_id, delta.index)])
            if entry.pieces is not None:
                entry.pieces.append(piece)
            if entry.generation.finished:
                del self._open[delta.request_id]
                if entry.ended is not None:
                    entry.ended.append(entry)

    def _abort(self, entry: _Running) -> None:
        request_id = entry.generation.request.request_id
        if self._open.pop(request_id, None) is not None:
            self._core.abort([request_id])


class _Running:
    """A request in the core, the pieces that its stream has not taken yet, and where to put it once it has ended."""

    __slots__ = ("ended", "generation", "pieces", "text")

    def __init__(self, generation: Generation, text: str | None) -> None:
        self.generation = generation
        self.text = text
        self.pieces: deque[Piece] | None = None
        self.ended: deque[_Running] | None = None

    def output(self) -> RequestOutput:
        return request_output(self.generation, self.text)


class TextStream:
    """The pieces of one answer, as they come. `output` is what is known so far, or all of it once `finished`.

    A loop over it may be left and taken up again. An answer that fails ends like any other, and output.error has the
    reason. A stream that nobody holds any more is closed.
    """

    def __init__(self, llm: LLM, running: _Running) -> None:
        self._llm = llm
        self._running = running
        running.pieces = deque()

    def __iter__(self) -> Iterator[str]:
        pieces = self._running.pieces
        assert pieces is not None
        while True:
            while pieces:
                text = pieces.popleft().text
                if text:
                    yield text
            if self.finished or self._running.generation.request.request_id not in self._llm._open:
                return
            self._llm._step()

    @property
    def finished(self) -> bool:
        """The answer is complete."""
        return self._running.generation.finished

    @property
    def output(self) -> RequestOutput:
        """The request's output so far."""
        return self._running.output()

    def close(self) -> None:
        """Stop here: the engine drops the request."""
        self._llm._abort(self._running)

    def __del__(self) -> None:
        self.close()
