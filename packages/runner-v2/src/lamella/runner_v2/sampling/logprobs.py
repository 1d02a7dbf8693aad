"""Log-probabilities in the form that leaves the runner."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from lamella.runner_v2.sampling.kernels import SamplingKernels
from lamella.runner_v2.step import TokenLogprobs

NONE = -2
"""Row asks for no logprobs (0 and -1 mean: of the chosen token only, of the whole vocabulary)."""

_CHUNK = 256  # rows at a time: bounds what the reference needs besides the logits


def token_logprobs(
    kernels: SamplingKernels,
    logits: torch.Tensor,  # [L, V] float32, raw
    rows: npt.NDArray[np.int32],  # [n] which of them
    token_ids: torch.Tensor,  # [n] int32, the chosen or given token of each
    num_logprobs: npt.NDArray[np.int32],  # [n] k best, -1: all
) -> list[TokenLogprobs]:
    """One entry per row: the given token first, then the best ones."""
    vocab_size = logits.shape[1]
    k = np.where(num_logprobs < 0, vocab_size, np.minimum(num_logprobs, vocab_size))
    found: list[TokenLogprobs | None] = [None] * len(rows)
    # apart, so that one row that wants everything does not sort the vocabulary for all
    for part in (np.flatnonzero(num_logprobs >= 0), np.flatnonzero(num_logprobs < 0)):
        for start in range(0, len(part), _CHUNK):
            chunk = part[start : start + _CHUNK]
            given = token_ids[torch.from_numpy(chunk).to(token_ids.device)]
            result = kernels.logprobs(logits, rows[chunk], given, int(k[chunk].max()))
            columns = (given, result.chosen, result.ranks, result.best_ids, result.best)
            for i, token_id, chosen, rank, ids, best in zip(chunk.tolist(), *(c.tolist() for c in columns)):
                found[i] = TokenLogprobs([token_id, *ids[: k[i]]], [chosen, *best[: k[i]]], rank)
    return [entry for entry in found if entry is not None]
