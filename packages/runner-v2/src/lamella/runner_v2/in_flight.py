"""Steps that were launched, and what their results mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lamella.runner_v2.batch import BatchLayout
from lamella.runner_v2.output_copy import HostResult, OutputCopy
from lamella.runner_v2.sampling.rows import OK
from lamella.runner_v2.step import Step, StepOutput, TokenLogprobs


class Pending(NamedTuple):
    """A step that was launched."""

    step: Step
    layout: BatchLayout
    generations: list[int]
    """Of the batch's rows, when the step was launched."""
    copy: OutputCopy | None
    """Of nothing where no row sampled; None: nothing was computed."""
    logprobs: list[TokenLogprobs | None] | None
    prompt_logprobs: dict[int, list[TokenLogprobs]] | None
    started: float
    hidden: torch.Tensor | None = None
    """[T, w] of the step's tokens, at the layers that the speculator asks for."""


def failures(host: HostResult, layout: BatchLayout) -> dict[int, int]:
    """Sampling rows (by index) whose result is unusable -> status. What follows a rejected draft does not count."""
    failed: dict[int, int] = {}
    if not host.statuses.any():
        return failed
    for logits_row in np.flatnonzero(host.statuses != OK).tolist():
        place = int(np.searchsorted(layout.sampled_start, logits_row, side="right")) - 1
        if layout.draft_idx[logits_row] <= host.num_accepted[place]:
            failed.setdefault(place, int(host.statuses[logits_row]))
    return failed


def in_order_of_work(output: StepOutput, order: npt.NDArray[Any]) -> StepOutput:
    """The output with its rows where the scheduler had them. order: place in Work of each row of the output."""
    back = np.argsort(order).tolist()

    def moved(values: Sequence[Any]) -> list[Any]:
        return [values[i] for i in back]

    def joined(values: Sequence[Any], counts: Sequence[int] = output.num_tokens) -> list[Any]:
        ends = np.cumsum(counts).tolist()
        return [value for i in back for value in values[ends[i] - counts[i] : ends[i]]]

    return output._replace(
        rows=tuple(moved(output.rows)),
        generations=tuple(moved(output.generations)),
        num_tokens=moved(output.num_tokens),
        token_ids=joined(output.token_ids),
        num_drafts=None if output.num_drafts is None else moved(output.num_drafts),
        draft_ids=None if output.draft_ids is None else joined(output.draft_ids, output.num_drafts or ()),
        draft_methods=None if output.draft_methods is None else moved(output.draft_methods),
        logprobs=None if output.logprobs is None else joined(output.logprobs),
    )
