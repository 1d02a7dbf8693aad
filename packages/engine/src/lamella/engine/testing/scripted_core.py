"""An engine core that answers from a script: deterministic, without a model, and with the rules of the real one for
batches, aborts, stop ids and lengths. It counts what it holds, so that a test can see that an abort took effect.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from lamella.engine.errors import EngineError, StartError
from lamella.engine.request import Delta, FinishReason, Logprob, Request
from lamella.engine.wire import Batch, CoreInfo, Stats, parse_sequence_id

Script = Callable[[Request, int], Sequence[int]]
"""Output ids of sequence `index` of a request; after the last one comes the end id, if the request has one."""


def repeat_prompt(request: Request, index: int) -> Sequence[int]:
    """The prompt over and over, as long as the request lasts."""
    del index
    times = request.max_tokens // len(request.prompt_ids) + 1
    return list(request.prompt_ids) * times


def say(request: Request, index: int) -> Sequence[int]:
    """For byte_tokenizer: what stands between "say:" and the next special token or the prompt's end. '#' becomes the
    sequence's index. A prompt without "say:" is repeated."""
    text = bytes(token_id if token_id < 256 else 0 for token_id in request.prompt_ids)
    _, found, rest = text.rpartition(b"say:")
    if not found:
        return repeat_prompt(request, index)
    return list(rest.partition(b"\0")[0].replace(b"#", str(index).encode()))


@dataclass(slots=True)
class _Sequence:
    request: Request
    index: int
    script: Sequence[int]
    num_output: int = 0
    started: bool = False

    @property
    def name(self) -> tuple[str, int]:
        return self.request.request_id, self.index


@dataclass
class ScriptedCore:
    """Satisfies core_loop.Core. A step gives each running sequence `tokens_per_step` tokens."""

    script: Script = say
    info: CoreInfo = field(
        default_factory=lambda: CoreInfo(
            max_model_len=512,
            vocab_size=259,
            num_blocks=[64],
            block_size=16,
            kv_tokens=1024,
            max_num_seqs=8,
            max_num_batched_tokens=512,
        )
    )
    step_s: float = 0.0
    """Time that a step takes."""
    tokens_per_step: int = 1
    crash_after: int | None = None
    """Raise in that step."""
    hang_after: int | None = None
    """Never come back from that step."""
    fail_on: int | None = None
    """A sequence that would emit this id fails with an error of its own."""
    fail_status: int = 500
    """Delta.error_status of those."""
    steps: int = 0
    aborted: list[str] = field(default_factory=list)
    seen: list[Request] = field(default_factory=list)
    closed: bool = False
    _running: dict[tuple[str, int], _Sequence] = field(default_factory=dict)
    _waiting: dict[tuple[str, int], _Sequence] = field(default_factory=dict)
    restored_len: int = 0
    """Prompt tokens that a tier gave each request."""
    _stats: Stats = field(default_factory=Stats)

    @property
    def has_work(self) -> bool:
        """A request has not ended."""
        return bool(self._running or self._waiting)

    @property
    def num_held(self) -> int:
        """Sequences that hold something."""
        return len(self._running) + len(self._waiting)

    def add(self, request: Request) -> None:
        """Queue the n sequences of a request."""
        self.seen.append(request)
        for index in range(request.params.n):
            sequence = _Sequence(request, index, self.script(request, index))
            self._waiting[sequence.name] = sequence

    def abort(self, request_ids: list[str]) -> None:
        """Drop requests or sequences at once."""
        for name in request_ids:
            self.aborted.append(name)
            request_id, index = parse_sequence_id(name)
            for held in (self._running, self._waiting):
                for key in [key for key in held if key[0] == request_id and index in (None, key[1])]:
                    del held[key]

    def call(self, method: str, args: dict[str, Any]) -> Any:
        """`held` and `echo` answer, `crash` crashes."""
        if method == "held":
            return self.num_held
        if method == "echo":
            return args
        if method == "crash":
            raise RuntimeError("asked to crash")
        raise EngineError(f"unknown method {method!r}")

    def run_once(self) -> Batch:
        """Admit up to max_num_seqs sequences, give each its tokens."""
        self.steps += 1
        if self.crash_after is not None and self.steps >= self.crash_after:
            raise RuntimeError("the script says crash")
        while self.hang_after is not None and self.steps >= self.hang_after:
            time.sleep(60)
        if self.step_s:
            time.sleep(self.step_s)
        for name in list(self._waiting)[: self.info.max_num_seqs - len(self._running)]:
            self._running[name] = self._waiting.pop(name)
        deltas = [self._advance(sequence) for sequence in list(self._running.values())]
        stats = self._stats
        stats.steps = self.steps
        stats.num_running = len(self._running)
        stats.num_waiting = len(self._waiting)
        stats.kv_usage = len(self._running) / self.info.max_num_seqs
        num_tokens = sum(len(delta.token_ids) for delta in deltas)
        stats.generation_tokens += num_tokens
        stats.computed_tokens += num_tokens
        return Batch(deltas, msgspec.structs.replace(stats))

    def close(self) -> None:
        """Remember it."""
        self.closed = True

    def _advance(self, sequence: _Sequence) -> Delta:
        request, params = sequence.request, sequence.request.params
        delta = Delta(request.request_id, sequence.index, [])
        if not sequence.started:
            sequence.started = True
            delta.cached_len = len(request.prompt_ids) // 2
            delta.restored_len, delta.restore_s = self.restored_len, 0.003
            delta.queued_s, delta.prefill_s = 0.001, 0.002
            self._stats.prompt_tokens += len(request.prompt_ids)
            self._stats.computed_prompt_tokens += len(request.prompt_ids) - delta.cached_len
            self._stats.computed_tokens += len(request.prompt_ids) - delta.cached_len
            if params.prompt_logprobs is not None:
                delta.prompt_logprobs = [None] + [
                    logprob(token_id, params.prompt_logprobs) for token_id in request.prompt_ids[1:]
                ]
        while len(delta.token_ids) < self.tokens_per_step and delta.finish_reason is None:
            self._emit(sequence, delta)
        if params.logprobs is not None:
            delta.logprobs = [logprob(token_id, params.logprobs) for token_id in delta.token_ids]
        if delta.finish_reason is not None:
            del self._running[sequence.name]
        return delta

    def _emit(self, sequence: _Sequence, delta: Delta) -> None:
        """One more token, or the end."""
        request, params = sequence.request, sequence.request.params
        finish: FinishReason | None = None
        if sequence.num_output >= request.max_tokens:
            delta.finish_reason = "length"
            return
        if sequence.num_output < len(sequence.script):
            token_id = sequence.script[sequence.num_output]
        elif request.eos_ids and not params.ignore_eos:
            token_id = request.eos_ids[0]
        else:
            token_id = request.prompt_ids[-1]
        if token_id == self.fail_on:
            delta.finish_reason, delta.error = "error", "the logits are not numbers"
            delta.error_status = self.fail_status
            return
        sequence.num_output += 1
        delta.token_ids.append(token_id)
        if sequence.num_output > params.min_tokens:
            if token_id in params.stop_token_ids:
                finish, delta.stop_reason = "stop", token_id
            elif token_id in request.eos_ids and not params.ignore_eos:
                finish = "stop"
        if finish is None and sequence.num_output >= request.max_tokens:
            finish = "length"
        delta.finish_reason = finish


def build(config: dict[str, Any], progress: Callable[[str], None]) -> ScriptedCore:
    """A factory for a core process: config holds plain fields of ScriptedCore, `load_s`: what loading takes, or
    `fail`: why it cannot start."""
    progress("reading the script")
    time.sleep(config.pop("load_s", 0.0))
    if "fail" in config:
        raise StartError(config["fail"])
    return ScriptedCore(**config)


FACTORY = f"{__name__}:build"


def logprob(token_id: int, num_best: int) -> Logprob:
    """The token at rank 1 with probability 1/2, the ids above it at 1/4, 1/8, …"""
    best = range(max(num_best, 0))
    return Logprob(
        [token_id, *((token_id + i) % 256 for i in best)],
        [-math.log(2.0), *(-math.log(2.0) * (i + 1) for i in best)],
        1,
    )
