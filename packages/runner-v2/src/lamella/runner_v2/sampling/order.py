"""The one order of tokens: larger logit first, and the lower id first where logits are equal."""

from __future__ import annotations

import torch


def best(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first k tokens of each row, in order: (values [n, k], ids [n, k] int64). logits [n, V] has no NaN; k <= V."""
    n, vocab_size = logits.shape
    if k * 4 >= vocab_size:
        values, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
        return values[:, :k], ids[:, :k]
    if k == 0:
        return logits[:, :0], torch.empty((n, 0), dtype=torch.int64, device=logits.device)
    # topk says nothing about ties: take its threshold only, then fill up with equal values from the lowest id on
    threshold = torch.topk(logits, k, dim=-1, sorted=True).values[:, -1:]
    above = logits > threshold
    equal = logits == threshold
    missing = k - above.sum(dim=-1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(dim=-1) <= missing))
    ids = chosen.nonzero()[:, 1].view(n, k)
    values, order = torch.sort(logits.gather(1, ids), dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)
