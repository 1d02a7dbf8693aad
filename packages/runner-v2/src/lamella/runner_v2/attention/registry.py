"""The attention backends by name, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from lamella.runner_v2.attention.backend import AttentionBackend
from lamella.runner_v2.attention.metadata import AttentionLimits
from lamella.runner_v2.errors import ConfigError, UnsupportedError

KV_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
}


class BackendChoice(NamedTuple):
    """The backend that serves, bound to its limits."""

    backend: AttentionBackend
    limits: AttentionLimits
    refused: Mapping[str, str]
    """Backends that were asked before it -> reason."""


def choose_backend(
    providers: Sequence[str], limits: AttentionLimits, kv_dtype: str, batch_invariant: bool
) -> BackendChoice:
    """The first backend of the providers' names that supports the limits, bound.

    kv_dtype "auto": float16 with the host backend, else the type of the activations; "fp8" is float8_e4m3fn.
    ConfigError for an unknown type, UnsupportedError if no backend serves.
    """
    if kv_dtype != "auto" and kv_dtype not in KV_DTYPES:
        raise ConfigError(f"kv_dtype {kv_dtype!r} is unknown; one of auto, {', '.join(KV_DTYPES)}")
    refused: dict[str, str] = {}
    for name in providers:
        default = torch.float16 if name == "host" else limits.dtype
        wanted = limits._replace(kv_dtype=default if kv_dtype == "auto" else KV_DTYPES[kv_dtype])
        backend = create_backend(name, batch_invariant, limits.device)
        reason = backend.supports(wanted)
        if name == "torch" and wanted.kv_dtype == torch.float8_e4m3fn:
            reason = "the reference keeps no 8-bit cache"
        if reason is None:
            backend.bind(wanted)
            return BackendChoice(backend, wanted, refused)
        refused[name] = reason
    raise UnsupportedError("no attention backend serves: " + "; ".join(f"{n}: {why}" for n, why in refused.items()))


def create_backend(name: str, batch_invariant: bool, device: str = "cuda") -> AttentionBackend:
    """The backend of this name, not yet bound. device: where kernels shall run; the others run where tensors are.

    UnsupportedError for "cuda" where the kernels cannot run.
    """
    return _CREATORS[name](batch_invariant, device)


def _create_cuda(batch_invariant: bool, device: str) -> AttentionBackend:
    from lamella.runner_v2.attention.cuda import CudaAttention
    from lamella.runner_v2.ops.providers.cuda_kernels import load_kernels

    return CudaAttention(load_kernels(device), torch.device(device).type)


def _create_host(batch_invariant: bool, device: str) -> AttentionBackend:
    from lamella.runner_v2.attention.host import HostAttention

    return HostAttention()


def _create_torch(batch_invariant: bool, device: str) -> AttentionBackend:
    from lamella.runner_v2.attention.paged import PagedAttention

    return PagedAttention(batch_invariant)


_CREATORS: dict[str, Callable[[bool, str], AttentionBackend]] = {
    "cuda": _create_cuda,
    "host": _create_host,
    "torch": _create_torch,
}
