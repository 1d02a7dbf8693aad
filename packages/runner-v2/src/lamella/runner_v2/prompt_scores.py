"""Log-probabilities of prompt tokens, for the rows that asked for them.

chunk of a row:  [ start ............ end )          hidden states of these positions are at hand
tokens scored:       [ start + 1 ...... end ]        as far as they are prompt; the first prompt token has none
"""

from __future__ import annotations

import torch

from lamella.runner_v2.batch import BatchLayout
from lamella.runner_v2.layers.decoder import Carried
from lamella.runner_v2.models.decoder import DecoderModel
from lamella.runner_v2.sampling.params import RowParams
from lamella.runner_v2.sampling.sampler import Sampler
from lamella.runner_v2.state import SequenceState
from lamella.runner_v2.step import TokenLogprobs

_ROWS_AT_ONCE = 256
"""Logits rows held at a time."""


class PromptScores:
    """Knows the rows that want prompt logprobs."""

    def __init__(self, sampler: Sampler, state: SequenceState) -> None:
        self._sampler = sampler
        self._state = state
        self._wanted: dict[int, int] = {}

    @property
    def wanted(self) -> bool:
        """Whether any row asks."""
        return bool(self._wanted)

    def add(self, row: int, params: RowParams) -> None:
        """The row got a new owner."""
        if params.num_prompt_logprobs is not None:
            self._wanted[row] = params.num_prompt_logprobs

    def remove(self, row: int) -> None:
        """The row is free."""
        self._wanted.pop(row, None)

    def compute(
        self, layout: BatchLayout, carried: Carried, model: DecoderModel
    ) -> dict[int, list[TokenLogprobs]] | None:
        """Row -> entries of the prompt tokens whose predecessor is in this step, in order; None: nobody asked."""
        if not self._wanted:
            return None
        found: dict[int, list[TokenLogprobs]] = {}
        query_start = layout.query_start.tolist()
        for i, (row, query_len) in enumerate(zip(layout.work.rows, layout.work.query_lens, strict=True)):
            start = int(self._state.planned_len[row])
            count = min(start + query_len, int(self._state.prompt_len[row]) - 1) - start
            if row not in self._wanted or count <= 0:
                continue
            targets = self._state.all_token_ids[row, start + 1 : start + 1 + count].tolist()
            entries = found[row] = []
            for lo in range(0, count, _ROWS_AT_ONCE):
                hi = min(lo + _ROWS_AT_ONCE, count)
                idx = torch.arange(query_start[i] + lo, query_start[i] + hi, device=layout.query_start.device)
                logits = model.finish(carried, idx)
                entries.extend(self._sampler.prompt_logprobs(logits, targets[lo:hi], self._wanted[row]))
        return found or None
