"""The work on whole vocabularies: what a sampling kernel set offers, and its reference in torch."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from lamella.runner_v2.sampling.choice import Choice
from lamella.runner_v2.sampling.masks import RowMasks, apply_masks
from lamella.runner_v2.sampling.min_p import min_p_cutoff
from lamella.runner_v2.sampling.order import best
from lamella.runner_v2.sampling.penalties import PenaltyEntries, penalise
from lamella.runner_v2.sampling.rows import INFINITE, NONE_ALLOWED, NOT_A_NUMBER
from lamella.runner_v2.sampling.seeds import gumbel
from lamella.runner_v2.sampling.top_k_top_p import mass, mass_bits, prefix_of_mass


class Logprobs(NamedTuple):
    """Log-probabilities of n rows: of one given token each, and of the k best in order."""

    chosen: torch.Tensor  # [n] float32
    ranks: torch.Tensor  # [n] int32; number of logits >= that of the given token
    best_ids: torch.Tensor  # [n, k] int32
    best: torch.Tensor  # [n, k] float32


class SamplingKernels(Protocol):
    """logits: [L, V] float32, rows contiguous. Statuses: see rows.py. Two sets give the same ids for the same bits."""

    name: str

    def greedy(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids [L] int32, status [L] uint8): the lowest id among the largest logits; 0 where the row failed."""

    def choose(self, logits: torch.Tensor, choice: Choice) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids, status) after min-p, top-k, top-p, with noise. Greedy rows as in greedy()."""

    def logprobs(self, logits: torch.Tensor, rows: npt.NDArray[np.int32], token_ids: torch.Tensor, k: int) -> Logprobs:
        """In the n given rows of logits: of token_ids [n] int32, and of the k <= V best. NaN where a row has
        NaN, +inf or nothing finite."""

    def penalise(self, logits: torch.Tensor, entries: PenaltyEntries) -> None:
        """Edit in place."""

    def mask(self, logits: torch.Tensor, masks: RowMasks) -> None:
        """Edit in place."""


class TorchKernels:
    """The reference: runs on any device, and serves where no native kernel does."""

    name = "torch"

    def greedy(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        top = logits.amax(dim=-1)  # NaN wins
        status = _status(top)
        ids = _lowest(logits == top[:, None], torch.arange(logits.shape[1], device=logits.device))
        return torch.where(status == 0, ids, 0), status

    def choose(self, logits: torch.Tensor, choice: Choice) -> tuple[torch.Tensor, torch.Tensor]:
        ids, status = self.greedy(logits)
        random = np.flatnonzero((choice.temperature > 0) & (status == 0).cpu().numpy())
        limited = (choice.top_k[random] > 0) | (choice.top_p[random] < 1.0)
        for part, narrow in ((random[limited], True), (random[~limited], False)):
            if len(part):
                index = torch.as_tensor(part, device=logits.device)
                ids[index] = _choose(logits[index], choice, part, narrow)
        return ids, status

    def logprobs(self, logits: torch.Tensor, rows: npt.NDArray[np.int32], token_ids: torch.Tensor, k: int) -> Logprobs:
        logits = logits[torch.from_numpy(rows.astype(np.int64)).to(logits.device)]
        given = token_ids.to(device=logits.device, dtype=torch.int64)[:, None]
        total = logits.double().logsumexp(dim=-1, keepdim=True)
        total = torch.where(total.isfinite(), total, torch.nan)
        x = logits.gather(1, given)
        values, ids = best(torch.where(logits.isnan(), -torch.inf, logits), k)
        return Logprobs(
            (x - total)[:, 0].float(),
            (logits >= x).sum(dim=-1, dtype=torch.int32),
            ids.to(torch.int32),
            (values - total).float(),
        )

    def penalise(self, logits: torch.Tensor, entries: PenaltyEntries) -> None:
        penalise(logits, entries)

    def mask(self, logits: torch.Tensor, masks: RowMasks) -> None:
        apply_masks(logits, masks)


def _status(top: torch.Tensor) -> torch.Tensor:
    """Status of rows by their largest logit, [L] uint8."""
    status = torch.isneginf(top).to(torch.uint8) * NONE_ALLOWED
    status[torch.isposinf(top)] = INFINITE
    status[torch.isnan(top)] = NOT_A_NUMBER
    return status


def _lowest(winners: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """The lowest id among the winners of each row, [n] int32 (torch.argmax may return any of several)."""
    return torch.where(winners, token_ids, torch.iinfo(torch.int32).max).amin(dim=-1).to(torch.int32)


def _choose(logits: torch.Tensor, choice: Choice, rows: npt.NDArray[np.int64], narrow: bool) -> torch.Tensor:
    """Ids [n] int32 of logits [n, V], which belong to the given rows of choice. narrow: some top-k or top-p."""
    values, token_ids, keep = kept(logits, choice, rows, narrow)
    keys = _column(choice.keys.view(np.int64), rows, logits)
    positions = _column(choice.positions.astype(np.int64), rows, logits)
    temperature = _column(choice.temperature, rows, logits)
    score = values.double() / temperature.double() + gumbel(keys, positions, token_ids, choice.salt)
    score = torch.where(keep, score, -torch.inf)
    return _lowest(score == score.amax(dim=-1, keepdim=True), token_ids)


def kept(
    logits: torch.Tensor, choice: Choice, rows: npt.NDArray[np.int64], narrow: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What min-p, top-k and top-p leave of logits [n, V], which belong to the given rows of choice, none of them
    greedy: (logits, ids, whether kept), each [n, m]. narrow: some top-k or top-p; then the best come first."""
    device, vocab_size = logits.device, logits.shape[1]
    top_k = np.where(choice.top_k > 0, choice.top_k, vocab_size)
    if narrow:
        values, token_ids = best(logits, int(top_k[rows].max()))
    else:
        values, token_ids = logits, torch.arange(vocab_size, device=device).expand_as(logits)
    top = values.amax(dim=-1, keepdim=True)
    log_min_p = _column(choice.log_min_p, rows, logits)
    keep = values.double() >= min_p_cutoff(top, _column(choice.temperature, rows, logits), log_min_p)
    if narrow:
        keep &= torch.arange(values.shape[1], device=device) < _column(top_k, rows, logits)
        top_p = _column(choice.top_p, rows, logits)
        inverse_temperature = _column(choice.inverse_temperature, rows, logits)
        masses = mass(values, top, inverse_temperature, mass_bits(vocab_size))
        keep &= prefix_of_mass(torch.where(keep, masses, 0.0), top_p) | (top_p >= 1.0)
    return values, token_ids, keep


def _column(values: npt.NDArray[np.generic], rows: npt.NDArray[np.int64], like: torch.Tensor) -> torch.Tensor:
    """values of these rows, [n, 1], where the logits are."""
    return torch.from_numpy(values[rows]).to(like.device)[:, None]
