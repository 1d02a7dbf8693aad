"""Chooses the next token of every logits row of a step.

    masks → allowed ids, bias, min tokens → penalties → bad words   edit the logits in place, on rows that ask for it
    min-p → top-k → top-p → argmax(logit / temperature + noise)     read them

A batch in which no row asks for anything is one argmax. What each transform means exactly: see the package docstring.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lamella.runner_v2.sampling.bad_words import BadWords
from lamella.runner_v2.sampling.bias import Bias
from lamella.runner_v2.sampling.choice import ChoiceTable
from lamella.runner_v2.sampling.host import pick_kernels
from lamella.runner_v2.sampling.kernels import SamplingKernels
from lamella.runner_v2.sampling.law import sampled_law
from lamella.runner_v2.sampling.logprobs import NONE, token_logprobs
from lamella.runner_v2.sampling.masks import RowMasks, locate
from lamella.runner_v2.sampling.params import RowParams
from lamella.runner_v2.sampling.penalties import Penalties
from lamella.runner_v2.sampling.rows import NOT_A_NUMBER, OK, LogitsRows, RowTransform, SampleResult
from lamella.runner_v2.step import Mask, TokenLogprobs


class Sampler:
    """Sampling state of all device rows. max_drafts: most drafts of a row in one step.

    kernels: who does the work on whole vocabularies; None: the fastest that serves the device.
    """

    def __init__(
        self,
        vocab_size: int,
        max_num_rows: int,
        device: torch.device | str,
        max_drafts: int = 0,
        kernels: SamplingKernels | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.max_drafts = max_drafts
        self.kernels = kernels if kernels is not None else pick_kernels(device)
        self._choice = ChoiceTable(max_num_rows)
        self._transforms: tuple[RowTransform, ...] = (
            Bias(vocab_size, max_num_rows, torch.device(device)),
            Penalties(vocab_size, max_num_rows, self.kernels.penalise),
            BadWords(vocab_size, max_num_rows),
        )
        self._num_logprobs = np.full(max_num_rows, NONE, np.int32)

    def add(self, row: int, params: RowParams, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """The device row got a new owner (also after a preemption: then output_ids is what it had emitted)."""
        self._choice.add(row, params, self.vocab_size)
        for transform in self._transforms:
            transform.add(row, params, prompt_ids, output_ids)
        self._num_logprobs[row] = NONE if params.num_logprobs is None else params.num_logprobs

    def remove(self, row: int) -> None:
        """The device row is free. No effect on a row that was never added."""
        self._choice.remove(row)
        for transform in self._transforms:
            transform.remove(row)
        self._num_logprobs[row] = NONE

    @property
    def listens(self) -> bool:
        """Whether any row's logits depend on what it emits."""
        return any(t.num_active for t in self._transforms)

    def is_plain(self, rows: npt.NDArray[np.int32]) -> bool:  # [L] device row of each logits row
        """Whether these rows' logits are sampled as they are, and nothing is told of them but the id."""
        if (self._num_logprobs[rows] != NONE).any():
            return False
        active = [t for t in self._transforms if t.num_active]
        if not active:
            return True
        zeros = np.zeros(len(rows), np.int32)
        layout = LogitsRows(rows, zeros, zeros, zeros, zeros[:0])
        return not any(t.touches(layout).any() for t in active)

    def sample(self, logits: torch.Tensor, layout: LogitsRows, masks: Sequence[Mask] = ()) -> SampleResult:
        """Choose a token for each of the L rows of logits [L, V] float32, which may be changed in place.

        masks: allowed tokens of single rows (device row, draft index), applied before everything else.
        """
        assert logits.shape == (len(layout.rows), self.vocab_size), f"logits {tuple(logits.shape)}"
        if len(layout.draft_ids):
            assert int(layout.draft_idx.max(initial=0)) <= self.max_drafts, f"more than {self.max_drafts} drafts"
        transforms = [t for t in self._transforms if t.num_active and t.touches(layout).any()]
        located = locate(masks, layout, self.vocab_size) if masks else None
        asked = self._asked(logits, layout, transforms, located)

        if located is not None:
            self.kernels.mask(logits, located)
        for transform in transforms:
            transform.apply(logits, layout)
        if self._choice.any_random(layout):
            ids, status = self.kernels.choose(logits, self._choice.gather(layout))
        else:
            ids, status = self.kernels.greedy(logits)
        if asked is None:
            return SampleResult(ids, status)
        return SampleResult(ids, status, self._logprobs(logits, asked, ids, status))

    def law(
        self, logits: torch.Tensor, layout: LogitsRows, ids: torch.Tensor
    ) -> torch.Tensor:  # [L, V] float32, [L] int32 -> [L, V] float32
        """Probabilities that the ids were sampled by, from logits that sample() has edited, or had nothing to edit
        of."""
        return sampled_law(logits, ids, self._choice.gather(layout))

    def advance(self, rows: Sequence[int], num_tokens: Sequence[int], token_ids: Sequence[int]) -> None:
        """These device rows emitted so many tokens each (accepted drafts + 1; 0: none), one after another in
        token_ids. What was sampled and not accepted must not be told."""
        listeners = [t for t in self._transforms if t.num_active]
        if not listeners:
            return
        end = 0
        for row, count in zip(rows, num_tokens):
            start, end = end, end + count
            for listener in listeners if count else ():
                listener.advance(row, token_ids[start:end])

    def prompt_logprobs(self, logits: torch.Tensor, target_ids: Sequence[int], k: int) -> list[TokenLogprobs]:
        """Log-probabilities of given tokens: target_ids[i] at logits [n, V] row i, and the k best (-1: all)."""
        rows = np.arange(len(target_ids), dtype=np.int32)
        given = torch.tensor(target_ids, dtype=torch.int32, device=logits.device)
        return token_logprobs(self.kernels, logits, rows, given, np.full(len(rows), k, np.int32))

    def _asked(
        self, logits: torch.Tensor, layout: LogitsRows, transforms: Sequence[RowTransform], located: RowMasks | None
    ) -> _Asked | None:
        """Who wants logprobs; None: nobody. Copies the raw logits of those rows that are about to be edited."""
        num_logprobs = self._num_logprobs[layout.rows]
        rows = np.flatnonzero(num_logprobs != NONE).astype(np.int32)
        if not len(rows):
            return None
        edited = np.zeros(len(layout.rows), bool)
        for transform in transforms:
            edited |= transform.touches(layout)
        if located is not None:
            edited[located.logits_rows] = True
        kept, copied = rows[~edited[rows]], rows[edited[rows]]
        raw = logits[torch.from_numpy(copied.astype(np.int64)).to(logits.device)] if len(copied) else None
        return _Asked(num_logprobs, kept, copied, raw)

    def _logprobs(
        self, logits: torch.Tensor, asked: _Asked, ids: torch.Tensor, status: torch.Tensor
    ) -> list[TokenLogprobs | None]:
        """Per logits row. Marks rows in status whose raw logits have a NaN that a mask hid."""
        found: list[TokenLogprobs | None] = [None] * len(ids)
        everywhere = np.arange(len(asked.copied), dtype=np.int32)
        for source, rows, places in (
            (logits, asked.kept, asked.kept),
            (asked.raw, everywhere, asked.copied),
        ):
            if source is None or not len(places):
                continue
            chosen = ids[torch.from_numpy(places.astype(np.int64)).to(ids.device)]
            entries = token_logprobs(self.kernels, source, rows, chosen, asked.num_logprobs[places])
            for place, entry in zip(places.tolist(), entries):
                if math.isnan(entry.logprobs[0]) and status[place] == OK:
                    status[place] = NOT_A_NUMBER
                found[place] = entry
        if status.any():
            found = [None if state else entry for entry, state in zip(found, status.tolist())]
        return found


class _Asked(NamedTuple):
    """The logits rows of a step that want logprobs."""

    num_logprobs: npt.NDArray[np.int32]  # [L] NONE where a row does not
    kept: npt.NDArray[np.int32]  # rows that no transform touches: their logits stay raw
    copied: npt.NDArray[np.int32]  # the others
    raw: torch.Tensor | None  # [len(copied), V]
