"""Where the CUDA kernels come from: the package lamella-kernels-cuda, if it is installed and can run here.

Nobody else imports it, so that everything that uses kernels can be given a stand-in (testing/cuda_kernels.py).
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from lamella.runner_v2.errors import UnsupportedError

substitutes: dict[str, Any] = {}
"""Device type -> what load_kernels() returns for it instead of the package. Empty but in tests, which say so by
lamella.runner_v2.testing.cuda_kernels.using()."""


def load_kernels(device: str = "cuda") -> Any:
    """The namespace of lamella.kernels_cuda, able to run on this device; UnsupportedError with the remedy if not."""
    place = torch.device(device)
    if place.type in substitutes:
        return substitutes[place.type]
    if place.type != "cuda":
        raise UnsupportedError(f"the CUDA kernels do not run on device {device}; they need device cuda")
    try:
        kernels = importlib.import_module("lamella.kernels_cuda")
    except ImportError as error:
        raise UnsupportedError(
            f"the CUDA kernels are not installed ({error}); install lamella-kernels-cuda, or choose provider torch"
        ) from error
    reason = kernels.why_not(place.index or 0)
    if reason is not None:
        raise UnsupportedError(f"the CUDA kernels cannot run on {device}: {reason}")
    return kernels
