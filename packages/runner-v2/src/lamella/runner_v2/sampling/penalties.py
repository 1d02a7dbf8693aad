"""Repetition, frequency and presence penalties."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lamella.runner_v2.sampling.params import RowParams
from lamella.runner_v2.sampling.rows import LogitsRows


class PenaltyEntries(NamedTuple):
    """Penalised tokens of n logits rows; row j has the entries [start[j], start[j + 1]), each id once."""

    logits_rows: npt.NDArray[np.int32]  # [n]
    start: npt.NDArray[np.int64]  # [n + 1]
    token_ids: npt.NDArray[np.int32]  # [E]
    counts: npt.NDArray[np.int32]  # [E] times in the output; 0: in the prompt only
    repetition: npt.NDArray[np.float32]  # [n]
    frequency: npt.NDArray[np.float32]  # [n]
    presence: npt.NDArray[np.float32]  # [n]


class _Counts:
    """Tokens of a row and how often they occur in its output: a list, not an array over the vocabulary."""

    __slots__ = ("_counts", "_ids", "_places", "size")

    def __init__(self, prompt_ids: Sequence[int], vocab_size: int) -> None:
        ids = np.unique(np.asarray(prompt_ids, np.int64))
        ids = ids[(ids >= 0) & (ids < vocab_size)]  # placeholders of media have no logit
        self.size = len(ids)
        self._ids = np.empty(max(64, 2 * self.size), np.int32)
        self._counts = np.zeros(len(self._ids), np.int32)
        self._ids[: self.size] = ids
        self._places = dict(zip(ids.tolist(), range(self.size)))

    def extend(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            place = self._places.get(token_id)
            if place is None:
                place = self.size
                if place == len(self._ids):
                    self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
                    self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
                self._places[token_id] = place
                self._ids[place] = token_id
                self.size += 1
            self._counts[place] += 1

    def entries(self, drafts: Sequence[int]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """(ids, counts) with the drafts counted as output. Views where there are none."""
        ids, counts = self._ids[: self.size], self._counts[: self.size]
        if not drafts:
            return ids, counts
        counts = counts.copy()
        new: dict[int, int] = {}
        for token_id in drafts:
            place = self._places.get(token_id)
            if place is None:
                new[token_id] = new.get(token_id, 0) + 1
            else:
                counts[place] += 1
        return (
            np.concatenate((ids, np.fromiter(new.keys(), np.int32, len(new)))),
            np.concatenate((counts, np.fromiter(new.values(), np.int32, len(new)))),
        )


class Penalties:
    """x > 0 ? x / repetition : x · repetition for tokens of prompt, output or drafts; then, for tokens of output or
    drafts, minus frequency · count, minus presence. `penalise` is the kernel that does it."""

    def __init__(
        self, vocab_size: int, max_num_rows: int, penalise: Callable[[torch.Tensor, PenaltyEntries], None]
    ) -> None:
        self.num_active = 0
        self._vocab_size = vocab_size
        self._penalise = penalise
        self._active = np.zeros(max_num_rows, bool)
        self._factors = np.zeros((3, max_num_rows), np.float32)
        self._counts: dict[int, _Counts] = {}

    def add(self, row: int, params: RowParams, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        self.remove(row)
        factors = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        if factors == (1.0, 0.0, 0.0):
            return
        counts = _Counts(prompt_ids if params.repetition_penalty != 1.0 else (), self._vocab_size)
        counts.extend(output_ids)
        self._counts[row] = counts
        self._factors[:, row] = factors
        self._active[row] = True
        self.num_active += 1

    def remove(self, row: int) -> None:
        if self._counts.pop(row, None) is not None:
            self._active[row] = False
            self.num_active -= 1

    def touches(self, layout: LogitsRows) -> npt.NDArray[np.bool_]:
        return self._active[layout.rows]

    def apply(self, logits: torch.Tensor, layout: LogitsRows) -> None:
        active = np.flatnonzero(self._active[layout.rows]).astype(np.int32)
        if not len(active):
            return
        rows = layout.rows[active]
        parts = [self._counts[row].entries(layout.prefix(i)) for i, row in zip(active.tolist(), rows.tolist())]
        start = np.zeros(len(parts) + 1, np.int64)
        np.cumsum([len(ids) for ids, _ in parts], out=start[1:])
        self._penalise(
            logits,
            PenaltyEntries(
                active,
                start,
                np.concatenate([ids for ids, _ in parts]),
                np.concatenate([counts for _, counts in parts]),
                *(factor[rows] for factor in self._factors),
            ),
        )

    def advance(self, row: int, token_ids: Sequence[int]) -> None:
        counts = self._counts.get(row)
        if counts is not None:
            counts.extend(token_ids)


def penalise(logits: torch.Tensor, entries: PenaltyEntries) -> None:
    """The reference: edits logits [L, V] in place."""

    def on_device(values: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(logits.device)

    lens = np.diff(entries.start)
    owner = np.repeat(entries.logits_rows.astype(np.int64), lens)
    rows, ids = on_device(owner), on_device(entries.token_ids.astype(np.int64))
    counts = on_device(entries.counts.astype(np.float32))
    repetition, frequency, presence = (
        on_device(np.repeat(f, lens)) for f in (entries.repetition, entries.frequency, entries.presence)
    )
    x = logits[rows, ids]
    x = torch.where(x > 0, x / repetition, x * repetition)
    x = x - frequency * counts
    logits[rows, ids] = x - torch.where(counts > 0, presence, torch.zeros_like(presence))
