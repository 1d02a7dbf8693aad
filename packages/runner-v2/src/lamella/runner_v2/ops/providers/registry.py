"""The providers by name, fastest first. Each is imported when it is asked for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import torch

from lamella.runner_v2.config import RunnerConfig
from lamella.runner_v2.errors import ConfigError, UnsupportedError
from lamella.runner_v2.ops.spec import Provider

_log = logging.getLogger(__name__)

_WEIGHT_DTYPES = {
    "auto": torch.float32,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


_KERNEL_DTYPES = ("auto", "bfloat16", "float16")
"""What the CUDA kernels compute in."""


def create_providers(config: RunnerConfig, dtype: torch.dtype | None = None) -> tuple[Provider, ...]:
    """The providers of a runner, in order of preference, the reference last.

    dtype: of the activations, where the model has been asked already. ConfigError for an unknown name or dtype, or
    where a dense dtype is asked of a provider that does not compute in it; UnsupportedError for a provider asked for by
    name that this build or device lacks.
    """
    if config.dtype not in _WEIGHT_DTYPES:
        raise ConfigError(f"dtype {config.dtype!r} is unknown; one of {', '.join(_WEIGHT_DTYPES)}")
    names = config.providers
    if names is None:
        names = _automatic(config)
    unknown = [name for name in names if name not in _CREATORS]
    if unknown:
        raise ConfigError(f"providers {unknown} are unknown; there are {', '.join(_CREATORS)}")
    dense = ("cuda", "torch") if config.dtype in _KERNEL_DTYPES else ("torch",)
    if config.dtype != "auto" and not set(names) <= set(dense):
        raise ConfigError(f"dtype {config.dtype} means the reference ops: providers must be ('torch',), not {names}")
    if config.batch_invariant and "cuda" in names:
        raise ConfigError("batch_invariant needs the reference ops: the CUDA kernels cut a row by what else there is")
    providers = []
    for name in dict.fromkeys((*names, "torch")):
        provider = _CREATORS[name](config, dtype)
        if provider is not None:
            providers.append(provider)
        elif config.providers is not None:
            raise UnsupportedError(f"provider {name!r} was asked for, but this build has no native code for it")
    return tuple(providers)


def _automatic(config: RunnerConfig) -> tuple[str, ...]:
    """What is tried where nothing was asked for."""
    if torch.device(config.device).type == "cuda":
        return ("torch",) if config.dtype == "float32" or config.batch_invariant else ("cuda", "torch")
    return ("host", "torch") if config.dtype == "auto" else ("torch",)


def _create_cuda(config: RunnerConfig, dtype: torch.dtype | None) -> Provider | None:
    from lamella.runner_v2.ops.providers.cuda import CudaProvider
    from lamella.runner_v2.ops.providers.cuda_kernels import load_kernels

    try:
        kernels = load_kernels(config.device)
    except UnsupportedError as error:
        if config.providers is not None:
            raise UnsupportedError(f"provider 'cuda' was asked for: {error}") from error
        _warn_once(f"{error}: the torch reference ops serve, which is slower")
        return None
    return CudaProvider(kernels, config.max_num_tokens, torch.device(config.device).type)


def _create_host(config: RunnerConfig, dtype: torch.dtype | None) -> Provider | None:
    if config.device != "cpu":
        return None
    try:
        from lamella.runner_v2.ops.providers.host import HostProvider
    except ImportError as error:
        _warn_once(f"no native module ({error}): the torch reference ops serve, which is slower")
        return None
    return HostProvider(config.num_threads)


def _create_torch(config: RunnerConfig, dtype: torch.dtype | None) -> Provider:
    from lamella.runner_v2.ops.providers.torch import TorchProvider

    weight_dtype = _WEIGHT_DTYPES[config.dtype]
    if config.dtype == "auto" and torch.device(config.device).type == "cuda":
        # products in the type of the activations: a device is slow in float32, and weights would take twice the memory
        weight_dtype = torch.bfloat16 if dtype is None else dtype
    return TorchProvider(weight_dtype, config.batch_invariant)


@cache
def _warn_once(message: str) -> None:
    _log.warning(message)


_CREATORS: dict[str, Callable[[RunnerConfig, torch.dtype | None], Provider | None]] = {
    "host": _create_host,
    "torch": _create_torch,
    "cuda": _create_cuda,
}
