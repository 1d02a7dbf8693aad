"""Tests of what needs torch are left out where it is not installed."""

from __future__ import annotations

import importlib.util

NEED_TORCH = [
    "test_cuda_gpu.py",
    "test_cuda_mover.py",
    "test_device_mover.py",
    "test_fp8.py",
    "test_pinning.py",
    "test_tier_mover.py",
]

collect_ignore = [] if importlib.util.find_spec("torch") else NEED_TORCH
