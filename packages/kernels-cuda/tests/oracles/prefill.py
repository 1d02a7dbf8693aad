"""Attention over a paged cache in float64, from the formula alone, one sequence and head at a time."""

import torch


def paged_prefill(
    q, k_cache, v_cache, block_table, cu_q, seq_lens, scale,
    *, causal=True, window=0, softcap=0.0, sinks=None, k_scale=None, v_scale=None,
):  # fmt: skip
    """(out [num_tokens, num_heads, head_dim], lse [num_tokens, num_heads]), float64; NaN in rows of no sequence."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = k_cache.shape[1:3]
    out = torch.full((num_tokens, num_heads, head_dim), torch.nan, dtype=torch.float64, device=q.device)
    lse = torch.full((num_tokens, num_heads), torch.nan, dtype=torch.float64, device=q.device)
    cu, lens = cu_q.tolist(), seq_lens.tolist()
    for b, length in enumerate(lens):
        first, last = cu[b], cu[b + 1]
        n = last - first
        if n == 0:
            continue
        keys = torch.arange(length, device=q.device)
        blocks, offsets = block_table[b].long()[keys // block_size], keys % block_size
        at = length - n + torch.arange(n, device=q.device)[:, None]
        seen = torch.ones(n, length, dtype=torch.bool, device=q.device)
        if causal:
            seen &= keys <= at
        if window:
            seen &= keys > at - window
        for h in range(num_heads):
            kv = h * num_kv_heads // num_heads
            k, v = (_rows(cache[:, kv], blocks, offsets) for cache in (k_cache, v_cache))
            k = k * _of(k_scale, kv)
            v = v * _of(v_scale, kv)
            s = q[first:last, h].double() @ k.T * scale
            if softcap:
                s = softcap * torch.tanh(s / softcap)
            s = s.masked_fill(~seen, -torch.inf)
            total = torch.logsumexp(s, 1) if length else s.new_full((n,), -torch.inf)
            empty = total == -torch.inf
            if sinks is not None:
                total = torch.where(empty, total, torch.logaddexp(total, sinks[h].double()))
            p = torch.exp(s - torch.where(empty, torch.zeros_like(total), total)[:, None])
            out[first:last, h] = p.masked_fill(~seen, 0.0) @ v
            lse[first:last, h] = total
    return out, lse


def _of(scale, head):
    if scale is None:
        return 1.0
    return scale[head if scale.numel() > 1 else 0].double()


def _rows(cache, blocks, offsets):
    return (cache.half() if cache.itemsize == 1 else cache)[blocks, offsets].double()
