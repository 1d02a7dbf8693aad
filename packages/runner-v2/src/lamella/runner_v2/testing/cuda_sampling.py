"""Stand-ins of the sampling kernels: the reference of lamella.runner_v2.sampling behind the kernels' signatures."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lamella.runner_v2.sampling.choice import Choice
from lamella.runner_v2.sampling.kernels import TorchKernels
from lamella.runner_v2.testing.cuda_checks import check, check_dense, require

_LOGITS = (torch.float32, torch.bfloat16)
_MAX_VOCAB = 262_144
_MAX_BEST = 1024


class Sampled(NamedTuple):
    """As of the kernels."""

    ids: torch.Tensor  # [L] int32
    status: torch.Tensor  # [L] uint8
    logprobs: torch.Tensor | None  # [L] float32


class TopLogprobs(NamedTuple):
    """As of the kernels."""

    ids: torch.Tensor  # [L, n] int32
    logprobs: torch.Tensor  # [L, n] float32
    chosen: torch.Tensor | None  # [L] float32
    ranks: torch.Tensor | None  # [L] int32


def sampling_workspace_bytes(num_rows: int, vocab_size: int) -> int:
    return 16 * num_rows + 256


def sample(
    logits: torch.Tensor,  # [L, V] float32 or bfloat16
    temperature: torch.Tensor | None = None,  # [R] float32
    top_k: torch.Tensor | None = None,  # [R] int32
    top_p: torch.Tensor | None = None,  # [R] float64
    min_p: torch.Tensor | None = None,  # [R] float64
    seeds: torch.Tensor | None = None,  # [R] int64 or uint64
    positions: torch.Tensor | None = None,  # [L] int32
    *,
    rows: torch.Tensor | None = None,  # [L] int32, negative: padding
    salt: int = 0,
    logprobs: bool = False,
    ids: torch.Tensor | None = None,  # [L] int32
    status: torch.Tensor | None = None,  # [L] uint8
    logprobs_out: torch.Tensor | None = None,  # [L] float32
    workspace: torch.Tensor | None = None,  # uint8
) -> Sampled:
    _check_logits(logits, workspace)
    num, vocab_size = logits.shape
    if seeds is not None and seeds.dtype == torch.uint64:
        seeds = seeds.view(torch.int64)
    num_params = -1 if rows is not None else num
    given = (
        ("temperature", temperature, torch.float32, num_params),
        ("top_k", top_k, torch.int32, num_params),
        ("top_p", top_p, torch.float64, num_params),
        ("min_p", min_p, torch.float64, num_params),
        ("seeds", seeds, torch.int64, num_params),
        ("positions", positions, torch.int32, num),
        ("rows", rows, torch.int32, num),
    )
    for name, vector, dtype, size in given:
        if vector is not None:
            check_dense(vector, name, (dtype,), (size,))
    require(temperature is None or seeds is not None, "seeds", "missing, and temperature is given")
    require(temperature is None or positions is not None, "positions", "missing, and temperature is given")
    is_padding = torch.zeros(num, dtype=torch.bool) if rows is None else (rows < 0).cpu()
    index = np.arange(num) if rows is None else rows.clamp(min=0).cpu().numpy().astype(np.int64)

    def column(vector: torch.Tensor | None, off: float, dtype: type[np.generic]) -> npt.NDArray[Any]:
        return np.full(num, off, dtype) if vector is None else vector.cpu().numpy()[index].astype(dtype)

    warmth = column(temperature, 0.0, np.float32)
    warmth = np.where(warmth > 0, warmth, np.float32(0.0))
    with np.errstate(divide="ignore"):
        inverse = (np.float32(1.0) / warmth).astype(np.float32)
        log_min_p = np.log(column(min_p, 0.0, np.float64))
    keys = np.zeros(num, np.int64) if seeds is None else seeds.cpu().numpy()[index]
    places = np.zeros(num, np.int32) if positions is None else positions.cpu().numpy()
    limits = column(top_k, 0, np.int32).astype(np.int32)
    limits = np.where((limits > 0) & (limits < vocab_size), limits, 0)
    shares = column(top_p, 1.0, np.float64).astype(np.float64)
    choice = Choice(warmth, inverse, log_min_p, limits, shares, keys.view(np.uint64), places, salt)
    wide = logits.float().clone()
    wide[is_padding.to(logits.device)] = 0.0
    chosen, failed = TorchKernels().choose(wide, choice)
    chosen[is_padding.to(logits.device)] = 0
    if logprobs or logprobs_out is not None:
        values = wide.double().log_softmax(-1).gather(1, chosen.long()[:, None])[:, 0].float()
        values = torch.where(failed == 0, values, torch.nan)
        logprobs_out = values if logprobs_out is None else logprobs_out.copy_(values)
    return Sampled(
        chosen if ids is None else ids.copy_(chosen),
        failed if status is None else status.copy_(failed),
        logprobs_out,
    )


def top_logprobs(
    logits: torch.Tensor,  # [L, V] float32 or bfloat16
    num_best: int,
    token_ids: torch.Tensor | None = None,  # [L] int32
    *,
    workspace: torch.Tensor | None = None,  # uint8
) -> TopLogprobs:
    _check_logits(logits, workspace)
    num, vocab_size = logits.shape
    require(num_best <= min(_MAX_BEST, vocab_size), "num_best", f"is {num_best}")
    if token_ids is not None:
        check_dense(token_ids, "token_ids", (torch.int32,), (num,))
    given = torch.zeros(num, dtype=torch.int32, device=logits.device) if token_ids is None else token_ids
    found = TorchKernels().logprobs(logits.float(), np.arange(num, dtype=np.int32), given, max(num_best, 1))
    bad = torch.isnan(found.best[:, 0])
    best_ids = found.best_ids.masked_fill(bad[:, None], 0)[:, :num_best]
    best = found.best.masked_fill(bad[:, None], torch.nan)[:, :num_best]
    if token_ids is None:
        return TopLogprobs(best_ids, best, None, None)
    return TopLogprobs(best_ids, best, found.chosen.masked_fill(bad, torch.nan), found.ranks.masked_fill(bad, 0))


def logsumexp(
    logits: torch.Tensor,  # [L, V] float32 or bfloat16
    *,
    out: torch.Tensor | None = None,  # [L] float32
    workspace: torch.Tensor | None = None,  # uint8
) -> torch.Tensor:
    _check_logits(logits, workspace)
    sums = logits.double().logsumexp(-1).float()
    return sums if out is None else out.copy_(sums)


def apply_penalties(
    logits: torch.Tensor,  # [L, V] float32 or bfloat16
    counts: torch.Tensor,  # [R, V] int32
    *,
    prompt: torch.Tensor | None = None,  # [R, ceil(V / 32)] int32
    repetition: torch.Tensor | None = None,  # [R] float32
    frequency: torch.Tensor | None = None,  # [R] float32
    presence: torch.Tensor | None = None,  # [R] float32
    rows: torch.Tensor | None = None,  # [L] int32, negative: no penalties
) -> None:
    num, vocab_size = logits.shape
    check(logits, "logits", _LOGITS, (-1, -1))
    check(counts, "counts", (torch.int32,), (num if rows is None else -1, vocab_size))
    num_params = counts.shape[0]
    for name, vector in (("repetition", repetition), ("frequency", frequency), ("presence", presence)):
        if vector is not None:
            check_dense(vector, name, (torch.float32,), (num_params,))
    if rows is not None:
        check_dense(rows, "rows", (torch.int32,), (num,))
    index = torch.arange(num, device=logits.device) if rows is None else rows.long()
    is_used = index >= 0
    index = index.clamp(min=0)
    times = counts[index]
    seen = times > 0
    if prompt is not None:
        check(prompt, "prompt", (torch.int32,), (num_params, -(-vocab_size // 32)))
        seen = seen | _bits(prompt, vocab_size)[index]
    x = logits.float()
    if repetition is not None:
        factor = repetition[index][:, None]
        x = torch.where(seen, torch.where(x > 0, x / factor, x * factor), x)
    if frequency is not None:
        x = x - frequency[index][:, None] * times
    if presence is not None:
        x = x - torch.where(times > 0, presence[index][:, None], 0.0)
    logits.copy_(torch.where(is_used[:, None], x.to(logits.dtype), logits))


def apply_bitmask(
    logits: torch.Tensor,  # [L, V] float32 or bfloat16
    words: torch.Tensor,  # [M, ceil(V / 32)] int32
    *,
    rows: torch.Tensor | None = None,  # [M] int32, rows of logits; negative: skipped
) -> None:
    num, vocab_size = logits.shape
    check(logits, "logits", _LOGITS, (-1, -1))
    check(words, "words", (torch.int32,), (num if rows is None else -1, -(-vocab_size // 32)))
    if rows is not None:
        check_dense(rows, "rows", (torch.int32,), (words.shape[0],))
    targets = list(range(num)) if rows is None else rows.tolist()
    for target, allowed in zip(targets, _bits(words, vocab_size)):
        if target >= 0:
            logits[target].masked_fill_(~allowed, -torch.inf)


def _bits(words: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[n, ceil(V / 32)] int32 -> [n, V] bool."""
    places = torch.arange(32, device=words.device)
    return ((words[:, :, None] >> places) & 1).bool().view(words.shape[0], -1)[:, :vocab_size]


def _check_logits(logits: torch.Tensor, workspace: torch.Tensor | None) -> None:
    check(logits, "logits", _LOGITS, (-1, -1))
    require(1 <= logits.shape[1] <= _MAX_VOCAB, "logits", f"has {logits.shape[1]} columns")
    if workspace is not None:
        needed = sampling_workspace_bytes(*logits.shape)
        check_dense(workspace, "workspace", (torch.uint8,), (-1,))
        require(workspace.numel() >= needed, "workspace", f"has {workspace.numel()} bytes, needed {needed}")
