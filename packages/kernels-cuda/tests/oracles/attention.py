"""Paged decode and state merge in float64, one query row at a time, from the formula alone."""

import math

import torch


def paged_decode(
    q, k_cache, v_cache, block_table, seq_lens, scale, *, window=0, softcap=0.0, sinks=None, k_scale=None, v_scale=None
):
    """(out float64 [B, n, Hq, D], lse float64 [B, n, Hq]); caches [blocks, Hkv, block_size, D]."""
    n, num_heads = q.shape[1:3]
    num_kv_heads, block_size = k_cache.shape[1:3]
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.full(q.shape[:3], -math.inf, dtype=torch.float64, device=q.device)
    each = torch.arange(num_heads, device=q.device) // (num_heads // num_kv_heads)  # query head -> kv head

    def per_head(value):
        return 1.0 if value is None else value.double().view(-1, 1, 1)

    def taken(cache, block, inside):  # [Hkv, keys, D]; by bytes, for fp8 has no indexing everywhere
        raw = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
        return raw[block, :, inside].view(cache.dtype).double().transpose(0, 1)

    for b, length in enumerate(seq_lens.tolist()):
        for i in range(n):
            last = length - n + i
            first = max(0, last - window + 1) if window else 0
            if last < 0:
                continue
            position = torch.arange(first, last + 1, device=q.device)
            block, inside = block_table[b].long()[position // block_size], position % block_size
            k = (taken(k_cache, block, inside) * per_head(k_scale))[each]  # [Hq, keys, D]
            v = (taken(v_cache, block, inside) * per_head(v_scale))[each]
            score = torch.einsum("hd,hkd->hk", q[b, i].double(), k) * scale
            if softcap:
                score = softcap * torch.tanh(score / softcap)
            total = torch.logsumexp(score, -1)
            if sinks is not None:
                total = torch.logaddexp(total, sinks.double())
            out[b, i] = torch.einsum("hk,hkd->hd", torch.exp(score - total[:, None]), v)
            lse[b, i] = total
    return out, lse


def merge_states(o, lse):
    """o [S, ..., D], lse [S, ...] -> (out, lse); states with lse -inf are left out."""
    o, lse = o.double(), lse.double()
    total = torch.logsumexp(lse, 0)
    weight = torch.where(lse == -math.inf, 0.0, torch.exp(lse - total))
    return torch.where(weight[..., None] > 0, weight[..., None] * o, 0.0).sum(0), total
