"""From user options, model and machine to one frozen configuration, with the reason of every choice.

Pure: the same arguments give the same result. Three moments, since some facts only exist later:

    resolve(options, model, machine)            before loading
    resolve_kv_memory(resolved, report)         weights are in memory, their bytes are known
    resolve_token_budget(resolved, *chunks)     chunks of a prompt have been timed
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec

from lamella.engine.config.machine import Machine
from lamella.engine.config.platform import GPU_UTILIZATION, Platform, choose_platform, graph_rows
from lamella.engine.config.schema import EngineOptions, default_of, format_size
from lamella.engine.errors import RequestError, StartError
from lamella.engine.request import SamplingParams
from lamella.engine.scheduler.cost import FLAT, TokenCost
from lamella.engine.scheduler.kv_plan import KvDemand, max_fitting_len, sequence_bytes, useful_bytes
from lamella.runner_v2.config import DraftConfig, ModelConfig, RunnerConfig
from lamella.runner_v2.step import RankReport
from lamella.specdec import ConfigError, Speculation, parse_speculation

CPU_STEP_TARGET_S = 0.5
CPU_MIN_TOKENS = 512
CPU_MAX_TOKENS = 4096
MAX_THREADS = 64
"""Allowed on any machine."""
KV_SHARE = 0.25
"""Of the memory that is still available once the weights are loaded."""


class Decision(NamedTuple):
    """One line of `lamella inspect`."""

    name: str
    value: str
    reason: str


class TimedChunk(NamedTuple):
    """How long the tokens [context_len, context_len + num_tokens) of a prompt took."""

    num_tokens: int
    seconds: float
    context_len: int = 0

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / self.num_tokens

    @property
    def mean_position(self) -> float:
        return self.context_len + (self.num_tokens - 1) / 2


@dataclass(frozen=True, slots=True)
class Resolved:
    """The configuration that everything is built from."""

    options: EngineOptions
    model: ModelConfig
    runner: RunnerConfig
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_bytes: int
    sampling_defaults: Mapping[str, Any]
    decisions: tuple[Decision, ...]
    platform: Platform
    depth: int = 1
    """Steps in flight."""
    token_cost: TokenCost = FLAT
    speculation: Speculation | None = None
    """Drafters, and by which rule what they propose is kept."""

    def deciding(self, name: str, value: str, reason: str, **changes: Any) -> Resolved:
        """A copy with one more decision taken."""
        return replace(self, decisions=(*self.decisions, Decision(name, value, reason)), **changes)


SAMPLING_DEFAULTS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""What a generation_config may say, and the field of SamplingParams that it is the default of."""


def resolve(
    options: EngineOptions, model_path: str, model: ModelConfig, machine: Machine, *, progress: bool = False
) -> Resolved:
    """Decide all that can be decided before loading. Raises StartError for options that cannot work."""
    decisions: list[Decision] = []

    def decide(name: str, value: Any, reason: str) -> Any:
        decisions.append(Decision(name, str(value), reason))
        return value

    platform = choose_platform(options, machine)
    decide("device", platform.device, platform.reason)
    threads = options.threads or machine.cores
    if threads > max(MAX_THREADS, 2 * machine.logical_cores):
        raise StartError(
            f"--threads is {threads}, but this machine has {machine.logical_cores} cores; more threads than cores only "
            "wait for each other"
        )
    decide("threads", threads, "given" if options.threads else f"usable cores of this machine ({machine.cores})")
    providers = _decide_dtype(options, model, platform, decide)
    if options.providers:
        given = tuple(name.strip() for name in options.providers.split(",") if name.strip())
        if not given:
            raise StartError(f"--providers is {options.providers!r} and names none; there are host, cuda and torch")
        decide("providers", ", ".join(given), "given")
        providers = given
    elif providers:
        decide("providers", ", ".join(providers), "follows from dtype")
    elif platform.is_gpu and options.batch_invariant:
        providers = ("torch",)
        decide("providers", "torch", "follows from batch_invariant: kernels of a GPU cut a row by what else there is")
    else:
        decide("providers", platform.providers, "native kernels first, the reference where they do not serve")
    max_model_len = options.max_model_len or model.max_position
    if max_model_len > model.max_position:
        raise StartError(
            f"--max-model-len is {max_model_len}, but the model was made for {model.max_position} positions; beyond "
            "them its answers are noise"
        )
    decide(
        "max_model_len",
        max_model_len,
        "given" if options.max_model_len else "positions that the model was made for",
    )
    tokens = options.max_num_batched_tokens
    max_num_seqs = options.max_num_seqs or platform.max_num_seqs
    why_seqs = "given" if options.max_num_seqs else "the default"
    if tokens and tokens < max_num_seqs:  # both given were refused before
        max_num_seqs, why_seqs = tokens, "as many as --max-num-batched-tokens has tokens for"
    runner_tokens = tokens or max(platform.max_num_batched_tokens or CPU_MAX_TOKENS, max_num_seqs)
    drafting = _drafting(options.speculative_config)
    network = None if drafting is None else drafting.network
    defaults = _sampling_defaults(options, model)
    decide(
        "sampling defaults",
        ", ".join(f"{k}={v}" for k, v in defaults.items()) or "none",
        "--generation-config none" if options.generation_config == "none" else "generation_config of the model",
    )
    runner = RunnerConfig(
        model_path=model_path,
        device=platform.device,
        dtype=options.dtype,
        kv_dtype=options.kv_cache_dtype,
        providers=providers,
        num_threads=threads,
        block_size=options.block_size or platform.block_size,
        max_num_rows=max_num_seqs,
        max_num_tokens=runner_tokens,
        max_model_len=max_model_len,
        max_num_drafts=0 if drafting is None else drafting.num_speculative_tokens,
        draft=None if network is None else DraftConfig(network.method, network.model),
        dummy_weights=options.load_format == "dummy",
        progress=progress,
        batch_invariant=options.batch_invariant,
        graph_rows=graph_rows(options, max_num_seqs) if platform.is_gpu else (),
    )
    decide("max_num_seqs", max_num_seqs, why_seqs)
    decide("block_size", runner.block_size, "given" if options.block_size else "the default on this device")
    for name in ("enable_prefix_caching", "scheduling_policy"):
        value = getattr(options, name)
        decide(name, value, "the default" if value == default_of(name) else "given")
    decide(
        "batch_invariant",
        options.batch_invariant,
        "given"
        if options.batch_invariant
        else "the default: the last bits of what reference ops and kernels of a GPU compute depend on the batch, on "
        "chunks and on cached prefixes; those of a CPU's native kernels never do",
    )
    if drafting is not None and options.speculative_config is not None:
        decide("speculation", ", else ".join(drafting.methods), "given")
        if network is not None:
            decide("drafting network", network.model, "given")
        rule = drafting.rule
        if rule.exact:
            decide("rejection_sample_method", rule.name, "answers are those without speculation")
        else:
            decide(
                "rejection_sample_method",
                rule.name,
                "given: drafts stand by given rates, and the output is garbage on purpose"
                if rule.name == "synthetic"
                else "given: drafts stand that the model did not choose, and answers are not those without speculation",
            )
        why = "given" if "enable_adaptive_verification" in options.speculative_config else "the default"
        decide("drafts that are verified", "those that pay" if drafting.adaptive else "all", why)
    depth = _decide_device_steps(options, platform, runner, decide)
    return Resolved(
        options=options,
        model=model,
        runner=runner,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=tokens or 0,
        kv_bytes=options.kv_cache_memory or 0,
        sampling_defaults=defaults,
        decisions=tuple(decisions),
        platform=platform,
        depth=depth,
        speculation=drafting,
    )


def resolve_kv_memory(resolved: Resolved, report: RankReport) -> Resolved:
    """Decide the bytes of the KV cache, and shorten max_model_len to what they hold where the user left it open.

    report: the rank's, once its weights are loaded. Raises StartError with both figures if the cache cannot hold one
    sequence of the length that the user asked for.
    """
    options, free_bytes = resolved.options, report.free_bytes
    demand = KvDemand(
        resolved.max_model_len,
        resolved.runner.max_num_tokens,
        resolved.max_num_seqs,
        resolved.runner.max_num_drafts,
        report.lookahead,
        resolved.depth,
    )
    if free_bytes <= 0:
        where = "take a GPU with more memory" if resolved.platform.is_gpu else "give the machine more memory"
        raise StartError(
            f"no memory is left for the KV cache beside the weights ({format_size(report.weight_bytes)}) and a step of "
            f"{resolved.runner.max_num_tokens} tokens; lower --max-num-batched-tokens, or {where}"
        )
    share, why_share = _kv_share(resolved, report)
    useful = useful_bytes(report.groups, demand)
    if options.kv_cache_memory:
        kv_bytes, reason = options.kv_cache_memory, "given"
        if kv_bytes > free_bytes:
            raise StartError(
                f"--kv-cache-memory is {format_size(kv_bytes)}, but only {format_size(free_bytes)} of memory are "
                "available once the weights are loaded"
            )
    elif share < useful:
        kv_bytes, reason = share, why_share
    else:
        kv_bytes = useful
        reason = f"all that {resolved.max_num_seqs} sequences of {resolved.max_model_len} tokens can use"
    resolved = resolved.deciding("KV cache", format_size(kv_bytes), reason, kv_bytes=kv_bytes)
    needed = sequence_bytes(report.groups, resolved.max_model_len, demand)
    if kv_bytes >= needed:
        return resolved
    longest = max_fitting_len(report.groups, kv_bytes, demand)
    if options.max_model_len or longest < 1:
        raise StartError(
            f"the KV cache of {format_size(kv_bytes)} does not hold one sequence of {resolved.max_model_len} tokens "
            f"({format_size(needed)}); "
            + (f"the longest that fits is {longest}: lower --max-model-len or" if longest else "not one token fits:")
            + " raise --kv-cache-memory"
        )
    return resolved.deciding(
        "max_model_len",
        str(longest),
        f"lowered from {resolved.max_model_len}: the longest sequence that the KV cache holds",
        max_model_len=longest,
        runner=replace(resolved.runner, max_model_len=longest),
    )


def _kv_share(resolved: Resolved, report: RankReport) -> tuple[int, str]:
    """What the KV cache may take of the memory that is left, and why so much."""
    options, gpu, free_bytes = resolved.options, resolved.platform.gpu, report.free_bytes
    if gpu is None:
        return int(free_bytes * KV_SHARE), f"{KV_SHARE:.0%} of the {format_size(free_bytes)} that are available"
    utilization = options.gpu_memory_utilization or GPU_UTILIZATION
    in_use = max(0, gpu.total_bytes - free_bytes)
    share = int(gpu.total_bytes * utilization) - in_use
    if share <= 0 and not options.kv_cache_memory:
        raise StartError(
            f"--gpu-memory-utilization {utilization:g} of {format_size(gpu.total_bytes)} is "
            f"{format_size(gpu.total_bytes * utilization)}, and {format_size(in_use)} are in use without a KV cache "
            f"(weights: {format_size(report.weight_bytes)}; steps of {resolved.runner.max_num_tokens} tokens, graphs, "
            "other processes); raise it, or lower --max-num-batched-tokens"
        )
    reason = (
        f"{utilization:.0%} of the GPU's {format_size(gpu.total_bytes)}, less {format_size(in_use)} in use by weights, "
        "the largest step and others"
    )
    return share, reason


def resolve_token_budget(resolved: Resolved, *chunks: TimedChunk) -> Resolved:
    """Decide max_num_batched_tokens, and how much more a token costs in a long context, from timed chunks of a prompt.

    chunks: one from the prompt's start, then, if sequences can be long, one far behind it; not looked at where the user
    gave max_num_batched_tokens, which then counts tokens wherever they stand.
    """
    if resolved.options.max_num_batched_tokens:  # chunks may have been timed for another purpose
        return resolved.deciding(
            "max_num_batched_tokens",
            str(resolved.options.max_num_batched_tokens),
            "given: steps of so many tokens, however long they take",
        )
    if resolved.platform.is_gpu:
        tokens = resolved.runner.max_num_tokens
        return resolved.deciding(
            "max_num_batched_tokens",
            str(tokens),
            "the default on a GPU: enough to keep it busy, and decoding sequences wait for no longer a step",
            max_num_batched_tokens=tokens,
        )
    base_s, cost = token_cost(*chunks)
    fitting = (cost.fitting(0, CPU_STEP_TARGET_S / base_s) - 1) // 64 * 64
    budget = max(CPU_MIN_TOKENS, resolved.max_num_seqs, min(fitting, CPU_MAX_TOKENS))
    limit = cost.of(0, budget)
    resolved = resolved.deciding(
        "max_num_batched_tokens",
        str(budget),
        f"measured {1 / chunks[0].seconds_per_token:.0f} prompt tokens/s: a step of {budget} takes "
        f"{limit * base_s:.2f} s (target {CPU_STEP_TARGET_S} s, at least {CPU_MIN_TOKENS} tokens)",
        max_num_batched_tokens=budget,
        token_cost=cost,
    )
    last = resolved.max_model_len - 1
    least = max(cost.least_tokens, cost.fitting(last, limit))
    return resolved.deciding(
        "token cost",
        f"{cost.of(last, 1):.1f} x at {last}" if cost.slope else "the same everywhere",
        f"measured: a token behind {last} others takes so much longer than the first; chunks of a long prompt shrink "
        f"from {budget} tokens to {min(budget, least)} at its end, so that no step takes longer"
        if cost.slope
        else f"contexts of up to {last + 1} tokens make no difference that could be measured",
    )


def token_cost(first: TimedChunk, far: TimedChunk | None = None) -> tuple[float, TokenCost]:
    """Seconds of a token with nothing before it, and the line through both points."""
    if far is None:
        return first.seconds_per_token, FLAT
    rise = (far.seconds_per_token - first.seconds_per_token) / (far.mean_position - first.mean_position)
    # other work on the machine may have made the first chunk slower than the far one
    rise = max(0.0, rise)
    base_s = max(first.seconds_per_token - rise * first.mean_position, first.seconds_per_token / 2)
    return base_s, TokenCost(rise / base_s)


def _decide_dtype(
    options: EngineOptions, model: ModelConfig, platform: Platform, decide: Callable[[str, Any, str], Any]
) -> tuple[str, ...] | None:
    """The providers that --dtype asks for; None: those of the device."""
    if options.dtype != "auto" and not (platform.is_gpu and options.dtype != "float32"):
        decide("dtype", options.dtype, "given: all weights are turned into it, the reference ops serve")
        return ("torch",)
    if options.dtype != "auto":
        decide("dtype", options.dtype, "given: weights and activations are turned into it")
    elif not platform.is_gpu:
        decide("dtype", "auto", "weights stay in the checkpoint's format; activations are float32 on a CPU")
    elif model.dtype in ("bfloat16", "float16"):
        decide("dtype", "auto", f"weights and activations are {model.dtype}, as in the checkpoint")
    else:
        decide(
            "dtype", "auto", f"weights and activations are bfloat16; the checkpoint's {model.dtype} is turned into it"
        )
    return None


def _decide_device_steps(
    options: EngineOptions, platform: Platform, runner: RunnerConfig, decide: Callable[[str, Any, str], Any]
) -> int:
    """How steps run on a device: recorded or not, and how many at once. Returns the steps in flight."""
    if not platform.is_gpu:
        return 1
    if runner.graph_rows:
        decide(
            "CUDA graphs",
            f"{len(runner.graph_rows)} of up to {runner.graph_rows[-1]} sequences",
            "given" if options.cuda_graph_sizes else "recorded at start: a replayed step costs one launch",
        )
    else:
        decide("CUDA graphs", "none", "given: --enforce-eager")
    if options.speculative_config:
        decide("steps in flight", 1, "the drafter needs the ids of a step before the next one can be planned")
        return 1
    decide("steps in flight", 2, "the next step is planned and launched while one runs")
    return 2


def _drafting(config: Mapping[str, Any] | None) -> Speculation | None:
    if config is None:
        return None
    try:
        return parse_speculation(config)
    except ConfigError as error:
        raise StartError(str(error)) from None


def _sampling_defaults(options: EngineOptions, model: ModelConfig) -> dict[str, Any]:
    """What the model's generation_config gives, checked: a request that says nothing must not fail."""
    found = _found_defaults(options, model)
    try:
        msgspec.convert(found, SamplingParams).validate()
        if found.get("max_tokens") == 0:
            raise RequestError("max_new_tokens is 0, and requests want an answer", "max_tokens")
    except (msgspec.ValidationError, RequestError) as error:
        raise StartError(
            f"the model's generation_config cannot be used ({error}); mend it, or start with --generation-config none"
        ) from None
    return found


def _found_defaults(options: EngineOptions, model: ModelConfig) -> dict[str, Any]:
    if options.generation_config == "none":
        return {}
    said = model.generation
    found = {ours: said[name] for name, ours in SAMPLING_DEFAULTS.items() if said.get(name) is not None}
    if said.get("do_sample") is False:
        found = {name: value for name, value in found.items() if name in ("repetition_penalty", "max_tokens")}
        found["temperature"] = 0.0
    return found
