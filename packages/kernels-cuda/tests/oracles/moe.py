"""Mixtures of experts in float64, from the formulas alone."""

import torch


def scores(logits, scoring):
    """Scores of all experts; 0 where the logit is not finite."""
    finite = torch.isfinite(logits)
    x = logits.double().masked_fill(~finite, -torch.inf)
    if scoring == "softmax":
        e = torch.exp(x - x.amax(-1, keepdim=True).clamp_min(-1e300))
        s = e / e.sum(-1, keepdim=True).clamp_min(1e-300)
    elif scoring == "sigmoid":
        s = torch.sigmoid(x)
    else:
        s = torch.nn.functional.softplus(x).sqrt()
    return s.masked_fill(~finite, 0.0)


def choices(logits, scoring, bias=None, num_groups=1, topk_groups=1):
    """What experts are ranked by; -inf for those that cannot be chosen."""
    finite = torch.isfinite(logits)
    c = logits.double() if bias is None else scores(logits, scoring) + bias.double()
    c = c.masked_fill(~finite, -torch.inf)
    if num_groups > 1:
        grouped = c.view(c.shape[0], num_groups, -1)
        of_group = grouped.amax(-1) if bias is None else grouped.topk(2, -1).values.sum(-1)
        order = of_group.sort(dim=-1, descending=True, stable=True).indices[:, :topk_groups]
        allowed = torch.zeros_like(of_group, dtype=torch.bool).scatter_(1, order, True)
        c = grouped.masked_fill(~allowed[..., None], -torch.inf).view_as(c)
    return c


def ranked(c, top_k):
    """The ids of the top_k largest, equal ones by the lower id."""
    return c.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]


def route_weights(logits, ids, scoring, renormalize=True, scale=1.0):
    """Weights of these ids."""
    s = scores(logits, scoring).gather(1, ids.long())
    if renormalize:
        s = s / (s.sum(-1, keepdim=True) + 1e-20)
    return s * scale


def align(ids, num_experts, block_rows, expert_map=None):
    """(sorted ids, expert of each block), lists without anything behind the last block."""
    flat = ids.flatten().tolist()
    table = None if expert_map is None else expert_map.tolist()
    members = [[] for _ in range(num_experts)]
    for i, e in enumerate(flat):
        if table is not None:
            e = table[e] if 0 <= e < len(table) else -1
        if 0 <= e < num_experts:
            members[e].append(i)
    ordered, experts = [], []
    for e, pairs in enumerate(members):
        blocks = -(-len(pairs) // block_rows)
        ordered += pairs + [len(flat)] * (blocks * block_rows - len(pairs))
        experts += [e] * blocks
    return ordered, experts


def fp8_rows(x):
    """What is left of rows after e4m3 with one scale per 128 columns."""
    groups = x.float().view(*x.shape[:-1], -1, 128)
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-10) / 448.0
    return ((groups / scale).to(torch.float8_e4m3fn).double() * scale.double()).view(x.shape)


def fp8_blocks(w):
    """(w in e4m3, scales of 128 x 128 blocks, the matrix that they stand for in float64)."""
    experts, rows, columns = w.shape
    blocks = w.float().view(experts, rows // 128, 128, columns // 128, 128)
    scale = blocks.abs().amax((2, 4), keepdim=True).clamp_min(1e-10) / 448.0
    q = (blocks / scale).to(torch.float8_e4m3fn)
    back = q.double() * scale.double()
    return q.view(w.shape), scale.view(experts, rows // 128, columns // 128).contiguous(), back.view(w.shape)


def fused_moe(x, w13, w2, ids, weights, expert_map=None, fp8=False):
    """w13(e) and w2(e) give the float64 matrices of an expert."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    local = ids.long()
    if expert_map is not None:
        known = (local >= 0) & (local < expert_map.numel())
        local = torch.where(known, expert_map.long()[local.clamp(0, expert_map.numel() - 1)], -1)
    for e in local[local >= 0].unique().tolist():
        token, choice = (local == e).nonzero(as_tuple=True)
        rows = fp8_rows(x[token]) if fp8 else x[token].double()
        both = rows @ w13(e).T
        gate, up = both.chunk(2, -1)
        h = torch.nn.functional.silu(gate) * up
        if fp8:
            h = fp8_rows(h.to(x.dtype))
        y = (h @ w2(e).T) * weights[token, choice].double()[:, None]
        out.index_add_(0, token, y)
    return out
