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


def create_providers(config: RunnerConfig) -> tuple[Provider, ...]:
    """The providers of a runner, in order of preference, the reference last.

    ConfigError for an unknown name or dtype, or where a dense dtype is asked of more than the reference;
    UnsupportedError for a provider asked for by name that this build lacks.
    """
    if config.dtype not in _WEIGHT_DTYPES:
        raise ConfigError(f"dtype {config.dtype!r} is unknown; one of {', '.join(_WEIGHT_DTYPES)}")
    names = config.providers
    if names is None:
        names = tuple(_CREATORS) if config.dtype == "auto" else ("torch",)
    unknown = [name for name in names if name not in _CREATORS]
    if unknown:
        raise ConfigError(f"providers {unknown} are unknown; there are {', '.join(_CREATORS)}")
    if config.dtype != "auto" and names != ("torch",):
        raise ConfigError(f"dtype {config.dtype} means the reference ops: providers must be ('torch',), not {names}")
    providers = []
    for name in dict.fromkeys((*names, "torch")):
        provider = _CREATORS[name](config)
        if provider is not None:
            providers.append(provider)
        elif config.providers is not None:
            raise UnsupportedError(f"provider {name!r} was asked for, but this build has no native code for it")
    return tuple(providers)


def _create_host(config: RunnerConfig) -> Provider | None:
    if config.device != "cpu":
        return None
    try:
        from lamella.runner_v2.ops.providers.host import HostProvider
    except ImportError as error:
        _warn_once(f"no native module ({error}): the torch reference ops serve, which is slower")
        return None
    return HostProvider(config.num_threads)


def _create_torch(config: RunnerConfig) -> Provider:
    from lamella.runner_v2.ops.providers.torch import TorchProvider

    return TorchProvider(_WEIGHT_DTYPES[config.dtype], config.batch_invariant)


@cache
def _warn_once(message: str) -> None:
    _log.warning(message)


_CREATORS: dict[str, Callable[[RunnerConfig], Provider | None]] = {"host": _create_host, "torch": _create_torch}
