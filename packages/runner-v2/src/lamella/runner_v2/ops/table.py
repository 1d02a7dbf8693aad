"""The op table: for each site of a model, the provider that serves it, decided once, with the reasons on record.

    table = OpTable([host, torch])        in order of preference; the last one is the reference and serves what is left
    table.pick(site)                      first provider that supports the site
    table.pick_widest([fused, small])     first site that a provider before the reference supports, else the last site
    table.explain()                       op -> provider, and why each other one was refused

A fused op that only the reference could serve is not worth picking: its body calls the smaller ops, and those may have
faster providers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from lamella.runner_v2.errors import UnsupportedError
from lamella.runner_v2.ops.spec import Picked, Provider, Site

_FUSED_REFERENCE = "the reference of a fused op is its smaller ops"


class Choice(NamedTuple):
    """One line of explain(): plain data."""

    op: str
    site: str
    """What distinguishes the site: formats of its weights and its widths."""
    provider: str | None
    """None: nobody, a smaller op was asked for instead."""
    refused: Mapping[str, str]
    """Provider -> reason, for those asked before."""
    num_sites: int
    """How many places of the model have this site."""


class OpTable:
    """Picks implementations for sites and remembers why."""

    def __init__(self, providers: Sequence[Provider]) -> None:
        assert providers, "an op table needs at least the reference provider"
        self._providers = tuple(providers)
        self._choices: dict[tuple[str, str], Choice] = {}

    @property
    def providers(self) -> tuple[str, ...]:
        """Names, in order of preference."""
        return tuple(p.name for p in self._providers)

    def pick(self, site: Site) -> Picked:
        """The implementation for a site; UnsupportedError with every provider's reason if there is none."""
        picked = self._pick(site, self._providers)
        if picked is None:
            reasons = "; ".join(f"{name}: {why}" for name, why in self._choices[_key(site)].refused.items())
            raise UnsupportedError(f"no provider serves {site.op} ({_key(site)[1]}): {reasons}")
        return picked

    def pick_widest(self, sites: Sequence[Site]) -> Picked:
        """The first of the sites (widest first) that someone better than the reference serves, else the last one."""
        *wide, last = sites
        for site in wide:
            picked = self._pick(site, self._providers[:-1])
            if picked is not None:
                return picked
            self._refuse(site, self._providers[-1].name, _FUSED_REFERENCE)
        return self.pick(last)

    def explain(self) -> list[Choice]:
        """Every distinct site asked for so far, in the order of asking."""
        return list(self._choices.values())

    def _pick(self, site: Site, providers: Sequence[Provider]) -> Picked | None:
        refused: dict[str, str] = {}
        ranges: list[Picked] = []
        for provider in providers:
            reason = provider.supports(site)
            if reason is not None:
                refused[provider.name] = reason
                continue
            picked = provider.pick(site)
            ranges.append(picked)
            if picked.max_num_tokens is None:
                break
            refused[provider.name] = f"serves up to {picked.max_num_tokens} tokens"
        complete = bool(ranges) and ranges[-1].max_num_tokens is None
        name = " | ".join(p.provider for p in ranges) if complete else None
        key = _key(site)
        num_sites = self._choices[key].num_sites + 1 if key in self._choices else 1
        self._choices[key] = Choice(site.op, key[1], name, refused, num_sites)
        if not complete:
            return None
        return ranges[0] if len(ranges) == 1 else _compose(ranges)

    def _refuse(self, site: Site, provider: str, reason: str) -> None:
        choice = self._choices[_key(site)]
        self._choices[_key(site)] = choice._replace(refused={**choice.refused, provider: reason})


def _compose(ranges: Sequence[Picked]) -> Picked:
    """One callable over implementations with growing ranges of num_tokens, the first dimension of run's first argument.

    Each keeps its own packing of the weights, under its provider's name. The handle is run's last argument.
    """
    limits = [p.max_num_tokens for p in ranges]
    runs = [p.run for p in ranges]
    has_weights = ranges[0].pack is not None

    def choose(num_tokens: int) -> int:
        for idx, limit in enumerate(limits):
            if limit is None or num_tokens <= limit:
                return idx
        raise AssertionError("the last range is open")

    def run_weights(x: torch.Tensor, *args: Any) -> Any:
        idx = choose(x.shape[0])
        return runs[idx](x, *args[:-1], args[-1][idx])

    def run_plain(x: torch.Tensor, *args: Any) -> Any:
        return runs[choose(x.shape[0])](x, *args)

    def pack(parts: Any) -> Mapping[str, torch.Tensor]:
        return {f"{p.provider}.{name}": t for p in ranges for name, t in _required(p.pack)(parts).items()}

    def bind(packed: Mapping[str, torch.Tensor], *args: Any) -> Any:
        def own(prefix: str) -> Mapping[str, torch.Tensor]:
            return {name.removeprefix(prefix): t for name, t in packed.items() if name.startswith(prefix)}

        return tuple(_required(p.bind)(own(f"{p.provider}."), *args) for p in ranges)

    return Picked(
        op=ranges[0].op,
        provider=" | ".join(p.provider for p in ranges),
        run=run_weights if has_weights else run_plain,
        pack=pack if has_weights else None,
        bind=bind if has_weights else None,
    )


def _required(call: Callable[..., Any] | None) -> Callable[..., Any]:
    assert call is not None, "implementations of one op agree on having weights"
    return call


def _key(site: Site) -> tuple[str, str]:
    formats = "+".join(dict.fromkeys(f.name for f in site.weights))
    params = " ".join(f"{k}={v}" for k, v in site.params.items() if isinstance(v, (int, float, str, bool)) or v is None)
    return site.op, " ".join(x for x in (formats, params) if x)
