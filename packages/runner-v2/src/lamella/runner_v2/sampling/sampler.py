"""Chooses the next token of every logits row of a step.

    masks → allowed ids, bias, min tokens → penalties → bad words   edit the logits in place, on rows that ask for it
    min-p → top-k → top-p → argmax(logit / temperature + noise)     read them

A batch in which no row asks for anything is one argmax. What each transform means exactly: see the package docstring.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lamella.runner_v2.errors import UnsupportedError
from lamella.runner_v2.sampling.params import RowParams
from lamella.runner_v2.sampling.rows import INFINITE, NONE_ALLOWED, NOT_A_NUMBER, LogitsRows, SampleResult
from lamella.runner_v2.step import Mask, TokenLogprobs


class Sampler:
    """Sampling state of all device rows. max_drafts: most drafts of a row in one step."""

    def __init__(self, vocab_size: int, max_num_rows: int, device: torch.device | str, max_drafts: int = 0) -> None:
        self.vocab_size = vocab_size
        self.max_num_rows = max_num_rows
        self.device = torch.device(device)
        self.max_drafts = max_drafts

    def add(self, row: int, params: RowParams, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """The device row got a new owner (also after a preemption: then output_ids is what it had emitted)."""
        if not params.greedy or params.num_logprobs is not None:
            raise UnsupportedError("only greedy rows without logprobs can be sampled")

    def remove(self, row: int) -> None:
        """The device row is free. No effect on a row that was never added."""

    def sample(self, logits: torch.Tensor, layout: LogitsRows, masks: Sequence[Mask] = ()) -> SampleResult:
        """Choose a token for each of the L rows of logits [L, V] float32, which may be changed in place.

        masks: allowed tokens of single rows (device row, draft index), applied before everything else.
        """
        best, ids = logits.max(dim=-1)
        status = torch.zeros(len(ids), dtype=torch.uint8)
        status[torch.isneginf(best)] = NONE_ALLOWED
        status[torch.isposinf(best)] = INFINITE
        status[torch.isnan(best)] = NOT_A_NUMBER
        return SampleResult(ids.to(torch.int32), status)

    def advance(self, rows: Sequence[int], num_tokens: Sequence[int], token_ids: Sequence[int]) -> None:
        """These device rows emitted so many tokens each (accepted drafts + 1; 0: none), one after another in
        token_ids. What was sampled and not accepted must not be told."""

    def prompt_logprobs(self, logits: torch.Tensor, target_ids: Sequence[int], k: int) -> list[TokenLogprobs]:
        """Log-probabilities of given tokens: target_ids[i] at logits [n, V] row i, and the k best (-1: all)."""
        raise UnsupportedError("prompt logprobs")
