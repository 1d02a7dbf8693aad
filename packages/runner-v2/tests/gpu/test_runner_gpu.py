"""The runner on a GPU: recorded steps, several in flight, whole tiny models of every family against the CPU.

Recorded steps and steps in flight must give the same bits: they are the same kernels over the same batches. Against the
CPU's float32 an answer can only be near: as near as the reference ops are in bfloat16, and a chosen id only differs
where two logits are nearly equal.
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from lamella.runner_v2.ops.providers.torch import TorchProvider
from lamella.runner_v2.runner import ModelRunner
from lamella.runner_v2.sampling.params import RowParams
from lamella.runner_v2.scoring import score
from lamella.runner_v2.step import KvLayout, NewBlocks, NewRow, Step, StepOutput, Work
from lamella.runner_v2.testing.assembled import KERNEL_SIZES, MAX_TOKENS, Assembled, step_of
from lamella.runner_v2.testing.hand_scheduler import GREEDY, HandScheduler
from lamella.runner_v2.testing.op_cases import relative_error
from lamella.runner_v2.testing.tiny_models import TINY_CONFIGS, write_folder

pytestmark = pytest.mark.gpu

ON_DEVICE: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "block_size": 64}
CONFIGS = Path(__file__).parents[4] / "benchmarks" / "configs"
SIZES = (1, 2, 4, 8)
MAX_LEN = 256
SAMPLING = {
    "greedy": GREEDY,
    "top_k": RowParams(temperature=0.8, seed=11, top_k=20),
    "top_p": RowParams(temperature=1.0, seed=12, top_p=0.9),
    "min_p": RowParams(temperature=0.9, seed=5, min_p=0.05, bad_words=((7,), (3, 4))),
    "penalties": RowParams(temperature=0.7, seed=13, frequency_penalty=0.5, repetition_penalty=1.3),
    "bias": RowParams(temperature=0.7, seed=14, logit_bias=((5, 4.0), (6, -100.0)), min_tokens=4, stop_ids=(5,)),
    "logprobs": RowParams(temperature=0.0, num_logprobs=3),
    "allowed": RowParams(temperature=1.0, seed=1, allowed_ids=tuple(range(30, 60)), num_logprobs=0),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for family in TINY_CONFIGS:
        write_folder(folder / family, family, seed=3, dtype="bfloat16", tokenizer=False, **KERNEL_SIZES)
    return folder


def load(path: Path, graph_rows: tuple[int, ...] = SIZES, **options: Any) -> ModelRunner:
    common = {"max_num_rows": 8, "max_num_tokens": 256, "max_model_len": MAX_LEN, "graph_rows": graph_rows}
    return ModelRunner.load(path, **{**ON_DEVICE, **common, **options})


def exact(path: Path) -> ModelRunner:
    """Float32 on the CPU."""
    return ModelRunner.load(path, dtype="float32", max_model_len=MAX_LEN, max_num_tokens=MAX_LEN)


class Reference:
    """The reference ops in bfloat16, on the CPU: what that type alone costs."""

    def __init__(self, path: Path) -> None:
        self._model = Assembled(path, (TorchProvider(torch.bfloat16),), torch.bfloat16)

    def score(self, ids: list[int]) -> torch.Tensor:
        """Logits behind each token of one text of up to MAX_TOKENS."""
        return self._model.step(step_of(torch.tensor([ids]), [(0, 0, len(ids))]))


def some_ids(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, 300) for _ in range(length)]


# ---- (a) logits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_score_is_as_near_as_the_reference_in_bfloat16(folder: Path, family: str) -> None:
    """Over texts of lengths that different kernels serve, down to one token."""
    path = folder / family
    cpu, ours, in_16_bits = exact(path), load(path, ()), Reference(path)
    found: dict[str, list[torch.Tensor]] = {"ours": [], "reference": [], "exact": []}
    for length in (1, 7, 30, 90, MAX_TOKENS):
        ids = some_ids(length, length)
        found["exact"].append(score(cpu.assembly, ids))
        found["ours"].append(score(ours.assembly, ids, ON_DEVICE["device"]).cpu())
        found["reference"].append(in_16_bits.score(ids))
        far = relative_error(found["ours"][-1], found["exact"][-1])
        assert far < 0.1, f"{family}, {length} tokens: logits are off by {far:.3f} of their size"
    ours_all, reference, expected = (torch.cat(found[name]) for name in ("ours", "reference", "exact"))
    error, limit = relative_error(ours_all, expected), 1.25 * relative_error(reference, expected)
    assert error < limit, f"{family}: relative error {error:.4f}, with reference ops in bfloat16 {limit / 1.25:.4f}"


# ---- (b), (d) recordings ---------------------------------------------------------------------------------------------


class Watched:
    """Rows by hand, and the logits of every step of the recorded sizes."""

    def __init__(self, runner: ModelRunner, *, recorded: bool, num_blocks: int = 128) -> None:
        self.runner = runner
        self.hand = HandScheduler(runner.execute, runner.report().groups, num_blocks)
        runner.allocate(self.hand.layout)
        self.logits: list[torch.Tensor] = []
        graphs = runner._graphs
        if recorded:
            assert len(graphs), "nothing was recorded"
        else:
            graphs.clear()  # the same calls, eagerly
        original = graphs.run

        def run(key: Any, call: Callable[[], Any]) -> Any:
            result = original(key, call)
            if key.part == "logits":
                self.logits.append(result[1].clone())
            return result

        graphs.run = run  # type: ignore[method-assign]

    def prefill(self, prompts: Mapping[int, list[int]], params: Callable[[int], RowParams], chunk: int) -> None:
        rows = {self.hand.add(ids, params(i)): len(ids) for i, ids in prompts.items()}
        while rows:
            work: dict[int, int] = {}
            for row, left in rows.items():
                if sum(work.values()) + min(left, chunk) <= chunk:
                    work[row] = min(left, chunk)
            self.hand.step(work)
            rows = {row: left - work.get(row, 0) for row, left in rows.items() if left > work.get(row, 0)}

    def clear(self) -> None:
        """All rows leave."""
        for row in list(self.hand.ids):
            self.hand.remove(row)
        self.hand.step({})


def assert_same_steps(recorded: Watched, eager: Watched, what: str) -> None:
    assert len(recorded.logits) == len(eager.logits)
    for i, (one, other) in enumerate(zip(recorded.logits, eager.logits)):
        if not torch.equal(one, other):
            rows = (one != other).any(1).nonzero().flatten().tolist()
            gap = float((one.float() - other.float()).abs().max())
            raise AssertionError(
                f"{what}: logits of recorded step {i} of {len(one)} rows differ from the eager ones in rows {rows[:8]} "
                f"({len(rows)} in all) by up to {gap:.3g}"
            )
    for one, other in zip(recorded.hand.outputs, eager.hand.outputs, strict=True):
        assert one._replace(seconds=0.0) == other._replace(seconds=0.0), f"{what}: step {one.step_id}"


@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_recorded_steps_equal_eager_ones(folder: Path, family: str) -> None:
    """Bit for bit, for all kinds of sampling together, each by itself, and in batches of all sizes up to 8."""
    runs = []
    for recorded in (True, False):
        watched = Watched(load(folder / family), recorded=recorded)
        watched.prefill({i: some_ids(3 + 5 * i, i) for i in range(8)}, lambda i: list(SAMPLING.values())[i], 64)
        for _ in range(12):
            watched.hand.step(dict.fromkeys(range(8), 1))
        for count in range(1, 8):
            for _ in range(2):
                watched.hand.step(dict.fromkeys(random.Random(count).sample(range(8), count), 1))
        runs.append(watched)
    assert len(runs[0].logits) == 12 + 14
    assert_same_steps(*runs, family)


def wide_config(folder: Path, num_layers: int) -> Path:
    """A folder with llama-3.1-8b's config and fewer layers."""
    config = json.loads((CONFIGS / "llama-3.1-8b" / "config.json").read_text())
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": num_layers}))
    return folder


def test_recorded_steps_equal_eager_ones_at_real_widths(tmp_path: Path) -> None:
    """Bit for bit at llama-3.1-8b's widths, four layers of random weights, in batches of 1 to 128 rows."""
    path = wide_config(tmp_path / "llama", 4)
    batches = {1: 1, 3: 4, 8: 8, 33: 40, 128: 128}
    options = {"dummy_weights": True, "max_num_rows": 128, "max_num_tokens": 1024, "max_model_len": 512}
    runner = load(path, tuple(batches.values()), **options)
    runs = []
    for recorded in (True, False):
        watched = Watched(runner, recorded=recorded, num_blocks=300)
        for batch in batches:
            prompts = {i: some_ids(200 if i % 16 == 0 else 5 + i % 40, i) for i in range(batch)}
            watched.prefill(prompts, lambda i: GREEDY if i % 2 else SAMPLING["top_p"], 1024)
            for _ in range(5):
                watched.hand.step(dict.fromkeys(range(batch), 1))
            watched.clear()
        del runner._graphs.run  # what Watched laid over it
        runs.append(watched)
    assert [len(logits) for logits in runs[0].logits[::5]] == list(batches.values())
    assert_same_steps(*runs, "llama-3.1-8b with 4 layers")


# ---- (c) steps in flight ---------------------------------------------------------------------------------------------


def planned_steps(num_rows: int, num_groups: int, block_size: int, num_blocks: int, seed: int) -> list[Step]:
    """Steps in which rows come, compute chunks, decode and go, whatever ids they get; rows and blocks that were left
    have new owners at once."""
    rng = random.Random(seed)
    free = list(range(1, num_blocks))
    generations = [0] * num_rows
    rows: dict[int, dict[str, Any]] = {}
    kinds = list(SAMPLING.values())
    steps = []
    for step_id in range(1, 90):
        removed, added, new_blocks = [], [], []
        for row, entry in list(rows.items()):
            if entry["planned"] >= entry["end"]:
                removed.append((row, generations[row]))
                free = entry["table"] + free
                del rows[row]
        while len(rows) < num_rows and rng.random() < 0.5 and step_id < 75:
            row = next(r for r in range(num_rows) if r not in rows)
            generations[row] += 1
            ids = some_ids(rng.choice((1, 4, 40, 90)), rng.randrange(1 << 30))
            rows[row] = {"planned": 0, "prompt": len(ids), "end": len(ids) + rng.randint(1, 25), "table": []}
            params = kinds[rng.randrange(len(kinds)) if rng.random() < 0.5 else rng.randrange(3)]
            added.append(NewRow(row, generations[row], ids, len(ids), 0, params, ([],) * num_groups))
        work = {}
        for row, entry in rows.items():
            left = entry["prompt"] - entry["planned"]
            work[row] = min(left, rng.choice((1, 16, 64))) if left > 0 else 1
            entry["planned"] += work[row]
            start = len(entry["table"])
            while len(entry["table"]) * block_size < entry["planned"]:
                entry["table"].append(free.pop())
            if len(entry["table"]) > start:
                blocks = entry["table"][start:]
                new_blocks += [NewBlocks(row, group, blocks, start) for group in range(num_groups)]
        zeros = (0,) * len(work)
        steps.append(
            Step(
                step_id,
                tuple(removed),
                tuple(added),
                tuple(new_blocks),
                Work(tuple(work), tuple(work.values()), zeros, zeros),
            )
        )
    return steps


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe"])
def test_steps_in_flight_emit_what_single_ones_emit(folder: Path, family: str) -> None:
    """The same steps, with one to four of them in flight: outputs are equal, log-probabilities included."""
    outputs: dict[int, list[StepOutput]] = {}
    for depth in (1, 2, 4):
        runner = load(folder / family)
        groups = runner.report().groups
        runner.allocate(KvLayout((64,) * len(groups)))
        found, in_flight = [], deque[int]()
        for step in planned_steps(8, len(groups), groups[0].block_size, 64, seed=5):
            runner.launch(step)
            in_flight.append(step.step_id)
            while len(in_flight) >= depth:
                found.append(runner.finish()._replace(seconds=0.0))
                assert found[-1].step_id == in_flight.popleft()
        found += [runner.finish()._replace(seconds=0.0) for _ in in_flight]
        assert not any(output.failed for output in found)
        outputs[depth] = found
    assert sum(map(len, (output.token_ids for output in outputs[1]))) > 200
    for depth in (2, 4):
        for one, other in zip(outputs[depth], outputs[1], strict=True):
            assert one == other, f"{family}: step {one.step_id} with {depth} in flight"


def test_no_step_is_told_before_the_device_has_ended_it(folder: Path) -> None:
    """Chunks of a prompt bring no ids, and yet whoever hears of them copies what they wrote."""
    runner = load(folder / "llama")
    hand = HandScheduler(runner.execute, runner.report().groups)
    runner.allocate(hand.layout)
    row = hand.add([5 + n % 90 for n in range(64)])
    hand.step({row: 16})
    torch.cuda._sleep(400_000_000)  # some 200 ms
    hand.step({row: 16})
    behind = torch.cuda.Event()
    behind.record()
    assert behind.query(), "the step was told while the device had not come to it"


# ---- (e) fp8 cache ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_fp8_cache_is_near_one_in_bfloat16(folder: Path, family: str) -> None:
    """e4m3 keeps 3 bits behind the point: keys and values are off by up to 1/16, logits by less than their own size
    allows. A cache that is misread is off by as much as the logits are large."""
    path = folder / family
    for length in (40, 200):
        ids = some_ids(length, 2)
        plain, small = (
            score(load(path, (), kv_dtype=kv_dtype).assembly, ids, ON_DEVICE["device"]) for kv_dtype in ("auto", "fp8")
        )
        far = relative_error(small, plain)
        assert 0 < far < 0.3, f"{family}, {length} tokens: an fp8 cache moves logits by {far:.3f} of their size"


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_decoding_equals_prefill_over_the_cache(folder: Path, kv_dtype: str) -> None:
    """Logits of decoding steps are near those of one long chunk, with either cache."""
    watched = Watched(load(folder / "llama", kv_dtype=kv_dtype), recorded=True)
    watched.prefill({0: some_ids(100, 1)}, lambda _: GREEDY, 128)
    for _ in range(20):
        watched.hand.step({0: 1})
    ids = watched.hand.ids[0]
    whole = score(watched.runner.assembly, ids, ON_DEVICE["device"])[100:120]
    stepwise = torch.cat([logits[:1] for logits in watched.logits])
    far = relative_error(stepwise, whole)
    limit = 0.03 if kv_dtype == "auto" else 0.1
    assert far < limit, f"{kv_dtype} cache: decoded logits are off by {far:.4f} of their size"


# ---- (f) against the CPU ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_greedy_ids_are_the_best_of_float32(folder: Path, family: str) -> None:
    """Each id that the GPU chose is the one that float32 on the CPU prefers behind the same ids, or nearly as good: the
    two logits are no further apart than the reference's errors in bfloat16 can explain, and ids part about as often."""
    watched = Watched(load(folder / family), recorded=True)
    prompts = {i: some_ids(2 + 17 * i, 50 + i) for i in range(8)}
    watched.prefill(prompts, lambda _: GREEDY, 256)
    for _ in range(30):
        watched.hand.step(dict.fromkeys(range(8), 1))
    cpu, in_16_bits = exact(folder / family), Reference(folder / family)
    gaps, errors, num_like_reference = [], [], 0
    for row, prompt in prompts.items():
        ids, start = watched.hand.ids[row], len(prompt) - 1
        logits, rounded = score(cpu.assembly, ids[:-1])[start:], in_16_bits.score(ids[:-1])[start:].float()
        chosen = torch.tensor(ids[len(prompt) :])
        gaps += (logits.max(-1).values - logits.gather(1, chosen[:, None])[:, 0]).tolist()
        errors += (logits - rounded).abs().max(-1).values.tolist()
        num_like_reference += int((logits.argmax(-1) != rounded.argmax(-1)).sum())
    parted = sorted(gap for gap in gaps if gap > 0)
    limit = 2 * 1.5 * max(errors)  # both logits of a pair are off, and ours a little more than the reference's
    told = (
        f"{family}: {len(parted)} of {len(gaps)} ids are not float32's, by up to {max(gaps):.3f}; of the reference in "
        f"bfloat16 {num_like_reference} would not be, and its logits are off by up to {max(errors):.3f}"
    )
    print(told)
    assert max(gaps) < limit, told
    assert len(parted) <= 2 * num_like_reference + 5, told


# ---- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("graph_rows", [SIZES, ()], ids=["recorded", "eager"])
def test_a_poisoned_slot_fails_its_row_alone(folder: Path, graph_rows: tuple[int, ...], which: str) -> None:
    """NaN in one row's keys or values: that row fails, its neighbours in the batch get the ids of a clean run, and so
    does whoever takes over the block."""
    clean, poisoned = (run_with_fault(folder / "llama", graph_rows, fault) for fault in (None, which))
    assert [row for row, _ in poisoned.outputs[-1].failed] == []
    assert poisoned.ids == {**clean.ids, 1: poisoned.ids[1]}, "a neighbour's ids changed"


def run_with_fault(path: Path, graph_rows: tuple[int, ...], which: str | None) -> HandScheduler:
    """Rows 0 to 2 decode, the fault hits row 1, which leaves; row 3 takes its block."""
    runner = load(path, graph_rows)
    hand = HandScheduler(runner.execute, runner.report().groups, 32)
    runner.allocate(hand.layout)
    rows = [hand.add(some_ids(9 + i, i)) for i in range(3)]
    hand.step({row: 9 + row for row in rows})
    for _ in range(3):
        hand.step(dict.fromkeys(rows, 1))
    if which is not None:
        block = hand.tables[1][0][0]
        getattr(runner._caches[0], which)[block, :, 4] = torch.nan
        output = hand.step(dict.fromkeys(rows, 1))
        assert [row for row, _ in output.failed] == [1], f"NaN in {which}: failed rows are {output.failed}"
        assert "NaN" in output.failed[0][1]
        assert output.num_tokens == [1, 0, 1]
    else:
        hand.step(dict.fromkeys(rows, 1))
    block = hand.tables[1][0][0]
    gone = hand.ids[1]
    hand.remove(1)
    late = hand.add(some_ids(20, 9), row=3)
    hand.step({0: 1, 2: 1, late: 20})
    assert hand.tables[late][0][0] == block, "the test wanted the row to take over the poisoned block"
    for _ in range(6):
        hand.step({0: 1, 2: 1, late: 1})
    hand.ids[1] = gone
    return hand
