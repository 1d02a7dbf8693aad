"""Min-p: drop tokens less likely than min_p times the likeliest."""

from __future__ import annotations

import torch


def min_p_cutoff(
    best: torch.Tensor,  # [n, 1] float32
    temperature: torch.Tensor,  # [n, 1] float32
    log_min_p: torch.Tensor,  # [n, 1] float64; -inf: off
) -> torch.Tensor:
    """The lowest logit that stays, [n, 1] float64: p_i >= min_p · p_best is x_i >= x_best + T · log(min_p)."""
    return best.double() + temperature.double() * log_min_p
