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
from lamella.runner_v2.scoring import prompt_batch
from lamella.runner_v2.stack import Hooks, LayerStack
from lamella.runner_v2.step import KvLayout


class PrefillProfile(NamedTuple):
    """Seconds of one prompt chunk, the logits of its last token included."""

    num_tokens: int
    seconds: float
    embed_s: float
    layers_s: tuple[float, ...]
    finish_s: float


@torch.inference_mode()
def profile_prefill(assembly: Assembly, num_tokens: int, device: str, num_runs: int = 2) -> PrefillProfile:
    """The fastest of some runs over a prompt of so many tokens. Touches no row and no allocated cache.

    ConfigError if a step cannot have so many tokens.
    """
    limits = assembly.backend.limits
    most = min(limits.max_num_tokens, limits.max_model_len)
    if not 0 < num_tokens <= most:
        raise ConfigError(f"a step has 1 to {most} tokens, not {num_tokens}")
    num_blocks = blocks_for(num_tokens, limits.block_size) + 1
    layout = KvLayout((num_blocks,) * len(assembly.groups))
    caches = allocate_caches(assembly.groups, layout, limits, Arena("profile", device))
    batch = prompt_batch(
        spread_ids(num_tokens, assembly.config.vocab_size).to(device), limits.block_size, len(assembly.groups)
    )
    profiles = []
    for _ in range(num_runs):
        plans = tuple(assembly.backend.backend.plan(batch, g) for g in range(len(assembly.groups)))
        profiles.append(_run(assembly, ModelInput(batch.token_ids, batch.positions, plans, caches), batch.logits_idx))
    return min(profiles, key=lambda profile: profile.seconds)


def spread_ids(num_tokens: int, vocab_size: int) -> torch.Tensor:
    """[num_tokens] int32: ids from all over the vocabulary, always the same ones. Equal tokens would all go to the same
    experts, and so read fewer weights than a prompt does."""
    # multiples of the golden ratio's fraction lie evenly in [0, 1), however many there are
    places = torch.arange(num_tokens, dtype=torch.float64) * 0.6180339887498949 % 1.0
    return (places * vocab_size).to(torch.int32).clamp_(max=vocab_size - 1)


def _run(assembly: Assembly, inputs: ModelInput, logits_idx: torch.Tensor) -> PrefillProfile:
    times = [time.perf_counter()]

    def stamp(layer_idx: int, carried: Carried) -> None:
        times.append(time.perf_counter())

    carried = assembly.model.embed(inputs)
    times.append(time.perf_counter())
    carried = LayerStack(assembly.model.layers, Hooks(after=(stamp,))).run(carried, inputs)
    assembly.model.finish(carried, logits_idx)
    times.append(time.perf_counter())
    embed_s, *layers_s, finish_s = (end - start for start, end in pairwise(times))
    return PrefillProfile(len(inputs.token_ids), times[-1] - times[0], embed_s, tuple(layers_s), finish_s)
