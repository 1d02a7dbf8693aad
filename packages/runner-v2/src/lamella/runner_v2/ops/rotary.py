"""Contract of `rope`: rotate q and k in place.

Site params: head_dim, rotary_dim (the leading dimensions that rotate), interleaved (pairs (2i, 2i + 1) instead of
(i, i + rotary_dim / 2)).

    run(q [T, num_heads, head_dim], k [T, num_kv_heads, head_dim], positions [T] int32, table) -> None

q and k may be views whose last two dimensions are contiguous (parts of a qkv row); they are changed in place. The
factors of scaled rotations (yarn, longrope) are already inside the table.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from lamella.runner_v2.ops.spec import Op


class RopeTable(NamedTuple):
    """Cosines and sines of every position; float32."""

    cos: torch.Tensor  # [max_position, rotary_dim / 2]
    sin: torch.Tensor  # [max_position, rotary_dim / 2]


def rope(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, table: RopeTable, interleaved: bool) -> None:
    """(a, b) -> (a cos - b sin, b cos + a sin) for every pair, in float32."""
    cos = table.cos[positions].unsqueeze(1)  # [T, 1, rotary_dim / 2]
    sin = table.sin[positions].unsqueeze(1)
    half = cos.shape[-1]
    for x in (q, k):
        if interleaved:
            first, second = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
        else:
            first, second = x[..., :half], x[..., half : 2 * half]
        a, b = first.float(), second.float()
        rotated_a, rotated_b = a * cos - b * sin, b * cos + a * sin
        first.copy_(rotated_a)
        second.copy_(rotated_b)


ROPE = Op("rope", rope, "rotary position embedding of q and k, in place")
