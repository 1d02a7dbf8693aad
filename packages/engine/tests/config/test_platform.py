"""Where the model runs, and what follows from it. No GPU is needed: its facts are data."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from lamella.engine.config.gpus import Gpu, Gpus
from lamella.engine.config.machine import Machine
from lamella.engine.config.platform import graph_rows
from lamella.engine.config.resolve import (
    Resolved,
    TimedChunk,
    resolve,
    resolve_kv_memory,
    resolve_token_budget,
)
from lamella.engine.config.schema import engine_options
from lamella.engine.errors import StartError
from lamella.engine.scheduler.cost import FLAT
from lamella.runner_v2.config import LayerConfig, ModelConfig, RopeConfig
from lamella.runner_v2.step import KvGroup, RankReport

GIB = 1 << 30
CARD = Gpu(0, "NVIDIA H200", 140 * GIB, 139 * GIB, (9, 0))
OLD = Gpu(1, "Tesla V100", 32 * GIB, 32 * GIB, (7, 0), refused="built for 80, 90a, the device has 7.0")
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
    max_position=1 << 17,
    norm_eps=1e-5,
    attention_scale=0.25,
)
GROUP = KvGroup(name="full", kind="full", block_size=64, bytes_per_block=8 << 20, layers=(0,))


def resolved(gpus: Gpus, model: ModelConfig = MODEL, **options: object) -> Resolved:
    machine = Machine(cores=8, available_bytes=GIB, total_bytes=GIB, name="test", gpus=gpus)
    return resolve(engine_options(model="m", **options), "/m", model, machine)


def on_card(**options: object) -> Resolved:
    return resolved(Gpus((CARD,)), **options)


def decision(result: Resolved, name: str) -> tuple[str, str]:
    return next((d.value, d.reason) for d in reversed(result.decisions) if d.name == name)


def test_a_gpu_that_can_be_used_is_taken() -> None:
    result = on_card()
    assert result.runner.device == "cuda"
    assert decision(result, "device") == (
        "cuda",
        "cuda:0 (NVIDIA H200, compute capability 9.0) is there, and the CUDA kernels run on it",
    )
    runner = result.runner
    assert (runner.block_size, runner.max_num_rows, runner.max_num_tokens, result.depth) == (64, 256, 16384, 2)
    assert (runner.dtype, runner.providers) == ("auto", None)
    assert decision(result, "providers")[0] == "cuda, torch"
    assert all(d.reason for d in result.decisions)


def test_auto_skips_what_cannot_be_used() -> None:
    second = dataclasses.replace(CARD, index=1)
    assert resolved(Gpus((dataclasses.replace(OLD, index=0), second))).runner.device == "cuda:1"
    none = resolved(Gpus((OLD,)))
    assert (none.runner.device, none.runner.block_size, none.max_num_seqs, none.depth) == ("cpu", 16, 64, 1)
    assert "Tesla V100: built for 80" in decision(none, "device")[1]
    missing = resolved(Gpus(missing="this machine has no NVIDIA driver"))
    assert decision(missing, "device") == ("cpu", "no GPU that can be used: this machine has no NVIDIA driver")


def test_cpu_is_cpu_whatever_there_is() -> None:
    result = on_card(device="cpu")
    assert (result.runner.device, result.runner.graph_rows) == ("cpu", ())
    assert decision(result, "device") == ("cpu", "given")


def test_a_gpu_asked_for_that_is_not_there_is_named_with_the_remedy() -> None:
    with pytest.raises(StartError, match="--device cuda cannot be used: no driver; or leave --device out"):
        resolved(Gpus(missing="no driver"), device="cuda")
    with pytest.raises(StartError, match=r"--device cuda:2 does not exist; there are cuda:0 \(NVIDIA H200\), cuda:1"):
        resolved(Gpus((CARD, OLD)), device="cuda:2")
    with pytest.raises(StartError, match=r"--device cuda:1 \(Tesla V100\) cannot be used: built for 80"):
        resolved(Gpus((CARD, OLD)), device="cuda:1")
    assert resolved(Gpus((CARD, dataclasses.replace(CARD, index=1))), device="cuda:1").runner.device == "cuda:1"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"gpu_memory_utilization": 0.5}, "--gpu-memory-utilization"),
        ({"cuda_graph_sizes": [1]}, "--cuda-graph-sizes"),
        ({"enforce_eager": True}, "--enforce-eager"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8"),
    ],
)
def test_what_only_a_gpu_knows_is_no_option_of_a_cpu(options: dict[str, object], named: str) -> None:
    with pytest.raises(StartError, match=f"{named} is for GPUs, and the model runs on the CPU"):
        on_card(device="cpu", **options)
    on_card(**options)


def test_types_on_a_gpu() -> None:
    assert on_card(dtype="float16").runner.providers is None
    assert on_card(dtype="float32").runner.providers == ("torch",)
    assert "bfloat16, as in the checkpoint" in decision(on_card(), "dtype")[1]
    wide = dataclasses.replace(MODEL, dtype="float32")
    assert "float32 is turned into it" in decision(resolved(Gpus((CARD,)), wide), "dtype")[1]
    assert on_card(batch_invariant=True).runner.providers == ("torch",)
    assert on_card(kv_cache_dtype="fp8").runner.kv_dtype == "fp8"


def test_graphs_are_recorded_for_the_batches_that_decode() -> None:
    options = engine_options(model="m")
    assert graph_rows(options, 1) == (1,)
    assert graph_rows(options, 6) == (1, 2, 4, 6)
    assert graph_rows(options, 24) == (1, 2, 4, 8, 16, 24)
    assert graph_rows(options, 4096)[-3:] == (496, 504, 512)
    rows = on_card().runner.graph_rows
    assert (rows[:5], rows[-1], len(rows)) == ((1, 2, 4, 8, 16), 256, 35)
    assert on_card(cuda_graph_sizes=[4, 1, 999], max_num_seqs=32).runner.graph_rows == (1, 4, 32)
    assert on_card(enforce_eager=True).runner.graph_rows == ()
    assert decision(on_card(enforce_eager=True), "CUDA graphs") == ("none", "given: --enforce-eager")


def test_a_drafter_needs_each_step_before_the_next() -> None:
    result = on_card(speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    assert result.depth == 1
    assert "the drafter needs the ids" in decision(result, "steps in flight")[1]


def report(free_bytes: int) -> RankReport:
    return RankReport(0, (GROUP,), free_bytes, 16 * GIB, 256, "cuda")


def test_kv_memory_is_what_the_utilization_leaves() -> None:
    result = resolve_kv_memory(on_card(), report(120 * GIB))
    assert result.kv_bytes == int(140 * GIB * 0.9) - 20 * GIB
    assert "90% of the GPU's 140.0 GiB, less 20.0 GiB in use" in decision(result, "KV cache")[1]
    assert result.max_model_len == 1 << 17
    half = resolve_kv_memory(on_card(gpu_memory_utilization=0.5), report(120 * GIB))
    assert half.kv_bytes == 50 * GIB
    given = resolve_kv_memory(on_card(kv_cache_memory="110GiB"), report(120 * GIB))
    assert given.kv_bytes == 110 * GIB
    with pytest.raises(StartError, match="--gpu-memory-utilization 0.1 of 140.0 GiB is 14.0 GiB, and 20.0 GiB are in"):
        resolve_kv_memory(on_card(gpu_memory_utilization=0.1), report(120 * GIB))
    with pytest.raises(StartError, match="take a GPU with more memory"):
        resolve_kv_memory(on_card(), report(0))


def test_steps_of_a_gpu_are_not_timed() -> None:
    result = resolve_token_budget(on_card(), TimedChunk(4096, 1.0))
    assert (result.max_num_batched_tokens, result.token_cost) == (16384, FLAT)
    assert resolve_token_budget(on_card(max_num_batched_tokens=512)).max_num_batched_tokens == 512


def test_few_tokens_mean_few_sequences() -> None:
    result = on_card(max_num_batched_tokens=100)
    assert (result.max_num_seqs, result.runner.max_num_rows) == (100, 100)
    assert "--max-num-batched-tokens" in decision(result, "max_num_seqs")[1]


def test_reading_options_and_machine_brings_no_torch() -> None:
    code = (
        "import sys; from lamella.engine.config.machine import read_machine; read_machine();"
        "from lamella.engine.config import platform; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
