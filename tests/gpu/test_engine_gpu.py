"""The engine on a GPU, in process: traffic, refusals, faults, a start that compiles nothing, the demo model's quality.

Kernels of a GPU cut a row's work by what else is in the batch, so an answer may leave that of a single request where
two logits nearly tie; how often and how nearly is told.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from lamella.engine import LLM, SamplingParams
from lamella.engine.errors import RequestError
from lamella.engine.outputs import CompletionOutput
from lamella.runner_v2.config import RunnerConfig
from lamella.runner_v2.runner import ModelRunner
from lamella.runner_v2.scoring import score
from lamella.runner_v2.testing.assembled import KERNEL_SIZES
from lamella.runner_v2.testing.prompts import PROMPTS
from lamella.runner_v2.testing.tiny_models import write_folder
from lamella.runner_v2.testing.tiny_tokenizer import write_tokenizer

pytestmark = pytest.mark.gpu

CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"
ON_DEVICE: dict[str, Any] = {"device": "cuda"}
BLOCK_SIZE = 64
NUM_REQUESTS = 1000
SINGLE_S = 6.0
"""Time for single requests to compare with."""
NEAR_TIE, TYPICAL_TIE = 1.0, 0.125
"""Nats between the two ids at which an answer may leave that of the single request, and at which half of those that do
leave it. In bfloat16 a logit of 16 to 32 has steps of 0.125, and where attention of a random model is undecided, the
reference's own logits are off by 1."""
NUM_POSITIONS = 64


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("llama"), "llama", seed=3, dtype="bfloat16", **KERNEL_SIZES).path


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of llama-3.1-8b's widths, without weights."""
    folder = tmp_path_factory.mktemp("wide")
    config = json.loads((CONFIGS / "llama-3.1-8b" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    write_tokenizer(folder)
    return folder


class Shape(NamedTuple):
    """What of a model decides how large its KV blocks are."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def bytes_of(self, num_blocks: int) -> int:
        return num_blocks * self.num_layers * 2 * self.num_kv_heads * self.head_dim * BLOCK_SIZE * 2


TINY = Shape(3, KERNEL_SIZES["num_key_value_heads"], KERNEL_SIZES["head_dim"])
WIDE = Shape(2, 8, 128)


def engine(path: Path, shape: Shape, num_blocks: int, **options: Any) -> LLM:
    common = {"max_model_len": 384, "max_num_seqs": 48, "max_num_batched_tokens": 1024, "block_size": BLOCK_SIZE}
    return LLM(str(path), kv_cache_memory=shape.bytes_of(num_blocks), **{**ON_DEVICE, **common, **options})


def check_empty(llm: LLM) -> None:
    """No block is held and no row taken, by anybody."""
    core: Any = llm._core
    core.check()
    assert core._manager.in_use == 0.0, f"{core._manager.in_use:.1%} of the blocks are held by nobody"
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0.0)
    assert core._scheduler.books.rows.num_free == llm.info.max_num_seqs
    # rows that ended with the last step leave the device with the next one
    llm.generate([[5, 6]], SamplingParams(max_tokens=1, temperature=0.0))
    owned = runner_of(llm)._state.generations.nonzero()[0].tolist()
    assert len(owned) <= 1, f"rows {owned} are still owned on the device"


def runner_of(llm: LLM) -> ModelRunner:
    core: Any = llm._core
    runner: ModelRunner = core._executor._worker.runner
    return runner


# ---- traffic ---------------------------------------------------------------------------------------------------------


def draw_params(rng: random.Random) -> SamplingParams:
    max_tokens = rng.choice((1, 4, 12, 24, 70))
    if rng.random() < 0.6:
        return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    seeded: dict[str, Any] = {"temperature": 0.8, "seed": rng.randrange(1 << 40), "max_tokens": max_tokens}
    kinds: list[dict[str, Any]] = [
        {},
        {"top_k": 20, "top_p": 0.9},
        {"n": 2, "logprobs": 2},
        {"frequency_penalty": 0.5, "repetition_penalty": 1.2},
        {"stop_token_ids": list(range(0, 300, 10)), "min_tokens": min(3, max_tokens)},
        {"stop": ["a", "e"], "min_p": 0.05},
    ]
    return SamplingParams(**{**seeded, **rng.choice(kinds)})


class Traffic(NamedTuple):
    """What became of many requests."""

    prompts: list[list[int]]
    params: list[SamplingParams]
    outputs: dict[int, CompletionOutput]
    """By request: the first sequence of those that were not aborted."""
    num_aborted: int
    seconds: float


def serve(llm: LLM, rng: random.Random, count: int) -> Traffic:
    """Requests come at random moments, some go away while they run."""
    texts = [[rng.randrange(5, 300) for _ in range(300)] for _ in range(4)]
    prompts, params = [], []
    for _ in range(count):
        prompt = rng.choice(texts)[: rng.choice((2, 20, 60, 125, 180, 300))]
        prompts.append(prompt + [rng.randrange(5, 300) for _ in range(rng.randint(0, 20))])
        params.append(draw_params(rng))
    running: dict[int, Any] = {}
    outputs: dict[int, CompletionOutput] = {}
    waiting, num_aborted, started = iter(range(count)), 0, time.monotonic()
    arriving: int | None = next(waiting)
    while arriving is not None or running:
        while arriving is not None and len(running) < 120 and rng.random() < 0.8:
            (running[arriving],) = llm._submit([llm._ask(prompts[arriving], params[arriving])])
            arriving = next(waiting, None)
        if running and rng.random() < 0.15:
            llm._abort(running.pop(rng.choice(list(running))))
            num_aborted += 1
        if not running:
            continue
        llm._step()
        for i in [i for i, entry in running.items() if entry.generation.finished]:
            output = running.pop(i).output()
            assert output.error is None, f"request {i}: {output.error}"
            outputs[i] = output.outputs[0]
    while llm._core.has_work:  # what was aborted drains
        llm._step()
    return Traffic(prompts, params, outputs, num_aborted, time.monotonic() - started)


def compare(llm: LLM, traffic: Traffic, rng: random.Random) -> str:
    """Greedy answers with those of single requests, for as long as there is time. Returns what was found."""
    greedy = [i for i in traffic.outputs if traffic.params[i].temperature == 0.0]
    rng.shuffle(greedy)
    deadline, compared, gaps, wrong = time.monotonic() + SINGLE_S, 0, [], []
    for i in greedy:
        if time.monotonic() > deadline:
            break
        llm.reset_prefix_cache()
        limit = traffic.params[i].max_tokens
        asked = SamplingParams(temperature=0.0, max_tokens=limit, ignore_eos=True, logprobs=20)
        alone, got = llm.generate([traffic.prompts[i]], asked)[0].outputs[0], traffic.outputs[i]
        assert len(got.token_ids) == len(alone.token_ids), f"request {i}: lengths differ"
        compared += 1
        place = next((n for n, (a, b) in enumerate(zip(got.token_ids, alone.token_ids)) if a != b), None)
        if place is None:
            continue
        entry = (alone.logprobs or [])[place]
        known = {top.token_id: top.logprob for top in entry.top}
        other = known.get(got.token_ids[place], float("-inf"))
        gaps.append(entry.chosen.logprob - other)
        if gaps[-1] > NEAR_TIE:
            wrong.append(f"request {i}, token {place}: {got.token_ids[place]}, alone {alone.token_ids[place]}")
    told = (
        f"{compared} of {len(greedy)} greedy answers compared with single requests: {len(gaps)} parted, at gaps of "
        f"{', '.join(f'{gap:.3f}' for gap in sorted(gaps, reverse=True)[:10])} nats"
    )
    assert not wrong, f"{told}; {len(wrong)} of them are no near-ties: {'; '.join(wrong[:5])}"
    assert compared >= 30, told
    assert not gaps or sorted(gaps)[len(gaps) // 2] <= TYPICAL_TIE, told
    return told


@pytest.mark.parametrize(
    ("model", "tiers"), [("tiny", None), ("wide", None), ("tiny", "ram=64MiB"), ("wide", "ram=64MiB")]
)
def test_traffic(request: pytest.FixtureRequest, model: str, tiers: str | None, record_property: Any) -> None:
    """1,000 requests with aborts and preemptions, with and without a tier below: all others end well, no block or row
    is left behind, and greedy answers are those of single requests up to near-ties."""
    path, shape = request.getfixturevalue(model), TINY if model == "tiny" else WIDE
    dummy: dict[str, Any] = {} if model == "tiny" else {"load_format": "dummy"}
    if tiers is not None:
        dummy["kv_tier"] = tiers
    rng = random.Random(11)
    with engine(path, shape, num_blocks=28, **dummy) as llm:
        traffic = serve(llm, rng, NUM_REQUESTS)
        stats = llm.stats()
        told = (
            f"{model}: {NUM_REQUESTS} requests in {traffic.seconds:.1f} s and {stats.steps} steps, "
            f"{stats.preemptions} preemptions, {traffic.num_aborted} aborts, {stats.prefix_hits} cached tokens"
        )
        if tiers is not None:
            host = stats.tiers["host"]
            told += f", {host.hit_tokens} of them from the host"
            assert host.hit_tokens > 0, told
            assert host.failures == {}, told
        assert stats.preemptions > 0, f"{told}: the cache was large enough for all"
        assert stats.prefix_hits > 0, told
        assert traffic.num_aborted > 0, told
        assert len(traffic.outputs) == NUM_REQUESTS - traffic.num_aborted, told
        check_empty(llm)
        told = f"{told}; {compare(llm, traffic, rng)}"
        check_empty(llm)
    record_property("figure", told)
    print(told)


def test_a_request_that_can_never_fit_is_refused(tiny: Path) -> None:
    """Where the KV cache holds less than the model's context, a longer request is refused with both figures, and the
    engine serves on."""
    with engine(tiny, TINY, num_blocks=6, max_model_len=None, max_num_batched_tokens=64, max_num_seqs=4) as llm:
        longest = llm.info.max_model_len
        assert longest < 512, "the cache was large enough for the model's own context"
        with pytest.raises(RequestError, match=rf"has {longest + 1} tokens.* {longest} tokens"):
            llm.generate([[5] * (longest + 1)], SamplingParams(temperature=0.0, max_tokens=4))
        output = llm.generate([[5] * (longest - 4)], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))[0]
        assert len(output.outputs[0].token_ids) == 4
        check_empty(llm)


def test_a_poisoned_slot_fails_its_row_alone(tiny: Path) -> None:
    """A value of one sequence's KV becomes NaN while it runs: that sequence ends with an error, those beside it and
    those that come after it are served."""
    rng = random.Random(4)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    prompts = [[rng.randrange(5, 300) for _ in range(10 + i)] for i in range(5)]
    with engine(tiny, TINY, num_blocks=40) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        llm.reset_prefix_cache()
        entries = llm._submit([llm._ask(prompt, params) for prompt in prompts])
        while min(len(entry.generation.outputs[0].token_ids) for entry in entries) < 5:
            llm._step()
        runner, core = runner_of(llm), llm._core
        name = entries[2].generation.request.request_id
        row = next(s.row for s in core._scheduler.books.decoding if s.request_id == name)  # type: ignore[attr-defined]
        block = int(runner._tables[0][row, 0])
        runner._caches[0].v[block, :, 3] = torch.nan
        while llm._core.has_work:
            llm._step()
        outputs = [entry.output() for entry in entries]
        reasons = [output.outputs[0].finish_reason for output in outputs]
        assert reasons == ["length", "length", "error", "length", "length"], [output.error for output in outputs]
        assert "NaN" in (outputs[2].error or "")
        for i in (0, 1, 3, 4):
            assert outputs[i].outputs[0].token_ids == expected[i], f"neighbour {i} of the poisoned row"
        again = [output.outputs[0] for output in llm.generate(prompts * 8, params)]
        assert {one.finish_reason for one in again} == {"length"}, "a block kept its poison"
        check_empty(llm)


# ---- start -----------------------------------------------------------------------------------------------------------

START = """
import json, sys
compiled = []
try:
    from triton.runtime.jit import JITFunction
    original = JITFunction._do_compile
    def counted(self, *args, **options):
        compiled.append(self.fn.__name__)
        return original(self, *args, **options)
    JITFunction._do_compile = counted
except (ImportError, AttributeError) as error:
    print(f"triton is not watched: {error!r}", file=sys.stderr)
from lamella.engine import LLM, SamplingParams
with LLM(sys.argv[1], **json.loads(sys.argv[2])) as llm:
    params = [
        SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=1, top_p=0.9, max_tokens=20, logprobs=2, frequency_penalty=0.3),
    ]
    prompts = [list(range(5, 5 + n)) for n in (1, 3, 40, 200)]
    counts = [len(o.outputs[0].token_ids) for p in params for o in llm.generate(prompts, p)]
dynamo = sys.modules.get("torch._dynamo.utils")
counters = {} if dynamo is None else {name: dict(c) for name, c in dynamo.counters.items() if c}
print(json.dumps({"triton": compiled, "dynamo": counters, "counts": counts}))
"""


def test_a_start_compiles_nothing(tiny: Path, tmp_path: Path) -> None:
    """With empty caches of Triton, Inductor, the driver and torch's run-time compiler, a process that loads and serves
    leaves them empty, and neither Triton nor Dynamo was asked to compile."""
    names = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH", "PYTORCH_KERNEL_CACHE_PATH")
    caches = {name: tmp_path / name.lower() for name in names}
    for cache in caches.values():
        cache.mkdir()
    options = {
        **ON_DEVICE,
        "kv_cache_memory": TINY.bytes_of(100),
        "max_model_len": 384,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 1024,
    }
    command = [sys.executable, "-c", START, str(tiny), json.dumps(options)]
    environment = {**os.environ, **{name: str(cache) for name, cache in caches.items()}}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert min(told["counts"]) >= 1
    assert told["triton"] == [], f"Triton compiled {told['triton']}"
    assert told["dynamo"] == {}, f"Dynamo counted {told['dynamo']}"
    left = [str(file.relative_to(tmp_path)) for cache in caches.values() for file in cache.rglob("*") if file.is_file()]
    assert left == [], f"{len(left)} files in the caches: {left[:10]}"


# ---- quality ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2() -> Path:
    path = os.environ.get("LAMELLA_SMOLLM2")
    if not path:
        pytest.skip("LAMELLA_SMOLLM2, the demo model's file, is not set")
    return Path(path)


def test_the_demo_model_is_close_to_float32(smollm2: Path, record_property: Any) -> None:
    """The rule of the CPU's default path: divergence from float32 on the CPU under teacher forcing, over 20 texts of 64
    tokens."""
    with LLM(str(smollm2), max_model_len=128, max_num_seqs=20, kv_cache_memory=1 << 30, **ON_DEVICE) as llm:
        params = SamplingParams(temperature=0.7, seed=3, max_tokens=NUM_POSITIONS, ignore_eos=True)
        outputs = llm.generate(list(PROMPTS), params)
        texts = [(output.prompt_token_ids + output.outputs[0].token_ids)[:NUM_POSITIONS] for output in outputs]
    ours = ModelRunner.load(RunnerConfig(model_path=str(smollm2), max_model_len=128, device=ON_DEVICE["device"]))
    exact = ModelRunner.load(RunnerConfig(model_path=str(smollm2), max_model_len=128, dtype="float32"))
    found, flips = [], []
    for ids in texts:
        expected = score(exact.assembly, ids).double()
        logits = score(ours.assembly, ids, ON_DEVICE["device"]).cpu().double()
        p, q = expected.log_softmax(-1), logits.log_softmax(-1)
        found.append((p.exp() * (p - q)).sum(-1))
        best, differs = expected.topk(2).values, expected.argmax(-1) != logits.argmax(-1)
        flips += (best[:, 0] - best[:, 1])[differs].tolist()
    kl = torch.cat(found)
    told = (
        f"KL mean {kl.mean():.2e}, max {kl.max():.2e}; argmax differs at {len(flips)} of {len(kl)} positions, largest "
        f"gap {max(flips, default=0.0):.2f}"
    )
    record_property("figure", told)
    print(told)
    assert len(kl) == 20 * NUM_POSITIONS
    assert float(kl.mean()) <= 5e-3, told
    assert float(kl.max()) <= 5e-2, told
    assert max(flips, default=0.0) < 0.5, told
