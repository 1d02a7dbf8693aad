"""What the Python faces return: plain data, one RequestOutput per prompt."""

from __future__ import annotations

from dataclasses import dataclass

from lamella.engine.generation import Generation
from lamella.engine.request import FinishReason
from lamella.engine.text.logprobs import PositionLogprobs


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sequence of a request. While it runs, what is known so far."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    """Sum over the tokens; None unless logprobs were asked for."""
    logprobs: list[PositionLogprobs] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    """The stop string or stop token id that ended it; None for the model's own end."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What became of one prompt."""

    request_id: str
    prompt: str | None
    """As given; None where token ids were given."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[PositionLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    """Prompt tokens that the prefix cache gave."""
    ttft_s: float
    """Seconds from submission to the first token; 0 where there is none."""
    tokens_per_s: float | None
    """Output speed behind the first token, all sequences together; None below two tokens."""
    error: str | None
    """Why sequences ended with finish_reason "error"."""
    accepted_prediction_tokens: int = 0
    """Output tokens that had been drafted, all sequences together."""
    rejected_prediction_tokens: int = 0
    """Drafts that were verified and did not stand."""
    rejection_sample_method: str = "standard"
    """The rule by which drafts were kept; with another than "standard" the answer is not the model's own."""


def request_output(generation: Generation, prompt: str | None) -> RequestOutput:
    """The present state of a generation."""
    outputs = [
        CompletionOutput(
            index=builder.index,
            text=builder.text,
            token_ids=list(builder.token_ids),
            cumulative_logprob=None if builder.logprobs is None else builder.cumulative_logprob,
            logprobs=None if builder.logprobs is None else list(builder.logprobs),
            finish_reason=builder.finish_reason,
            stop_reason=builder.stop_reason,
        )
        for builder in generation.outputs
    ]
    return RequestOutput(
        request_id=generation.request.request_id,
        prompt=prompt,
        prompt_token_ids=list(generation.request.prompt_ids),
        prompt_logprobs=generation.prompt_logprobs(),
        outputs=outputs,
        finished=generation.finished,
        num_cached_tokens=generation.cached_len,
        ttft_s=generation.ttft_s or 0.0,
        tokens_per_s=_speed(generation),
        error="; ".join(generation.errors) or None,
        accepted_prediction_tokens=generation.accepted_drafts,
        rejected_prediction_tokens=generation.rejected_drafts,
        rejection_sample_method=generation.draft_rule,
    )


def _speed(generation: Generation) -> float | None:
    firsts = [times.first_s for times in generation.times if times.first_s is not None]
    lasts = [times.last_s for times in generation.times if times.last_s is not None]
    if not firsts or max(lasts) <= min(firsts):
        return None
    later = sum(output.num_tokens for output in generation.outputs) - len(firsts)
    return later / (max(lasts) - min(firsts)) if later > 0 else None
