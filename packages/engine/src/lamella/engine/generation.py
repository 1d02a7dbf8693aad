"""One request while it runs, on the side of its reader: n outputs, usage, times. Free of asyncio and of clocks."""

from __future__ import annotations

from typing import NamedTuple

from lamella.engine.request import Delta, Logprob, Request
from lamella.engine.text.logprobs import PositionLogprobs, describe_logprobs
from lamella.engine.text.output import OutputBuilder, Piece
from lamella.engine.text.tokenizer import Tokenizer


class Usage(NamedTuple):
    """Tokens of one request or of several."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    accepted_drafts: int = 0
    """Of completion_tokens."""
    rejected_drafts: int = 0

    def plus(self, other: Usage) -> Usage:
        """The sum."""
        return Usage(*(mine + theirs for mine, theirs in zip(self, other)))


class SequenceTimes:
    """Moments of one sequence, in seconds of the driver's clock."""

    __slots__ = ("finished_s", "first_s", "last_s", "prefill_s", "queued_s")

    def __init__(self) -> None:
        self.first_s: float | None = None
        """First token."""
        self.last_s: float | None = None
        """Latest token."""
        self.finished_s: float | None = None
        self.queued_s = 0.0
        """Duration in the core: arrival to first step."""
        self.prefill_s = 0.0
        """Duration in the core: first step to first token."""


class Generation:
    """Feed it the deltas of its request; it gives pieces and keeps the whole.

    A driver whose piece says `still_runs` must abort `wire.sequence_id(request_id, index)` in the core.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer, arrival_s: float) -> None:
        self.request = request
        self.tokenizer = tokenizer
        self.arrival_s = arrival_s
        self.outputs = [
            OutputBuilder(tokenizer, request.prompt_ids, request.params, index) for index in range(request.params.n)
        ]
        self.times = [SequenceTimes() for _ in self.outputs]
        self.cached_len = 0
        self.restored_len = 0
        """Of these, what a tier below the device gave."""
        self.restore_s = 0.0
        """Time that it waited for them."""
        self.accepted_drafts = 0
        """Of all sequences: drafts that stood, and that were verified and did not."""
        self.rejected_drafts = 0
        self.draft_rule = "standard"
        """The rule by which drafts were kept."""
        self.errors: list[str] = []
        """Why sequences failed, as the core told it."""
        self._prompt_logprobs: list[Logprob | None] | None = None
        self._num_open = request.params.n

    @property
    def finished(self) -> bool:
        """All sequences have ended."""
        return self._num_open == 0

    @property
    def usage(self) -> Usage:
        """Tokens so far; the prompt counts once, whatever n is."""
        completion = sum(output.num_tokens for output in self.outputs)
        return Usage(
            len(self.request.prompt_ids), completion, self.cached_len, self.accepted_drafts, self.rejected_drafts
        )

    @property
    def ttft_s(self) -> float | None:
        """Arrival to the first token of any sequence."""
        firsts = [times.first_s for times in self.times if times.first_s is not None]
        return min(firsts) - self.arrival_s if firsts else None

    def push(self, delta: Delta, now_s: float) -> Piece | None:
        """Take a delta that arrived at now_s. None if its sequence has ended before."""
        output, times = self.outputs[delta.index], self.times[delta.index]
        if output.finish_reason is not None:
            return None
        if times.first_s is None:
            self._first(delta, times)
        if delta.error is not None:
            self.errors.append(delta.error)
        if delta.token_ids:
            times.last_s = now_s
            if times.first_s is None:
                times.first_s = now_s
        before = output.num_tokens
        piece = output.push(delta)
        if delta.accepted_drafts or delta.rejected_drafts:
            # drafts behind a stop string are no part of the output
            self.accepted_drafts += min(delta.accepted_drafts, output.num_tokens - before)
            self.rejected_drafts += delta.rejected_drafts
        if piece.finish_reason is not None:
            times.finished_s = now_s
            self._num_open -= 1
        return piece

    def _first(self, delta: Delta, times: SequenceTimes) -> None:
        """What only the first delta of a sequence carries."""
        self.cached_len = max(self.cached_len, delta.cached_len)
        self.restored_len = max(self.restored_len, delta.restored_len)
        self.restore_s = max(self.restore_s, delta.restore_s)
        if delta.draft_rule is not None:
            self.draft_rule = delta.draft_rule
        if delta.queued_s or delta.prefill_s:
            times.queued_s, times.prefill_s = delta.queued_s, delta.prefill_s
        if delta.prompt_logprobs is not None and self._prompt_logprobs is None:
            self._prompt_logprobs = delta.prompt_logprobs

    def prompt_logprobs(self) -> list[PositionLogprobs | None] | None:
        """Log-probabilities of the prompt's tokens, the first None; None until they came or if not asked for."""
        if self._prompt_logprobs is None:
            return None
        ids = self.request.prompt_ids
        return [
            None if logprob is None else describe_logprobs(self.tokenizer, logprob, ids[max(0, i - 4) : i])
            for i, logprob in enumerate(self._prompt_logprobs)
        ]
