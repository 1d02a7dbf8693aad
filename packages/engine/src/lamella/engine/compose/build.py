"""Builds an engine core: resolve, load, measure, allocate. Here runner, tiers and drafters meet.

options, checkpoint, machine ─► resolve ─► Worker.open (weights) ─► KV memory ─► timed chunks ─► EngineCore
"""

from __future__ import annotations

import importlib
import logging
import random
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

from lamella.engine.adapters.speculator import from_config
from lamella.engine.compose.core_config import CoreConfig
from lamella.engine.compose.describe import describe
from lamella.engine.config.machine import read_machine
from lamella.engine.config.resolve import (
    CPU_MIN_TOKENS,
    Resolved,
    TimedChunk,
    resolve,
    resolve_kv_memory,
    resolve_token_budget,
)
from lamella.engine.config.schema import EngineOptions, format_size
from lamella.engine.core import CoreOptions, EngineCore
from lamella.engine.errors import EngineError, StartError
from lamella.engine.executor.in_process import InProcess
from lamella.engine.scheduler.config import no_patience
from lamella.engine.scheduler.kv_plan import KvDemand, plan_blocks
from lamella.kvtier.config import TiersConfig
from lamella.runner_v2.errors import RunnerError
from lamella.runner_v2.weights.identity import weights_identity
from lamella.runner_v2.weights.open import read_config
from lamella.runner_v2.worker import Worker

MEASURED_TOKENS = 256
"""Prompt length at which the prefill speed is measured: long enough for full tiles, short enough not to be felt."""
FAR_TOKENS, FAR_CONTEXT = 64, 4032
"""A chunk far behind the prompt's start, or as far as sequences go: shows what the context costs. Few tokens do, as
reading the keys dominates."""
GPU_MEASURED_TOKENS, GPU_FAR_TOKENS, GPU_FAR_CONTEXT = 2048, 1024, 28672
"""The same on a GPU, which smaller chunks do not fill: their time would be that of the launches. Larger ones would make
the start longer."""

DRAFT_TABLE_TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Places of the table that says what drafts cost."""
DRAFT_TABLE_S = 0.5
"""What measuring it may take, twice; a slow model's table has fewer places, three at least."""

TIERS = "lamella.engine.compose.tiers"
"""Imported where there are any: it brings all that copies between them."""

log = logging.getLogger("lamella.core")

_num_threads: WeakKeyDictionary[EngineCore, int] = WeakKeyDictionary()
"""Of each core of this process. The pools of torch and of the native kernels belong to the process."""


def build_core(config: CoreConfig, say: Callable[[str], None]) -> EngineCore:
    """A core that is ready to take requests. Raises StartError, in one line, for whatever cannot work."""
    try:
        return _build(config, say)
    except (RunnerError, OSError, MemoryError) as error:
        raise StartError(str(error)) from error
    except EngineError as error:
        raise error if isinstance(error, StartError) else StartError(str(error)) from error


def build_core_from_wire(value: dict[str, Any], say: Callable[[str], None]) -> EngineCore:
    """The same in the core's own process."""
    return build_core(CoreConfig.from_wire(value), say)


def _build(config: CoreConfig, say: Callable[[str], None]) -> EngineCore:
    options = config.options
    started = time.perf_counter()
    model = read_config(config.model_path)
    machine = read_machine(with_gpus=options.device != "cpu")
    resolved = resolve(options, config.model_path, model, machine, progress=config.progress)
    _share_threads(resolved.runner.num_threads)
    speculator = from_config(options.speculative_config) if options.speculative_config else None
    wanted = _wanted_tiers(options)
    below = None if wanted is None else importlib.import_module(TIERS)
    mover: Any = None if below is None else below.LateMover()
    executor = InProcess(Worker(resolved.runner, speculator, mover=mover), depth=resolved.depth, mover=mover)
    try:
        (report,) = executor.open()
        loaded = time.perf_counter()
        say(f"loaded {format_size(report.weight_bytes)} of weights in {loaded - started:.1f} s")
        resolved = resolve_kv_memory(resolved, report)
        measured = not options.max_num_batched_tokens and not resolved.platform.is_gpu
        chunks = _time_chunks(executor, resolved) if measured or wanted is not None else []
        resolved = resolve_token_budget(resolved, *chunks)
        demand = KvDemand(
            resolved.max_model_len,
            resolved.max_num_batched_tokens,
            resolved.max_num_seqs,
            resolved.runner.max_num_drafts,
            report.lookahead,
            executor.depth,
        )
        num_blocks = plan_blocks((report,), resolved.kv_bytes, demand).num_blocks
        (explained,) = executor.call("explain", {})
        identity = f"{weights_identity(config.model_path, with_weights=options.load_format != 'dummy')} {options.dtype}"
        drafting, network = resolved.speculation, resolved.runner.draft
        if network is not None:  # its KV lies in the same blocks
            drafter = weights_identity(network.model_path, with_weights=options.load_format != "dummy")
            identity += f" {network.method} {drafter}"
        tiers = None
        if below is not None:
            tiers = below.build_tiers(wanted, resolved, report, num_blocks, identity, chunks)
            mover.attach(tiers.mover)
        core = EngineCore(
            executor,
            (report,),
            CoreOptions(
                max_model_len=resolved.max_model_len,
                max_num_seqs=resolved.max_num_seqs,
                max_num_batched_tokens=resolved.max_num_batched_tokens,
                num_blocks=num_blocks,
                max_num_drafts=resolved.runner.max_num_drafts,
                draft_costs=_time_drafts(executor, resolved) if drafting is not None and drafting.adaptive else None,
                draft_methods=() if drafting is None else drafting.methods,
                draft_rule="standard" if drafting is None else drafting.rule.name,
                draft_rule_exact=drafting is None or drafting.rule.exact,
                token_cost=resolved.token_cost,
                policy=options.scheduling_policy,  # type: ignore[arg-type]
                prefix_caching=options.enable_prefix_caching,
                model=identity,
                tiers=None if tiers is None else tiers.plan,
                patience=no_patience if tiers is None else tiers.patience,
                holds_restores=resolved.platform.is_gpu,  # copies run beside steps there
                report=describe(
                    resolved, machine, report, num_blocks, explained, speculator, [] if tiers is None else tiers.shown
                ),
            ),
            draw_seed=_seeds(options.seed),
        )
        if tiers is not None:
            tiers.measure_link()
            core.info.report["KV tiers"] = tiers.table()
        if resolved.platform.is_gpu:  # steps are recorded with the KV cache in place
            (recorded,) = executor.call("explain", {})
            core.info.report["device"].update(recorded.get("device", {}))
    except BaseException:
        executor.close()
        raise
    if resolved.runner.num_threads is not None:
        _num_threads[core] = resolved.runner.num_threads
    info = core.info
    say(
        f"KV cache of {format_size(resolved.kv_bytes)}: {info.kv_tokens} tokens; context {info.max_model_len}; "
        f"steps of up to {info.max_num_batched_tokens} tokens, {info.max_num_seqs} sequences; "
        f"ready in {time.perf_counter() - started:.1f} s"
    )
    return core


def _wanted_tiers(options: EngineOptions) -> TiersConfig | None:
    """Raises StartError where tiers have nothing to hold."""
    if not options.kv_tier:
        return None
    wanted: TiersConfig | None = importlib.import_module(TIERS).parse(options.kv_tier)
    if wanted is not None and not options.enable_prefix_caching:
        raise StartError("--kv-tier keeps cached prefixes, and --no-enable-prefix-caching has none: leave one out")
    return wanted


def _share_threads(num_threads: int | None) -> None:
    """Say so if loading changes the thread count of a core that is in use."""
    for core, before in _num_threads.items():
        if not core.closed and num_threads is not None and before != num_threads:
            _warn_of_shared_threads(before, num_threads)


@cache  # the same figures need no second word
def _warn_of_shared_threads(before: int, now: int) -> None:
    log.warning(
        "this LLM computes with %d threads, and so does from now on the one of this process that was made for %d: give "
        "both the same `threads`, or use AsyncLLM, whose engine is a process of its own",
        now,
        before,
    )


def _seeds(seed: int | None) -> Callable[[], int] | None:
    """Where requests without a seed get theirs: one after the other from the engine's own, if it has one."""
    return None if seed is None else partial(random.Random(seed).getrandbits, 64)


def _time_drafts(executor: InProcess, resolved: Resolved) -> list[tuple[int, float]]:
    """Seconds of steps by their tokens, as verification has them: with logits for each. Smallest first, up to the most
    that a step can have or as far as DRAFT_TABLE_S goes."""
    runner = resolved.runner
    most = min(
        runner.max_num_rows * (1 + runner.max_num_drafts), resolved.max_num_batched_tokens, resolved.max_model_len
    )
    sizes = sorted({min(size, most) for size in DRAFT_TABLE_TOKENS})
    fastest: dict[int, float] = {}
    for _ in range(2):  # at two times, as other work on the machine comes and goes
        started = time.perf_counter()
        for num_tokens in sizes:
            if num_tokens > sizes[:3][-1] and time.perf_counter() - started > DRAFT_TABLE_S:
                sizes = sizes[: sizes.index(num_tokens)]
                break
            arguments = {"num_tokens": num_tokens, "num_logits": num_tokens}
            (seconds,) = executor.call("measure_prefill", arguments)
            fastest[num_tokens] = min(float(seconds), fastest.get(num_tokens, float(seconds)))
    return sorted(fastest.items())


def _time_chunks(executor: InProcess, resolved: Resolved) -> list[TimedChunk]:
    """Chunks of a prompt for resolve_token_budget and for what computing again costs: one if no sequence is longer than
    the shortest step."""
    longest = resolved.max_model_len
    most = min(longest, resolved.runner.max_num_tokens)
    near, far, context = MEASURED_TOKENS, FAR_TOKENS, FAR_CONTEXT
    if resolved.platform.is_gpu:
        near, far, context = GPU_MEASURED_TOKENS, GPU_FAR_TOKENS, GPU_FAR_CONTEXT
    places = [(min(near, most), 0)]
    if longest > max(CPU_MIN_TOKENS, far):
        places.append((min(far, most), min(context, longest - far)))
    chunks = []
    for num_tokens, context_len in places:
        (seconds,) = executor.call("measure_prefill", {"num_tokens": num_tokens, "context_len": context_len})
        chunks.append(TimedChunk(num_tokens, float(seconds), context_len))
    return chunks
