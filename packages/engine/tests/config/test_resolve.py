"""Every choice is made once, for a stated reason, and impossible ones are refused with figures."""

from __future__ import annotations

import dataclasses

import pytest

from lamella.engine.config.machine import Machine
from lamella.engine.config.resolve import (
    CPU_MIN_TOKENS,
    CPU_STEP_TARGET_S,
    Resolved,
    TimedChunk,
    resolve,
    resolve_kv_memory,
    resolve_token_budget,
)
from lamella.engine.config.schema import engine_options
from lamella.engine.errors import StartError
from lamella.runner_v2.config import LayerConfig, ModelConfig, RopeConfig
from lamella.runner_v2.step import KvGroup, RankReport

MACHINE = Machine(cores=2, available_bytes=8 << 30, total_bytes=16 << 30, name="test")
MODEL = ModelConfig(
    family="llama",
    vocab_size=256,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=128,
    layers=(LayerConfig(),) * 2,
    ropes=(RopeConfig(),),
    max_position=2048,
    norm_eps=1e-5,
    attention_scale=0.25,
    generation={"temperature": 0.6, "top_p": 0.9, "max_new_tokens": 99},
)
FULL = KvGroup(name="full", kind="full", block_size=16, bytes_per_block=1 << 20, layers=(0,))
SLIDING = KvGroup(name="sliding", kind="sliding", block_size=16, bytes_per_block=1 << 20, layers=(1,), window=64)


def resolved(**options: object) -> Resolved:
    return resolve(engine_options(model="m", **options), "/m", MODEL, MACHINE)


def reason(result: Resolved, name: str) -> str:
    return next(d.reason for d in reversed(result.decisions) if d.name == name)


def test_defaults_have_reasons() -> None:
    result = resolved()
    assert (result.max_model_len, result.runner.num_threads, result.runner.dtype) == (2048, 2, "auto")
    assert all(decision.reason for decision in result.decisions)
    assert result.sampling_defaults == {"temperature": 0.6, "top_p": 0.9, "max_tokens": 99}
    assert resolved(generation_config="none").sampling_defaults == {}


def test_given_options_win() -> None:
    result = resolved(threads=1, max_model_len=128, dtype="float32", providers="torch")
    assert (result.runner.num_threads, result.max_model_len) == (1, 128)
    assert result.runner.providers == ("torch",)
    assert reason(result, "threads") == "given"
    assert reason(resolved(batch_invariant=True), "batch_invariant") == "given"
    assert "depend on the batch" in reason(resolved(), "batch_invariant")


def test_dtype_chooses_the_reference() -> None:
    assert resolved(dtype="float32").runner.providers == ("torch",)
    assert resolved().runner.providers is None


def test_longer_than_the_model_is_refused() -> None:
    with pytest.raises(StartError, match="2049.*2048"):
        resolved(max_model_len=2049)


def test_far_more_threads_than_cores_are_refused() -> None:
    assert resolved(threads=64).runner.num_threads == 64
    with pytest.raises(StartError, match="--threads is 65, but this machine has 1 cores"):
        resolved(threads=65)
    wide = dataclasses.replace(MACHINE, logical_cores=128)
    assert resolve(engine_options(model="m", threads=256), "/m", MODEL, wide).runner.num_threads == 256


def test_providers_must_name_one() -> None:
    with pytest.raises(StartError, match="--providers is ' , ' and names none; there are host, cuda and torch"):
        resolved(providers=" , ")


@pytest.mark.parametrize(
    "generation",
    [
        *({"temperature": value} for value in ("hot", -1, float("nan"), [1], True)),
        *({"top_k": value} for value in (1.5, "x", -7)),
        *({"top_p": value} for value in (0, 5)),
        {"repetition_penalty": 0},
        {"do_sample": False, "repetition_penalty": "x"},
        *({"max_new_tokens": value} for value in (0, -1, "x", 2.5)),
    ],
)
def test_senseless_sampling_defaults_stop_the_start(generation: dict[str, object]) -> None:
    model = dataclasses.replace(MODEL, generation=generation)
    with pytest.raises(StartError, match="generation_config cannot be used .*--generation-config none"):
        resolve(engine_options(model="m"), "/m", model, MACHINE)
    assert resolve(engine_options(model="m", generation_config="none"), "/m", model, MACHINE).sampling_defaults == {}


def report(*groups: KvGroup, free_bytes: int) -> RankReport:
    return RankReport(rank=0, groups=groups, free_bytes=free_bytes, weight_bytes=0, vocab_size=256, device="cpu")


def test_kv_memory_is_a_share_but_never_more_than_useful() -> None:
    small = resolve_kv_memory(resolved(), report(FULL, free_bytes=1 << 30))
    assert small.kv_bytes == int((1 << 30) * 0.25)
    assert "25%" in reason(small, "KV cache")
    large = resolve_kv_memory(resolved(max_num_seqs=2), report(FULL, free_bytes=1 << 40))
    assert large.kv_bytes == (2 * 128 + 1) * (1 << 20)  # and the null block
    assert "2 sequences" in reason(large, "KV cache")


def test_no_memory_at_all_is_told_with_what_takes_it() -> None:
    with pytest.raises(StartError, match="beside the weights .* and a step of 9000 tokens; lower --max-num-batched-"):
        resolve_kv_memory(resolved(max_num_batched_tokens=9000), report(FULL, free_bytes=0))
    with pytest.raises(StartError, match="KV cache of 1.0 KiB .*; not one token fits: raise --kv-cache-memory"):
        resolve_kv_memory(resolved(kv_cache_memory="1KiB"), report(FULL, free_bytes=1 << 30))


def test_kv_memory_beyond_what_is_there_is_refused() -> None:
    with pytest.raises(StartError, match="only 1.0 GiB"):
        resolve_kv_memory(resolved(kv_cache_memory="2GiB"), report(FULL, free_bytes=1 << 30))


def test_max_model_len_shrinks_to_what_fits_unless_given() -> None:
    result = resolve_kv_memory(resolved(kv_cache_memory="33MiB"), report(FULL, free_bytes=1 << 30))
    assert result.max_model_len == 512 == result.runner.max_model_len
    assert "lowered from 2048" in reason(result, "max_model_len")
    with pytest.raises(StartError, match="longest that fits is 512"):
        resolve_kv_memory(resolved(kv_cache_memory="33MiB", max_model_len=1024), report(FULL, free_bytes=1 << 30))


def test_a_sliding_group_alone_fits_any_length() -> None:
    result = resolve_kv_memory(resolved(kv_cache_memory="12MiB"), report(SLIDING, free_bytes=1 << 30))
    assert result.max_model_len == 2048


@pytest.mark.parametrize(("speed", "budget"), [(100.0, CPU_MIN_TOKENS), (3000.0, 1472), (1e6, 4096)])
def test_token_budget_follows_the_measured_speed(speed: float, budget: int) -> None:
    result = resolve_token_budget(resolved(), TimedChunk(256, 256 / speed))
    assert result.max_num_batched_tokens == budget
    assert f"{speed:.0f} prompt tokens/s" in reason(result, "max_num_batched_tokens")
    assert result.token_cost.slope == 0.0


def timed(num_tokens: int, context_len: int, base_s: float, rise_s: float) -> TimedChunk:
    """On a machine where a token takes base_s, and rise_s more for each one before it."""
    seconds = sum(base_s + rise_s * position for position in range(context_len, context_len + num_tokens))
    return TimedChunk(num_tokens, seconds, context_len)


@pytest.mark.parametrize("rise_s", [0.0, 2e-8, 3e-7])
def test_the_context_is_part_of_what_a_step_may_cost(rise_s: float) -> None:
    base_s = 2.5e-4
    result = resolve_token_budget(resolved(), timed(256, 0, base_s, rise_s), timed(64, 1984, base_s, rise_s))
    cost, budget = result.token_cost, result.max_num_batched_tokens
    assert cost.slope == pytest.approx(rise_s / base_s)
    assert 0.9 * CPU_STEP_TARGET_S < timed(budget, 0, base_s, rise_s).seconds <= CPU_STEP_TARGET_S
    longest = min(budget, cost.fitting(1500, cost.of(0, budget)))
    assert timed(longest - 1, 1500, base_s, rise_s).seconds <= CPU_STEP_TARGET_S
    said = reason(result, "token cost")
    if rise_s:
        assert f"from {budget} tokens to {cost.fitting(2047, cost.of(0, budget))} at its end" in said
    else:
        assert "no difference" in said


def test_the_least_budget_holds_on_a_slow_machine_and_its_steps_do_not_grow() -> None:
    result = resolve_token_budget(resolved(), timed(256, 0, 0.01, 1e-5), timed(64, 1984, 0.01, 1e-5))
    assert result.max_num_batched_tokens == CPU_MIN_TOKENS
    assert result.token_cost.fitting(1500, result.token_cost.of(0, CPU_MIN_TOKENS)) < CPU_MIN_TOKENS


def test_a_disturbed_measurement_gives_no_nonsense() -> None:
    faster_far = resolve_token_budget(resolved(), TimedChunk(256, 1.0), TimedChunk(64, 0.1, 1984))
    assert (faster_far.token_cost.slope, faster_far.max_num_batched_tokens) == (0.0, CPU_MIN_TOKENS)
    slow_far = resolve_token_budget(resolved(), TimedChunk(256, 0.01), TimedChunk(64, 60.0, 1984))
    assert slow_far.token_cost.slope > 0
    assert slow_far.max_num_batched_tokens >= CPU_MIN_TOKENS


def test_given_token_budget_needs_no_measurement() -> None:
    result = resolve_token_budget(resolved(max_num_batched_tokens=100))
    assert (result.max_num_batched_tokens, result.token_cost.slope) == (100, 0.0)


def test_speculation_bounds_are_checked() -> None:
    assert resolved(speculative_config={"method": "ngram", "num_speculative_tokens": 3}).runner.max_num_drafts == 3
    adaptive = resolved(speculative_config={"method": "suffix"}).speculation
    assert adaptive is not None
    assert adaptive.adaptive
    fixed = resolved(speculative_config={"method": "suffix", "enable_adaptive_verification": False}).speculation
    assert fixed is not None
    assert not fixed.adaptive
    assert resolved().speculation is None
    with pytest.raises(StartError, match="num_speculative_tokens"):
        resolved(speculative_config={"method": "ngram", "num_speculative_tokens": 0})
    with pytest.raises(StartError, match="unknown key 'surprise'"):
        resolved(speculative_config={"method": "ngram", "num_speculative_tokens": 3, "surprise": 1})


def test_rules_and_several_drafters_are_told() -> None:
    config = {
        "method": "suffix",
        "num_speculative_tokens": 6,
        "fallback": {"method": "ngram", "num_speculative_tokens": 9},
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": 2.5,
    }
    result = resolved(speculative_config=config)
    told = {name: (value, reason) for name, value, reason in result.decisions}
    assert result.runner.max_num_drafts == 9
    assert told["speculation"][0] == "suffix, else ngram"
    assert told["rejection_sample_method"][0] == "synthetic"
    assert "garbage on purpose" in told["rejection_sample_method"][1]
    with pytest.raises(StartError, match="synthetic_acceptance_length must be in"):
        resolved(speculative_config={**config, "synthetic_acceptance_length": 11})


def test_greedy_generation_config_means_temperature_zero() -> None:
    said = {"repetition_penalty": 1.1, "max_new_tokens": 7}
    model = dataclasses.replace(MODEL, generation={**said, "temperature": 0.6, "do_sample": False})
    result = resolve(engine_options(model="m"), "/m", model, MACHINE)
    assert result.sampling_defaults == {"temperature": 0.0, "repetition_penalty": 1.1, "max_tokens": 7}
