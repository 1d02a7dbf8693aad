"""Bit masks of allowed tokens (grammars): bit i % 32 of word i // 32 allows token i."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lamella.runner_v2.sampling.rows import LogitsRows
from lamella.runner_v2.step import Mask


class RowMasks(NamedTuple):
    """Masks of some logits rows."""

    logits_rows: npt.NDArray[np.int32]  # [M]
    words: npt.NDArray[np.int32]  # [M, ceil(V / 32)]


def locate(masks: Sequence[Mask], layout: LogitsRows, vocab_size: int) -> RowMasks:
    """Find the logits row of each mask. Asserts that it is there and that the mask covers the vocabulary."""
    places = {key: i for i, key in enumerate(zip(layout.rows.tolist(), layout.draft_idx.tolist()))}
    num_words = -(-vocab_size // 32)
    found = np.empty(len(masks), np.int32)
    words = np.empty((len(masks), num_words), np.int32)
    for i, mask in enumerate(masks):
        place = places.get((mask.row, mask.draft_idx))
        assert place is not None, f"a mask for row {mask.row}, draft {mask.draft_idx}, which the step does not sample"
        assert len(mask.words) == num_words * 4, f"a mask of {len(mask.words)} bytes for {vocab_size} tokens"
        found[i] = place
        words[i] = np.frombuffer(mask.words, "<i4")
    return RowMasks(found, words)


def apply_masks(logits: torch.Tensor, masks: RowMasks) -> None:
    """Set what is not allowed to -inf, in logits [L, V], in place."""
    vocab_size = logits.shape[1]
    octets = masks.words.astype("<i4", copy=False).view(np.uint8)
    allowed = np.unpackbits(octets, axis=1, count=vocab_size, bitorder="little").astype(bool)
    rows = torch.as_tensor(masks.logits_rows, dtype=torch.int64, device=logits.device)
    forbidden = ~torch.as_tensor(allowed, device=logits.device)
    logits[rows] = logits[rows].masked_fill_(forbidden, -torch.inf)
