"""The whole core over a device that runs behind the host, played on a CPU.

    requests ─▶ EngineCore ─▶ InProcess, two steps in flight ─▶ Worker ─▶ fake device: staged writes, recorded steps

Whatever arrives, is aborted, preempted or found in the prefix cache: a sequence gets what it gets alone, one step at a
time, without recordings. Comparisons are exact, log-probabilities included: each row of a product and each query of
attention is computed by itself here (RowByRow), and steps are short enough for one set of kernels to serve them all, so
that no bit depends on the batch, on chunks or on cached prefixes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from lamella.engine.adapters.speculator import from_config
from lamella.engine.core import CoreOptions, EngineCore
from lamella.engine.executor.in_process import InProcess
from lamella.engine.generation import Generation
from lamella.engine.intake import Intake
from lamella.engine.outputs import RequestOutput, request_output
from lamella.engine.request import Request, SamplingParams
from lamella.engine.text.tokenizer import Tokenizer, load_tokenizer
from lamella.engine.wire import sequence_id
from lamella.kvtier import TierPlan
from lamella.kvtier.data import cuda_mover
from lamella.kvtier.data.disk.store import DiskStore
from lamella.kvtier.data.host_buffer import HostBuffer
from lamella.kvtier.data.mover import TierMover
from lamella.kvtier.testing.fake_lanes import FakeLanes, fake_cuda_mover
from lamella.runner_v2.config import RunnerConfig
from lamella.runner_v2.runner import ModelRunner
from lamella.runner_v2.testing import cuda_kernels
from lamella.runner_v2.testing.assembled import KERNEL_SIZES
from lamella.runner_v2.testing.fake_device import FAKE_DEVICE, FakeDevice
from lamella.runner_v2.testing.tiny_models import write_folder
from lamella.runner_v2.worker import Worker
from lamella.specdec import parse_speculation

FAMILIES = {"llama": 60, "gemma3_text": 16, "qwen3_moe": 15}
"""Family -> requests. The reference of experts is slow."""
MAX_TOKENS = 32
"""Of a step: above that the provider takes other kernels, which round elsewhere."""
MAX_ROWS = 6
MAX_LEN = 96
ROOMY = 8 * MAX_ROWS
"""Blocks with which nobody is preempted."""
TIGHT = 9
"""Blocks of 16 tokens for about a quarter of MAX_ROWS sequences."""
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 6}


class RowByRow:
    """The kernels' stand-in, every row by itself: a sum's order, and how a vector ends, are the same in any batch."""

    def __getattr__(self, name: str) -> Any:
        return getattr(cuda_kernels, name)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, workspace: torch.Tensor, **options: Any) -> torch.Tensor:
        rows = {name: options.pop(name) for name in ("residual", "scaled_out", "out") if name in options}
        columns = {name: options.pop(name) for name in ("squares_in", "squares_out") if name in options}
        results = []
        for i in range(len(x)):
            mine = {name: None if t is None else t[i : i + 1] for name, t in rows.items()}
            mine |= {name: None if t is None else t[:, i : i + 1].clone() for name, t in columns.items()}
            results.append(cuda_kernels.linear(x[i : i + 1], weight, workspace, **mine, **options))
            if columns.get("squares_out") is not None:
                columns["squares_out"][:, i : i + 1] = mine["squares_out"]
        return torch.cat(results) if rows.get("out") is None else rows["out"]

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, residual: torch.Tensor | None = None, **options: Any
    ) -> torch.Tensor:
        residuals = [None] * len(x) if residual is None else residual.split(1)
        out = options.pop("out", None)
        rows = [
            cuda_kernels.rms_norm(row, weight, eps, residual=rest, **options)
            for row, rest in zip(x.split(1), residuals)
        ]
        return torch.cat(rows) if out is None else out.copy_(torch.cat(rows))

    def gated_activation(
        self, x: torch.Tensor, kind: str, *, out: torch.Tensor | None = None, **options: Any
    ) -> torch.Tensor:
        rows = torch.cat([cuda_kernels.gated_activation(row, kind, **options) for row in x.split(1)])
        return rows if out is None else out.copy_(rows)

    def rope_write(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, *others: Any, **options: Any
    ) -> None:
        *tables_and_caches, slots = others
        for i in range(len(q)):
            one = slice(i, i + 1)
            cuda_kernels.rope_write(q[one], k[one], v[one], positions[one], *tables_and_caches, slots[one], **options)

    def moe_route(self, logits: torch.Tensor, top_k: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ids, weights = zip(*(cuda_kernels.moe_route(row, top_k, **options) for row in logits.split(1)))
        return torch.cat(ids), torch.cat(weights)

    def paged_prefill(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_table: torch.Tensor,
        cu_q: torch.Tensor,
        seq_lens: torch.Tensor,
        max_q_len: int,
        scale: float,
        *,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        out = torch.empty_like(q) if out is None else out
        starts = cu_q.tolist()
        one = torch.tensor([0, 1], dtype=torch.int32)
        for row, seq_len in enumerate(seq_lens.tolist()):
            for i in range(starts[row], starts[row + 1]):
                seen = torch.tensor([seq_len - (starts[row + 1] - 1 - i)], dtype=torch.int32)
                mine = None if lse is None else lse[i : i + 1]
                cuda_kernels.paged_prefill(
                    q[i : i + 1], k_cache, v_cache, block_table[row : row + 1], one, seen, 1, scale,
                    out=out[i : i + 1], lse=mine, **options,
                )  # fmt: skip
        return out


def linear_by_row(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """In the place of the library's product, which serves more rows than the kernels' own: the same sums."""
    rows = [row.float() @ weight.float().T for row in x.split(1)]
    return (torch.cat(rows) if bias is None else torch.cat(rows) + bias.float()).to(x.dtype)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    sizes = {**KERNEL_SIZES, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
    for family in FAMILIES:
        write_folder(folder / family, family, seed=3, dtype="bfloat16", **{**sizes, "num_key_value_heads": 1})
    return folder


class Served:
    """A core over a fake device, and the front's part of each request: text, stop strings."""

    def __init__(self, path: Path, kernels: Any, depth: int, graphs: bool, num_blocks: int, **options: Any) -> None:
        speculative = options.pop("speculative", None)
        num_drafts = speculative["num_speculative_tokens"] if speculative else 0
        config = RunnerConfig(
            model_path=str(path),
            num_threads=1,
            max_num_rows=MAX_ROWS,
            max_num_tokens=MAX_TOKENS,
            max_model_len=MAX_LEN,
            max_num_drafts=num_drafts,
            graph_rows=(1, 2, 4, MAX_ROWS) if graphs else (),
            **FAKE_DEVICE,
        )
        self.device = FakeDevice()
        self.device.kernels = kernels
        mover: Any = options.pop("mover", None)
        self.worker = Worker(
            config, from_config(speculative) if speculative else None, platform=self.device, mover=mover
        )
        executor = InProcess(self.worker, depth=depth, mover=mover)
        reports = executor.open()
        self.core = EngineCore(
            executor,
            reports,
            CoreOptions(
                max_model_len=MAX_LEN,
                max_num_seqs=MAX_ROWS,
                max_num_batched_tokens=config.max_num_tokens,
                num_blocks=(num_blocks,) * len(reports[0].groups),
                max_num_drafts=num_drafts,
                draft_methods=parse_speculation(speculative).methods if speculative else (),
                prefix_caching=options.get("prefix_caching", True),
                tiers=options.get("tiers"),
                holds_restores=options.get("tiers") is not None,
                patience=lambda _: 10.0,
            ),
            draw_seed=lambda: 7,
        )
        self.tokenizer: Tokenizer = load_tokenizer(path)
        self.open: dict[str, Generation] = {}
        self.done: dict[str, RequestOutput] = {}

    @property
    def runner(self) -> ModelRunner:
        return self.worker.runner

    def add(self, request: Request) -> None:
        self.open[request.request_id] = Generation(request, self.tokenizer, 0.0)
        self.core.submit(request)

    def abort(self, request_id: str) -> None:
        del self.open[request_id]
        self.core.abort([request_id])

    def step(self) -> None:
        """One round, and every invariant of the books."""
        batch = self.core.run_once()
        for delta in batch.deltas if batch is not None else []:
            generation = self.open.get(delta.request_id)
            if generation is None:
                continue
            piece = generation.push(delta, 0.0)
            if piece is not None and piece.still_runs:
                self.core.abort([sequence_id(delta.request_id, delta.index)])
            if generation.finished:
                self.done[delta.request_id] = request_output(self.open.pop(delta.request_id), None)
        self.core.check()

    def drain(self) -> None:
        while self.core.has_work:
            self.step()

    def alone(self, request: Request) -> RequestOutput:
        """What the request gets when nobody was here before it."""
        self.core.call("reset_prefix_cache", {})
        self.add(request)
        self.drain()
        return self.done.pop(request.request_id)

    def check_empty(self) -> None:
        """Nobody holds a block or a row, on either side."""
        self.core.check()
        assert self.core._manager.in_use == 0.0, "blocks are held by nobody"
        assert self.core._scheduler.books.rows.num_free == MAX_ROWS, "the scheduler holds rows of nobody"
        stats = self.core.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0.0)
        # rows that ended with the last step leave the device with the next one
        self.add(request_of(self, "last", [5, 6], SamplingParams(max_tokens=1, temperature=0.0)))
        self.drain()
        owned = self.runner._state.generations.nonzero()[0].tolist()
        assert len(owned) <= 1, f"rows {owned} are still owned on the device"
        assert not self.runner._in_flight
        assert not self.runner._told
        assert int(self.runner._state.computed_len[-1]) == 0, "the spare row has moved"


@contextmanager
def served(
    path: Path, *, depth: int = 2, graphs: bool = True, num_blocks: int = ROOMY, **options: Any
) -> Iterator[Served]:
    kernels = RowByRow()
    with cuda_kernels.using(kernels), mock.patch.object(F, "linear", linear_by_row):
        engine = Served(path, kernels, depth, graphs, num_blocks, **options)
        try:
            yield engine
        finally:
            engine.core.close()


def request_of(engine: Served, name: str, prompt: list[int], params: SamplingParams) -> Request:
    intake = Intake(engine.tokenizer, max_model_len=MAX_LEN, vocab_size=engine.runner.model_config.vocab_size)
    params.validate(intake.vocab_size)
    request = intake.request(prompt, params)
    request.request_id = name
    return request


def draw_params(rng: random.Random, i: int, max_tokens: int) -> SamplingParams:
    """Every kind of sampling in turn."""
    seeded: dict[str, Any] = {"temperature": rng.choice((0.7, 1.0)), "seed": rng.randrange(1 << 40)}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "ignore_eos": True},
        {**seeded},
        {**seeded, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
        {**seeded, "n": rng.choice((2, 3)), "logprobs": rng.choice((None, 2))},
        {**seeded, "frequency_penalty": 0.6, "presence_penalty": 0.2, "repetition_penalty": 1.2},
        {"temperature": 0.0, "repetition_penalty": 1.4},
        {"temperature": 0.0, "bad_words": ["a", "th", " e"]},
        {**seeded, "logit_bias": {7: 4.0, 40: 3.0, 41: -100.0}},
        {**seeded, "min_tokens": min(5, max_tokens), "stop_token_ids": list(range(0, 300, 3))},
        {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2},
        {**seeded, "logprobs": 0},
        {**seeded, "stop": ["a", "e", "o"]},
        {**seeded, "stop_token_ids": list(range(0, 300, 10))},
        {**seeded, "allowed_token_ids": list(range(20, 60))},
    ]
    return SamplingParams(max_tokens=max_tokens, **kinds[i % len(kinds)])


def draw_requests(engine: Served, rng: random.Random, count: int) -> list[Request]:
    """Prompts share prefixes of up to some blocks with others'."""
    texts = [[rng.randrange(5, 300) for _ in range(60)] for _ in range(3)]
    requests = []
    for i in range(count):
        prompt = rng.choice(texts)[: rng.choice((1, 3, 17, 33, 34, 50))]
        if rng.random() < 0.5:
            prompt = prompt + [rng.randrange(5, 300) for _ in range(rng.randint(1, 8))]
        params = draw_params(rng, i, rng.choice((1, 2, 9, 20, 30)))
        requests.append(request_of(engine, f"r{i}", prompt, params))
    return requests


def told(output: RequestOutput) -> list[Any]:
    """All that a client sees of an answer, but for times and hits."""
    seen: list[Any] = [output.error, output.prompt_logprobs]
    return seen + [(o.text, o.token_ids, o.logprobs, o.finish_reason, o.stop_reason) for o in output.outputs]


def first_difference(got: RequestOutput, expected: RequestOutput) -> str:
    """For whoever reads of a failure: where two answers part."""
    for mine, alone in zip(got.outputs, expected.outputs):
        for i, (one, other) in enumerate(zip(mine.token_ids, alone.token_ids)):
            if one != other:
                return f"sequence {mine.index}, token {i}: {one}, alone {other}; {got.num_cached_tokens} cached"
        for i, pair in enumerate(zip(mine.logprobs or [], alone.logprobs or [])):
            if pair[0] != pair[1]:
                return f"sequence {mine.index}, logprobs {i}: {pair[0]}, alone {pair[1]}"
        if (mine.finish_reason, mine.stop_reason) != (alone.finish_reason, alone.stop_reason):
            return f"sequence {mine.index}: ended by {mine.finish_reason}, alone by {alone.finish_reason}"
    pairs = zip(got.prompt_logprobs or [], expected.prompt_logprobs or [])
    return next((f"prompt logprobs {i}: {a}, alone {b}" for i, (a, b) in enumerate(pairs) if a != b), "lengths or text")


def serve(engine: Served, requests: list[Request], rng: random.Random, arrival: float) -> set[str]:
    """Traffic until all have ended. arrival: probability that the next request comes before a step, and so on. The
    names of those that were aborted."""
    waiting, aborted = list(requests), set()
    while waiting or engine.core.has_work:
        while waiting and rng.random() < arrival:
            engine.add(waiting.pop(0))
        if engine.open and rng.random() < 0.02:
            name = rng.choice(sorted(engine.open))
            engine.abort(name)
            aborted.add(name)
        engine.step()
    return aborted


def check_against_single_runs(path: Path, requests: list[Request], done: dict[str, RequestOutput]) -> None:
    """Each answer is what its request gets alone, without recordings and with one step in flight."""
    with served(path, depth=1, graphs=False) as single:
        for request in requests:
            if request.request_id in done:
                expected, got = single.alone(request), done[request.request_id]
                assert told(got) == told(expected), f"{request.request_id}: {first_difference(got, expected)}"
        single.check_empty()


@pytest.mark.parametrize("family", FAMILIES)
def test_traffic_gets_what_single_requests_get(folder: Path, family: str) -> None:
    rng = random.Random(f"traffic {family}")
    count = FAMILIES[family]
    with served(folder / family, num_blocks=TIGHT) as engine:
        requests = draw_requests(engine, rng, count)
        aborted = serve(engine, requests, rng, 0.4)
        stats = engine.core.stats()
        assert stats.preemptions > 0, "the cache was large enough for all"
        assert stats.prefix_hits > 0
        assert aborted
        assert set(engine.done) == {r.request_id for r in requests} - aborted
        recorder: Any = engine.device.recorder
        assert recorder.num_recorded == 8, "two parts of four sizes"
        assert recorder.num_replayed > 20
        engine.check_empty()
    check_against_single_runs(folder / family, requests, engine.done)


@pytest.mark.parametrize("drafts", [NGRAM, SUFFIX, {**SUFFIX, "fallback": NGRAM}], ids=["ngram", "suffix", "both"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_speculation_gives_the_same_ids(folder: Path, family: str, drafts: dict[str, Any]) -> None:
    """Greedy, with a host-side drafter and without it, together and alone."""
    rng = random.Random(9)
    pattern = [rng.randrange(5, 300) for _ in range(6)]
    greedy = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    biased = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logit_bias=dict.fromkeys(pattern, 5.0))
    asked = [(pattern * 5, greedy), (pattern * 3 + [9], biased), ([7, 8], greedy), (pattern * 4, biased), ([5], greedy)]
    with served(folder / family, depth=1, speculative=drafts) as drafting:
        requests = [request_of(drafting, f"r{i}", prompt, params) for i, (prompt, params) in enumerate(asked)]
        for request in requests:
            drafting.add(request)
            drafting.step()
        drafting.drain()
        stats = drafting.core.stats()
        assert stats.spec_draft_tokens > 0
        assert stats.spec_accepted_tokens > 0
        drafting.check_empty()
        done = drafting.done
    with served(folder / family, depth=1, graphs=False) as single:
        for request in requests:
            expected, got = single.alone(request), done[request.request_id]
            assert told(got) == told(expected), f"{request.request_id}: {first_difference(got, expected)}"


def test_synthetic_drafts_are_emitted_on_a_device(folder: Path) -> None:
    """All of them stand: the row says its own last ids again, and goes on behind them."""
    drafts = {"method": "arbitrary", "num_speculative_tokens": 3, "rejection_sample_method": "synthetic"}
    prompts = [[5, 6, 7, 8], [9, 10, 11], [12, 13]]
    for params in (
        SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=4, top_k=20, max_tokens=9, ignore_eos=True),
    ):
        with served(folder / "llama", depth=1, speculative={**drafts, "synthetic_acceptance_length": 4}) as drafting:
            for i, prompt in enumerate(prompts):
                drafting.add(request_of(drafting, f"r{i}", prompt, params))
            drafting.drain()
            for i, prompt in enumerate(prompts):
                said = drafting.done[f"r{i}"].outputs[0].token_ids
                for place in (1, 5):
                    known = (prompt + said[:place])[::-1][:3]
                    assert said[place : place + 3] == [known[n % len(known)] for n in range(3)]
            stats = drafting.core.stats()
            assert stats.spec_accepted_tokens == stats.spec_draft_tokens == 3 * 6
            drafting.check_empty()


@pytest.mark.parametrize(
    "rule",
    [
        {"rejection_sample_method": "typical", "posterior_threshold": 1e-6, "posterior_alpha": 1e-6},
        {"rejection_sample_method": "threshold", "accept_threshold_acc": 1e-6},
    ],
    ids=lambda rule: rule["rejection_sample_method"],
)
def test_lossy_rules_judge_by_what_a_device_sampled_from(folder: Path, rule: dict[str, Any]) -> None:
    """With thresholds that low whatever the target may say stands; what top-k excludes does not."""
    drafts = {"method": "arbitrary", "num_speculative_tokens": 3, **rule}
    asked = {
        "all": SamplingParams(temperature=1.0, seed=4, max_tokens=9, ignore_eos=True),
        "one": SamplingParams(temperature=1.0, top_k=1, seed=4, max_tokens=9, ignore_eos=True),
    }
    with served(folder / "llama", depth=1, speculative=drafts) as drafting:
        requests = {name: request_of(drafting, name, [5, 6, 7, 8], params) for name, params in asked.items()}
        for request in requests.values():
            drafting.add(request)
        drafting.drain()
        done = drafting.done
        assert done["all"].accepted_prediction_tokens == 6
        assert done["all"].rejected_prediction_tokens == 0
        assert done["one"].rejected_prediction_tokens > 0
    with served(folder / "llama", depth=1, graphs=False) as single:
        assert told(done["one"]) == told(single.alone(requests["one"]))


def test_a_poisoned_slot_fails_its_row_alone(folder: Path) -> None:
    """A value of one sequence's KV becomes NaN while it runs: that sequence ends with an error, those beside it get
    what they get alone, and whoever takes its blocks afterwards does too."""
    rng = random.Random(4)
    with served(folder / "llama", num_blocks=TIGHT) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        requests = [
            request_of(engine, f"r{i}", [rng.randrange(5, 300) for _ in range(5 + i)], params) for i in range(3)
        ]
        for request in requests:
            engine.add(request)
        while min(len(generation.outputs[0].token_ids) for generation in engine.open.values()) < 4:
            engine.step()
        row = next(s.row for s in engine.core._scheduler.books.decoding if s.request_id == "r1")
        runner = engine.runner
        block = int(runner._tables[0][row, 0])
        runner._caches[0].v[block, :, 2] = torch.nan
        engine.drain()
        failed = engine.done["r1"]
        assert failed.outputs[0].finish_reason == "error"
        assert failed.error is not None
        assert "NaN" in failed.error
        late = [request_of(engine, f"late{i}", [rng.randrange(5, 300) for _ in range(30)], params) for i in range(6)]
        for request in late:
            engine.add(request)
        engine.drain()
        assert block in {int(b) for b in runner._tables[0].flatten()}
        engine.check_empty()
        done = engine.done
    with served(folder / "llama", depth=1, graphs=False) as single:
        assert (
            failed.outputs[0].token_ids
            == single.alone(requests[1]).outputs[0].token_ids[: len(failed.outputs[0].token_ids)]
        )
        for request in (requests[0], requests[2], *late):
            expected, got = single.alone(request), done[request.request_id]
            assert told(got) == told(expected), f"{request.request_id}: {first_difference(got, expected)}"


def test_a_failed_row_leaves_no_poison_in_the_prefix_cache(folder: Path) -> None:
    """Whoever asks again with the prompt of a sequence whose KV held NaN gets an answer."""
    prompt = [9 + i for i in range(40)]
    with served(folder / "llama") as engine:
        params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        engine.add(request_of(engine, "poisoned", prompt, params))
        while len(engine.open["poisoned"].outputs[0].token_ids) < 3:
            engine.step()
        runner = engine.runner
        runner._caches[0].v[int(runner._tables[0][0, 1]), :, 2] = torch.nan
        engine.drain()
        assert engine.done["poisoned"].outputs[0].finish_reason == "error"
        engine.add(request_of(engine, "again", prompt, params))
        engine.drain()
        again = engine.done["again"]
        assert again.error is None, f"{again.error}; {again.num_cached_tokens} tokens came from the prefix cache"


# ---- tiers below the device ------------------------------------------------------------------------------------------


class Tiers(NamedTuple):
    """A world of tiers below the fake device: how large, and what goes wrong."""

    num_slots: int = 64
    disk: bool = False
    slab_bytes: int = 1 << 20
    """The smaller, the later slots are pinned."""
    error_at: int | None = None
    """The slab that cannot be pinned."""
    fail_every: int = 0
    """Of the copies that are launched."""


TIERS = {
    "host": Tiers(),
    "host and disk": Tiers(num_slots=10, disk=True),
    "not pinned": Tiers(error_at=0),
    "partly pinned": Tiers(slab_bytes=1 << 14, error_at=4),
    "copies fail": Tiers(num_slots=6, disk=True, fail_every=29),
}


class Below(NamedTuple):
    """What serves a world's tiers."""

    mover: TierMover
    plan: TierPlan
    lanes: FakeLanes


def below_of(folder: Path, world: Tiers, seed: int, disk: Path) -> Below:
    """For the model of this folder."""
    with cuda_kernels.using(cuda_kernels):
        config = RunnerConfig(model_path=str(folder), max_num_tokens=MAX_TOKENS, max_model_len=MAX_LEN, **FAKE_DEVICE)
        groups = ModelRunner.load(config, platform=FakeDevice()).report().groups
    lanes = FakeLanes(random.Random(seed), max_copies=1)
    buffer = HostBuffer([group.bytes_per_block for group in groups], [world.num_slots] * len(groups))
    store = DiskStore(disk, fingerprint=b"f" * 16, capacity_bytes=64 << 20) if world.disk else None
    make = fake_cuda_mover(lanes, fail_every=world.fail_every, error_at=world.error_at, slab_bytes=world.slab_bytes)
    plan = TierPlan(host_slots=(world.num_slots,) * len(groups), has_disk=world.disk)
    return Below(TierMover(buffer, store=store, make_device=make), plan, lanes)


@pytest.mark.parametrize(
    ("family", "world"),
    [("llama", name) for name in TIERS] + [("gemma3_text", "host"), ("gemma3_text", "host and disk")],
)
def test_tiers_change_no_answer(
    folder: Path, tmp_path: Path, family: str, world: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traffic with aborts and preemptions over tiers whose copies happen late: every sequence gets what it gets alone,
    on the device without tiers. A block that is read before its copy is NaN, and one that is handed out while a copy
    reads it is an error of the fake."""
    monkeypatch.setattr(cuda_mover, "LOAD_CALL_BYTES", 1)  # each layer by itself
    rng = random.Random(f"tiers {family} {world}")
    below = below_of(folder / family, TIERS[world], 5, tmp_path / "kv")
    with served(folder / family, num_blocks=TIGHT, mover=below.mover, tiers=below.plan) as engine:
        requests = draw_requests(engine, rng, 30 if family == "llama" else 16)
        aborted = serve(engine, requests, rng, 0.6)
        assert set(engine.done) == {r.request_id for r in requests} - aborted
        stats = engine.core.stats()
        if family == "llama":
            assert stats.preemptions > 0
        host = stats.tiers["host"]
        assert host.hit_tokens > 0
        assert (host.failures != {}) == bool(TIERS[world].fail_every)
        moved = below.mover.stats()["host"]
        assert moved["bytes_in"] > 0
        assert (moved["bytes_staged"] > 0) == (TIERS[world].error_at is not None)
        if TIERS[world].error_at is None:
            assert below.lanes.num_held > 0, "no step had to hold"
        engine.check_empty()
    check_against_single_runs(folder / family, requests, engine.done)


def test_rows_that_decode_do_not_wait_for_the_copies_of_others(folder: Path, tmp_path: Path) -> None:
    """Nothing is copied until somebody holds for it. One sequence decodes; another enters behind a prefix in the host:
    the first one's steps go on, and the other one begins when its copies have ended."""
    below = below_of(folder / "llama", TIERS["host"], 5, tmp_path / "kv")
    prompt, greedy = list(range(20, 70)), SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    one = SamplingParams(temperature=0.0, max_tokens=1)
    with served(folder / "llama", num_blocks=TIGHT, mover=below.mover, tiers=below.plan) as engine:
        engine.add(request_of(engine, "first", prompt, greedy))
        engine.drain()
        for start in range(3):  # takes the device's blocks
            engine.add(request_of(engine, f"other{start}", list(range(100 + start, 180 + start)), one))
            engine.drain()
        engine.add(request_of(engine, "decodes", [5, 6, 7], greedy))
        for _ in range(4):
            engine.step()
        below.lanes.max_copies = 0
        engine.add(request_of(engine, "enters", prompt, greedy))
        held = below.lanes.num_held
        before = len(engine.open["decodes"].outputs[0].token_ids)
        for _ in range(6):
            engine.step()
        assert len(engine.open["decodes"].outputs[0].token_ids) >= before + 5
        assert engine.open["enters"].outputs[0].token_ids == []
        assert len(engine.core._scheduler.books.prefilling) == 1, "it has no row yet"
        assert below.lanes.num_held == held
        below.lanes.max_copies = 3
        engine.drain()
        assert engine.done["enters"].outputs[0].token_ids == engine.done["first"].outputs[0].token_ids
        assert engine.done["enters"].num_cached_tokens == 48
        assert below.lanes.num_held == held, "its copies ended while others decoded"
        engine.check_empty()
