"""Choosing tokens without sorting the vocabulary, log-probabilities of the best, and edits of logits.

Parameters lie on the device, one entry per row of logits or, with `rows`, per sequence. Noise is a pure function of
(seed, position, token id, salt): Philox4x32-10 with key = seed and counter (position, token id, salt, 0), and
u = (word + 1/2) / 2^32, -log(-log(1 - u)). The same seed gives the same token in any batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from lamella.kernels_cuda.device import native


class Sampled(NamedTuple):
    """What was chosen in each row."""

    ids: torch.Tensor  # [L] int32; 0 where the row failed
    status: torch.Tensor  # [L] uint8; 0, 1: NaN, 2: +inf, 3: nothing but -inf
    logprobs: torch.Tensor | None  # [L] float32, log-softmax of the given logits; NaN where the row failed


class TopLogprobs(NamedTuple):
    """Log-probabilities of L rows. NaN, with ids and ranks 0, where a row has NaN, +inf or nothing finite."""

    ids: torch.Tensor  # [L, n] int32, larger logit first, lower id first among equals
    logprobs: torch.Tensor  # [L, n] float32
    chosen: torch.Tensor | None  # [L] float32, of token_ids
    ranks: torch.Tensor | None  # [L] int32; number of logits >= that of token_ids


def sampling_workspace_bytes(num_rows: int, vocab_size: int) -> int:
    """Bytes that sample(), top_logprobs() and logsumexp() need at most for so many rows."""
    return int(native().sampling_workspace_bytes(num_rows, vocab_size))


def sample(
    logits: torch.Tensor,  # [L, V] float32 or bfloat16
    temperature: torch.Tensor | None = None,  # [R] float32; 0 or less: greedy
    top_k: torch.Tensor | None = None,  # [R] int32; 0 or less: off
    top_p: torch.Tensor | None = None,  # [R] float64; 1 or more: off
    min_p: torch.Tensor | None = None,  # [R] float64; 0: off
    seeds: torch.Tensor | None = None,  # [R] int64 or uint64
    positions: torch.Tensor | None = None,  # [L] int32
    *,
    rows: torch.Tensor | None = None,  # [L] int32 in [0, R), or negative: padding
    salt: int = 0,
    logprobs: bool = False,
    ids: torch.Tensor | None = None,  # [L] int32
    status: torch.Tensor | None = None,  # [L] uint8
    logprobs_out: torch.Tensor | None = None,  # [L] float32
    workspace: torch.Tensor | None = None,  # [sampling_workspace_bytes] uint8
) -> Sampled:
    """Choose one token per row: the best logit / temperature + noise among those that min-p, top-k and top-p keep.

    min-p keeps logits >= best + temperature * log(min_p). Top-k keeps the first k in order (larger first, lower id
    first among equals). Top-p then keeps the shortest prefix whose mass reaches top_p of what is left. The best token
    always stays. Greedy rows take the lowest id among the best. V <= 262,144; rows may be strided and of any alignment.
    Rows with rows[i] < 0 get id 0 and status 0. ValueError names the argument that does not fit.
    """
    num_rows = logits.shape[0]
    device = logits.device
    ids = torch.empty(num_rows, dtype=torch.int32, device=device) if ids is None else ids
    status = torch.empty(num_rows, dtype=torch.uint8, device=device) if status is None else status
    if logprobs and logprobs_out is None:
        logprobs_out = torch.empty(num_rows, dtype=torch.float32, device=device)
    if seeds is not None and seeds.dtype == torch.uint64:
        seeds = seeds.view(torch.int64)
    native().sample(
        ids,
        status,
        logprobs_out,
        logits,
        _workspace(logits, workspace),
        rows,
        temperature,
        top_k,
        top_p,
        min_p,
        seeds,
        positions,
        salt,
    )
    return Sampled(ids, status, logprobs_out)


def top_logprobs(
    logits: torch.Tensor,  # [L, V] float32 or bfloat16
    num_best: int,
    token_ids: torch.Tensor | None = None,  # [L] int32
    *,
    workspace: torch.Tensor | None = None,  # [sampling_workspace_bytes] uint8
) -> TopLogprobs:
    """The num_best <= 1,024 largest of each row with log-probabilities, and those of token_ids with their ranks."""
    num_rows, device = logits.shape[0], logits.device
    best_ids = torch.empty((num_rows, num_best), dtype=torch.int32, device=device)
    best = torch.empty((num_rows, num_best), dtype=torch.float32, device=device)
    chosen = ranks = None
    if token_ids is not None:
        chosen = torch.empty(num_rows, dtype=torch.float32, device=device)
        ranks = torch.empty(num_rows, dtype=torch.int32, device=device)
    native().top_logprobs(best_ids, best, chosen, ranks, None, logits, token_ids, _workspace(logits, workspace))
    return TopLogprobs(best_ids, best, chosen, ranks)


def logsumexp(
    logits: torch.Tensor,  # [L, V] float32 or bfloat16
    *,
    out: torch.Tensor | None = None,  # [L] float32
    workspace: torch.Tensor | None = None,  # [sampling_workspace_bytes] uint8
) -> torch.Tensor:
    """Logarithm of the sum of exponentials of each row; NaN and infinities as in torch."""
    num_rows, device = logits.shape[0], logits.device
    out = torch.empty(num_rows, dtype=torch.float32, device=device) if out is None else out
    none_ids = torch.empty((num_rows, 0), dtype=torch.int32, device=device)
    none = torch.empty((num_rows, 0), dtype=torch.float32, device=device)
    native().top_logprobs(none_ids, none, None, None, out, logits, None, _workspace(logits, workspace))
    return out


def apply_penalties(
    logits: torch.Tensor,  # [L, V] float32 or bfloat16
    counts: torch.Tensor,  # [R, V] int32, times in the output
    *,
    prompt: torch.Tensor | None = None,  # [R, ceil(V / 32)] int32; bit i % 32 of word i / 32: token i is in the prompt
    repetition: torch.Tensor | None = None,  # [R] float32; 1: off
    frequency: torch.Tensor | None = None,  # [R] float32; 0: off
    presence: torch.Tensor | None = None,  # [R] float32; 0: off
    rows: torch.Tensor | None = None,  # [L] int32 in [0, R), or negative: no penalties
) -> None:
    """Edit logits in place: x > 0 ? x / repetition : x * repetition for tokens of prompt or output; then, for tokens of
    the output, minus frequency * count, minus presence."""
    native().apply_penalties(logits, counts, prompt, repetition, frequency, presence, rows)


def apply_bitmask(
    logits: torch.Tensor,  # [L, V] float32 or bfloat16
    words: torch.Tensor,  # [M, ceil(V / 32)] int32; bit i % 32 of word i / 32 allows token i
    *,
    rows: torch.Tensor | None = None,  # [M] int32, rows of logits; negative: skipped. None: M = L, in order
) -> None:
    """Set what is not allowed to -inf, in place."""
    native().apply_bitmask(logits, words, rows)


def _workspace(logits: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
    if given is not None:
        return given
    size = sampling_workspace_bytes(*logits.shape) if logits.dim() == 2 else 0
    return torch.empty(size, dtype=torch.uint8, device=logits.device)
