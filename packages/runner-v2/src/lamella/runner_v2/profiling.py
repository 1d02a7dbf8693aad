"""How fast this rank is: one prompt chunk, timed with caches of its own."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import NamedTuple

import torch

from lamella.runner_v2.assembly import Assembly
from lamella.runner_v2.errors import ConfigError
from lamella.runner_v2.inputs import ModelInput
from lamella.runner_v2.kv_cache import allocate_caches, blocks_for
from lamella.runner_v2.layers.decoder import Carried
from lamella.runner_v2.memory import Arena
from lamella.runner_v2.scoring import chunk_batch
from lamella.runner_v2.stack import Hooks, LayerStack
from lamella.runner_v2.step import KvLayout

_CONTEXT_TOKENS = 1024
"""Memory that a context takes while it is measured, however long it is."""


class PrefillProfile(NamedTuple):
    """Seconds of one prompt chunk, the logits of its last tokens included."""

    num_tokens: int
    seconds: float
    embed_s: float
    layers_s: tuple[float, ...]
    finish_s: float


@torch.inference_mode()
def profile_prefill(
    assembly: Assembly, num_tokens: int, device: str, *, context_len: int = 0, num_logits: int = 1, num_runs: int = 2
) -> PrefillProfile:
    """The fastest of some runs over so many tokens of a prompt, behind context_len tokens of it, with the logits of the
    last num_logits. Touches no row and no allocated cache. The context's table names a few blocks over and over: what
    they hold does not change the time.

    ConfigError if a step cannot have so many tokens, or a sequence so many, or a chunk so many logits.
    """
    limits = assembly.backend.limits
    most = min(limits.max_num_tokens, limits.max_model_len)
    if not 0 < num_tokens <= most:
        raise ConfigError(f"a step has 1 to {most} tokens, not {num_tokens}")
    if not 0 <= context_len <= limits.max_model_len - num_tokens:
        raise ConfigError(
            f"a chunk of {num_tokens} tokens has 0 to {limits.max_model_len - num_tokens} before it, not {context_len}"
        )
    if not 0 < num_logits <= num_tokens:
        raise ConfigError(f"a chunk of {num_tokens} tokens has 1 to {num_tokens} logits, not {num_logits}")
    num_groups, block_size = len(assembly.groups), limits.block_size
    num_before = context_len // block_size
    num_own = blocks_for(context_len + num_tokens, block_size) - num_before
    repeated = min(num_before, max(1, _CONTEXT_TOKENS // block_size))
    layout = KvLayout((1 + repeated + num_own,) * num_groups)
    caches = allocate_caches(assembly.groups, layout, limits, Arena("profile", device), assembly.draft_rows)
    table = torch.cat([torch.arange(num_before) % max(1, repeated) + 1, torch.arange(num_own) + 1 + repeated])
    ids = spread_ids(num_tokens, assembly.config.vocab_size).to(device)
    batch = chunk_batch(ids, context_len, table.int().to(device), block_size, num_groups)
    logits_idx = torch.arange(num_tokens - num_logits, num_tokens, device=batch.logits_idx.device)
    profiles = []
    for _ in range(num_runs):
        plans = tuple(assembly.backend.backend.plan(batch, g) for g in range(num_groups))
        profiles.append(_run(assembly, ModelInput(batch.token_ids, batch.positions, plans, caches), logits_idx))
    return min(profiles, key=lambda profile: profile.seconds)


def spread_ids(num_tokens: int, vocab_size: int) -> torch.Tensor:
    """[num_tokens] int32: ids from all over the vocabulary, always the same ones. Equal tokens would all go to the same
    experts, and so read fewer weights than a prompt does."""
    # multiples of the golden ratio's fraction lie evenly in [0, 1), however many there are
    places = torch.arange(num_tokens, dtype=torch.float64) * 0.6180339887498949 % 1.0
    return (places * vocab_size).to(torch.int32).clamp_(max=vocab_size - 1)


def _run(assembly: Assembly, inputs: ModelInput, logits_idx: torch.Tensor) -> PrefillProfile:
    device = inputs.token_ids.device
    times = [_now(device)]

    def stamp(layer_idx: int, carried: Carried) -> None:
        times.append(_now(device))

    carried = assembly.model.embed(inputs)
    times.append(_now(device))
    carried = LayerStack(assembly.model.layers, Hooks(after=(stamp,))).run(carried, inputs)
    assembly.model.finish(carried, logits_idx)
    times.append(_now(device))
    embed_s, *layers_s, finish_s = (end - start for start, end in pairwise(times))
    return PrefillProfile(len(inputs.token_ids), times[-1] - times[0], embed_s, tuple(layers_s), finish_s)


def _now(device: torch.device) -> float:
    """The time when the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
